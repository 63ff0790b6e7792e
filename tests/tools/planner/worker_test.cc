#include "tools/planner/run/worker.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/fuse.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/store/temp_dir.h"
#include "tools/planner/run/processes.h"

namespace ptc::planner {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Worker::Ended wait_for(Worker& worker) {
  for (;;) {
    if (const auto how = worker.ended()) return *how;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void wait_for_text(const std::string& path, const std::string& text) {
  while (text_of(path).find(text) == std::string::npos)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

bool lives(pid_t pid) {
  const auto facts = facts_of(pid);
  return facts && !facts->has_ended;
}

TEST(Worker, HasWhatItIsGivenAndTellsHowItEnded) {
  const TempDir scratch;
  auto started = Worker::start({{"sh", "-c", "echo $PTC_JOB in $PWD; exit 3"},
                                scratch.file(""),
                                scratch.file("log"),
                                {{"PTC_JOB", "here"}}});
  ASSERT_TRUE(started);
  EXPECT_EQ(wait_for(started.value()).status, 3);
  const std::string there = std::filesystem::canonical(scratch.file(".")).string();
  EXPECT_EQ(text_of(scratch.file("log")), "here in " + there + "\n");
  const auto missing = Worker::start({{"./none"}, scratch.file(""), scratch.file("log"), {}});
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().message(), HasSubstr("starting ./none in " + scratch.file("")));
}

TEST(Worker, WaitsUntilItIsWrittenDown) {
  const TempDir scratch;
  const WorkerCommand command{
      {"sh", "-c", "echo here $0; exit 5", "it"}, scratch.file(""), scratch.file("log"), {}};
  {
    auto prepared = Worker::prepare(command);
    ASSERT_TRUE(prepared);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(text_of(scratch.file("log")), "");
    auto found = Worker::find(prepared.value().id());
    ASSERT_TRUE(found);
    prepared.value().go();
    EXPECT_EQ(wait_for(prepared.value()).status, 5);
    EXPECT_EQ(text_of(scratch.file("log")), "here it\n");
    wait_for(*found);
  }
  std::filesystem::remove(scratch.file("log"));
  std::optional<Worker> found;
  {
    auto prepared = Worker::prepare(command);
    ASSERT_TRUE(prepared);
    found = Worker::find(prepared.value().id());
    ASSERT_TRUE(found);
  }  // as if this process had ended
  wait_for(*found);
  EXPECT_EQ(text_of(scratch.file("log")), "");
  WorkerCommand missing = command;
  for (const char* name : {"./none", "no-such-program-at-all", "/"}) {
    missing.command = {name};
    const auto prepared = Worker::prepare(missing);
    ASSERT_FALSE(prepared) << name;
    EXPECT_THAT(prepared.error().message(), HasSubstr("there is no such program"));
  }
}

TEST(Worker, IsFoundAgainAndNobodyElseIs) {
  const TempDir scratch;
  auto started = Worker::start(
      {{"sh", "-c", "trap 'echo asked; exit 9' TERM; echo there; while :; do sleep 0.05; done"},
       scratch.file(""),
       scratch.file("log"),
       {}});
  ASSERT_TRUE(started);
  Worker& worker = started.value();
  wait_for_text(scratch.file("log"), "there");
  EXPECT_FALSE(Worker::find({worker.pid(), worker.id().started_at + "1", ""}));
  EXPECT_FALSE(Worker::find({worker.pid(), "", ""}));
  auto found = Worker::find(worker.id());
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->ended());
  found->ask_to_end();
  EXPECT_EQ(wait_for(worker).status, 9);
  EXPECT_THAT(text_of(scratch.file("log")), HasSubstr("asked"));
  EXPECT_FALSE(wait_for(*found).status);
}

/// As "./train.sh" that runs a trainer, and hands no signal on; the trainer is there.
Worker start_shell_and_trainer(const TempDir& scratch) {
  auto started = Worker::start(
      {{"sh", "-c",
        "sh -c \"trap 'sleep 0.3; echo saved; exit 0' TERM; echo there; while :; do sleep 0.05; "
        "done\"; exit 1"},
       scratch.file(""),
       scratch.file("log"),
       {}});
  EXPECT_TRUE(started);
  wait_for_text(scratch.file("log"), "there");
  return std::move(started).value();
}

TEST(Worker, LetsWhomAShellLeavesBehindSave) {
  const TempDir scratch;
  Worker started = start_shell_and_trainer(scratch);
  started.ask_to_end();
  EXPECT_EQ(wait_for(started).status, 128 + SIGTERM);
  EXPECT_THAT(text_of(scratch.file("log")), HasSubstr("saved"));
}

/// Though the command itself has ended, and who had started it: nobody is started beside them.
TEST(Worker, FindsWhomAShellHasLeftBehind) {
  const TempDir scratch;
  Worker started = start_shell_and_trainer(scratch);
  ::kill(started.pid(), SIGKILL);
  wait_for_text("/proc/" + std::to_string(started.pid()) + "/stat", ") Z");
  auto found = Worker::find(started.id(), true);
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->ended());
  wait_for_text(scratch.file("log"), "saved");
  started.kill();
  wait_for(started);
  wait_for(*found);
  EXPECT_FALSE(Worker::find(started.id(), true));
}

/// Whoever was found again may have ended and left its ranks.
TEST(Worker, KillsTheGroupOfOneThatWasFound) {
  const TempDir scratch;
  auto started = Worker::start({{"sh", "-c", "sh -c 'echo there $$; exec sleep 1000' & wait"},
                                scratch.file(""),
                                scratch.file("log"),
                                {}});
  ASSERT_TRUE(started);
  wait_for_text(scratch.file("log"), "there");
  auto found = Worker::find(started.value().id());
  ASSERT_TRUE(found);
  ::kill(started.value().pid(), SIGKILL);
  wait_for(*found);
  const std::string child = text_of(scratch.file("log")).substr(6);
  const std::string stat = text_of("/proc/" + std::to_string(std::stoi(child)) + "/stat");
  EXPECT_TRUE(stat.empty() || stat.find(") Z") != std::string::npos) << stat;
  wait_for(started.value());
}

TEST(Worker, IsNoProcessThatLeadsNoSession) {
  EXPECT_FALSE(Worker::find({1, "x 1", ""}));
  EXPECT_FALSE(Worker::find({0, "x 1", ""}));
  EXPECT_FALSE(Worker::find({-1, "x 1", ""}));
}

TEST(Worker, LeavesNobodyBehind) {
  const TempDir scratch;
  auto started = Worker::start(
      {{"sh", "-c", "sleep 1000 & echo $!; exit 0"}, scratch.file(""), scratch.file("log"), {}});
  ASSERT_TRUE(started);
  wait_for(started.value());
  const auto child = static_cast<pid_t>(std::stol(text_of(scratch.file("log"))));
  // It is somebody else's to reap; until then it is a zombie.
  const std::string stat = "/proc/" + std::to_string(child) + "/stat";
  for (int i = 0; i < 500 && text_of(stat).find(") S") != std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(text_of(stat).find(") S"), std::string::npos);
}

/// As torchrun starts ranks, each in a session of its own, and does not live to end them.
TEST(Worker, EndsWhomItHasStartedInOtherSessions) {
  const TempDir scratch;
  const WorkerCommand command{{"sh", "-c", "setsid sh -c 'echo there $$; exec sleep 1000' & wait"},
                              scratch.file(""),
                              scratch.file("log"),
                              {}};
  for (const bool was_found : {false, true}) {
    std::filesystem::remove(scratch.file("log"));
    auto started = Worker::start(command);
    ASSERT_TRUE(started);
    wait_for_text(scratch.file("log"), "there");
    const pid_t rank = std::stoi(text_of(scratch.file("log")).substr(6));
    ASSERT_TRUE(lives(rank));
    ASSERT_NE(::getsid(rank), started.value().pid());
    EXPECT_THAT(started.value().members().value(), Contains(rank));
    ::kill(started.value().pid(), SIGKILL);
    if (was_found) {
      wait_for_text("/proc/" + std::to_string(started.value().pid()) + "/stat", ") Z");
      WorkerId group_alone = started.value().id();
      group_alone.mark = "";
      EXPECT_FALSE(Worker::find(group_alone));
      auto found = Worker::find(started.value().id());
      ASSERT_TRUE(found);
      wait_for(*found);
    } else {
      EXPECT_EQ(wait_for(started.value()).status, 128 + SIGKILL);
    }
    EXPECT_FALSE(lives(rank));
    wait_for(started.value());
    EXPECT_FALSE(facts_of(rank)) << "it is a child of this process since, and was not reaped";
    EXPECT_FALSE(Worker::find(started.value().id()));
  }
}

TEST(Worker, IsAskedToEndWithThoseInOtherSessions) {
  const TempDir scratch;
  auto started = Worker::start(
      {{"sh", "-c",
        "setsid sh -c \"trap 'echo saved; exit 0' TERM; echo there; while :; do sleep 0.05; "
        "done\" & wait"},
       scratch.file(""),
       scratch.file("log"),
       {}});
  ASSERT_TRUE(started);
  wait_for_text(scratch.file("log"), "there");
  started.value().ask_to_end();
  wait_for(started.value());
  EXPECT_THAT(text_of(scratch.file("log")), HasSubstr("saved"));
}

/// A number that another process has by now is nobody's of it.
TEST(Worker, EndsNobodyWhoHasItsNumber) {
  const TempDir scratch;
  auto other = Worker::start({{"sleep", "1000"}, scratch.file(""), scratch.file("log"), {}});
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // two never begin in the same tick
  auto ended = Worker::start({{"true"}, scratch.file(""), scratch.file("log"), {}});
  ASSERT_TRUE(other && ended);
  wait_for(ended.value());
  WorkerId former = ended.value().id();
  former.pid = other.value().pid();
  former.mark = "";
  EXPECT_FALSE(Worker::find(former));
  EXPECT_FALSE(Worker::find(former, true));
  EXPECT_TRUE(lives(other.value().pid()));
  other.value().kill();
  EXPECT_EQ(wait_for(other.value()).status, 128 + SIGKILL);
}

/// Whose first thread has ended, as that of a rank that was killed while another one waits for a
/// device: `ps` shows a zombie, and its memory cannot be read by its number.
TEST(Worker, HasNotEndedWhileAThreadOfItLives) {
  const TempDir scratch;
  const std::string program =
      "import ctypes, os, threading, time\n"
      "threading.Thread(target=lambda: time.sleep(1000)).start()\n"
      "print('there', os.getpid(), flush=True)\n"
      // exit() of this thread, by its number
      "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\n";
  auto started = Worker::start({{"sh", "-c", "setsid python3 -c \"$0\" & wait", program},
                                scratch.file(""),
                                scratch.file("log"),
                                {}});
  ASSERT_TRUE(started);
  wait_for_text(scratch.file("log"), "there");
  const pid_t rank = std::stoi(text_of(scratch.file("log")).substr(6));
  wait_for_text("/proc/" + std::to_string(rank) + "/stat", ") Z");
  EXPECT_TRUE(lives(rank));
  EXPECT_THAT(started.value().members().value(), Contains(rank));
  auto found = Worker::find(started.value().id());
  ASSERT_TRUE(found);
  EXPECT_THAT(found->members().value(), Contains(rank));
  started.value().kill();
  wait_for(started.value());
  EXPECT_FALSE(lives(rank));
}

/// A command of a command: the outer one ends with all of them, the inner one alone.
TEST(Worker, AnOuterOneHasTheInnerOnes) {
  const TempDir scratch;
  auto outer = Worker::start({{"sleep", "1000"}, scratch.file(""), scratch.file("log"), {}});
  ASSERT_TRUE(outer);
  ::setenv("PTC_WORKER", outer.value().id().mark.c_str(), 1);
  auto inner = Worker::start({{"sleep", "1000"}, scratch.file(""), scratch.file("log"), {}});
  ::unsetenv("PTC_WORKER");
  ASSERT_TRUE(inner);
  // Whose it is can be read once it is that command.
  while (outer.value().members().value().size() < 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_THAT(outer.value().members().value(),
              testing::UnorderedElementsAre(outer.value().pid(), inner.value().pid()));
  EXPECT_THAT(inner.value().members().value(), testing::ElementsAre(inner.value().pid()));
  outer.value().kill();
  EXPECT_EQ(wait_for(inner.value()).status, 128 + SIGKILL);
  EXPECT_EQ(wait_for(outer.value()).status, 128 + SIGKILL);
}

/// A file system whose daemon never answers; whoever looks into it cannot be killed.
class SilentFileSystem {
 public:
  SilentFileSystem() {
    device_ = UniqueFd(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
    const std::string options =
        "fd=" + std::to_string(device_.get()) + ",rootmode=40000,user_id=0,group_id=0";
    is_mounted_ = device_.valid() && ::mount("silent", top_.file("").c_str(), "fuse",
                                             MS_NOSUID | MS_NODEV, options.c_str()) == 0;
    if (is_mounted_) answer_the_first();
  }
  SilentFileSystem(const SilentFileSystem&) = delete;
  ~SilentFileSystem() {
    end();
    if (is_mounted_) ::umount2(top_.file("").c_str(), MNT_DETACH);
  }
  bool is_mounted() const { return is_mounted_; }
  std::string path() const { return top_.file("name"); }
  /// The next question has come, and gets no answer.
  bool was_asked() { return ::read(device_.get(), buffer_.data(), buffer_.size()) > 0; }
  /// Whoever waits gets an error.
  void end() { device_.reset(); }

 private:
  void answer_the_first() {
    is_mounted_ = was_asked();
    const auto* request = reinterpret_cast<const fuse_in_header*>(buffer_.data());
    struct {
      fuse_out_header header;
      fuse_init_out init;
    } answer = {};
    answer.header = {sizeof answer, 0, request->unique};
    answer.init.major = FUSE_KERNEL_VERSION;
    answer.init.minor = FUSE_KERNEL_MINOR_VERSION;
    answer.init.max_write = 4096;
    is_mounted_ = is_mounted_ && ::write(device_.get(), &answer, sizeof answer) == sizeof answer;
  }

  const TempDir top_;
  UniqueFd device_;
  std::vector<char> buffer_ = std::vector<char>(1 << 18);
  bool is_mounted_ = false;
};

TEST(Worker, IsNotSaidToHaveEndedWhileItCannotBeKilled) {
  SilentFileSystem silent;
  if (!silent.is_mounted()) GTEST_SKIP() << "no FUSE, or not root";
  const TempDir scratch;
  auto started =
      Worker::start({{"stat", silent.path()}, scratch.file(""), scratch.file("log"), {}});
  ASSERT_TRUE(started);
  ASSERT_TRUE(silent.was_asked());
  started.value().kill();
  auto found = Worker::find(started.value().id());
  ASSERT_TRUE(found);
  for (int i = 0; i < 40; ++i) {
    ASSERT_FALSE(started.value().ended());
    ASSERT_FALSE(found->ended());
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_THAT(started.value().members().value(), Contains(started.value().pid()));
  silent.end();
  EXPECT_EQ(wait_for(started.value()).status, 128 + SIGKILL);
  wait_for(*found);
  EXPECT_THAT(started.value().members().value(), IsEmpty());
}

}  // namespace
}  // namespace ptc::planner
