#include "tests/fs/mount_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "fs/mount/beneath.h"

namespace ptc {
namespace {

bool mounted(const std::string& path) {
  std::ifstream lines("/proc/self/mountinfo");
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" " + path + " ") != std::string::npos) return true;
  }
  return false;
}

}  // namespace

TestMount::TestMount() {
  char pattern[] = "/tmp/ptcfs-fs-test-XXXXXX";
  top_ = ::mkdtemp(pattern);
  mount_ = top_ + "/mnt";
  store_ = top_ + "/store";
  ::mkdir(mount_.c_str(), 0755);
  ::mkdir(store_.c_str(), 0755);
}

TestMount::~TestMount() {
  if (running()) terminate();
  while (mounted(mount_) && ::umount2(mount_.c_str(), MNT_DETACH) == 0) {
  }
  while (mounted(store_) && ::umount2(store_.c_str(), MNT_DETACH) == 0) {
  }
  // A daemon that ended by a signal has closed it.
  if (Result<Beneath> beneath = Beneath::open(mount_); beneath.has_value())
    (void)beneath.value().give_back();
  std::error_code ignored;
  std::filesystem::remove_all(top_, ignored);
}

std::string TestMount::why_not() {
  if (::access("/dev/fuse", R_OK | W_OK) != 0) return "no /dev/fuse that can be opened";
  if (::geteuid() != 0) return "not root";
  return "";
}

void TestMount::start(const std::vector<std::string>& options) {
  std::vector<std::string> words = {PTCFS_BINARY, "-f", "--store", store_};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(mount_);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_ = ::fork();
  ASSERT_GE(pid_, 0);
  if (pid_ == 0) {
    int log = ::open((top_ + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(log, 1);
    ::dup2(log, 2);
    ::execv(PTCFS_BINARY, arguments.data());
    ::_exit(127);
  }
  for (int i = 0; i < 2000; ++i) {
    struct stat stat;
    if (mounted(mount_) && ::stat((mount_ + "/.ptc/version").c_str(), &stat) == 0) return;
    int status;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      FAIL() << "ptcfs ended: " << log();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  FAIL() << "ptcfs is not ready: " << log();
}

void TestMount::kill() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

int TestMount::terminate() {
  ::kill(pid_, SIGTERM);
  int status = -1;
  for (int i = 0; i < 1500; ++i) {
    if (::waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill();
  return -1;
}

std::string TestMount::log() const { return read_file(top_ + "/log"); }

void MountTest::SetUp() {
  if (std::string reason = TestMount::why_not(); !reason.empty()) GTEST_SKIP() << reason;
  ASSERT_NO_FATAL_FAILURE(mount_.start());
  ASSERT_EQ(::mkdir(job().c_str(), 0755), 0) << std::strerror(errno);
}

void MountTest::TearDown() {
  if (!mount_.running()) return;
  EXPECT_EQ(mount_.terminate(), 0) << mount_.log();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int write_file(const std::string& path, const std::string& text, int flags) {
  if (flags == 0) flags = O_WRONLY | O_CREAT | O_TRUNC;
  int fd = ::open(path.c_str(), flags, 0644);
  if (fd < 0) return errno;
  for (size_t done = 0; done < text.size();) {
    ssize_t written = ::write(fd, text.data() + done, text.size() - done);
    if (written < 0) {
      int error = errno;
      ::close(fd);
      return error;
    }
    done += static_cast<size_t>(written);
  }
  return ::close(fd) == 0 ? 0 : errno;
}

std::string tiny_safetensors(int rows, int columns) {
  std::vector<float> values(static_cast<size_t>(rows) * columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  size_t bytes = values.size() * sizeof(float);
  std::ostringstream header;
  header << R"({"model.norm.weight":{"dtype":"F32","shape":[)" << rows << "," << columns
         << R"(],"data_offsets":[0,)" << bytes << "]}}";
  std::string text = header.str();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  file += text;
  file.append(reinterpret_cast<const char*>(values.data()), bytes);
  return file;
}

void write_incoming(const std::string& job, const std::string& name) {
  std::string rank = job + "/incoming/" + name + "/rank/0";
  std::filesystem::create_directories(rank);
  ASSERT_EQ(write_file(rank + "/model.safetensors", tiny_safetensors(4, 8)), 0);
  ASSERT_EQ(write_file(rank + "/config.json", R"({"model_type":"llama"})"), 0);
}

int commit(const std::string& job, const std::string& name) {
  constexpr int kTries = 30;  // the same again while it goes on
  int error = EAGAIN;
  for (int tries = 0; tries < kTries && error == EAGAIN; ++tries)
    error = errno_of(
        ::rename((job + "/incoming/" + name).c_str(), (job + "/checkpoints/" + name).c_str()));
  return error;
}

std::string ask(const TestMount& mount, const std::string& question) {
  const int fd = ::open((mount.path() + "/.ptc/ask").c_str(), O_RDWR);
  EXPECT_GE(fd, 0);
  EXPECT_EQ(::write(fd, question.data(), question.size()), static_cast<ssize_t>(question.size()));
  std::string answer(1 << 16, '\0');
  const ssize_t got = ::read(fd, answer.data(), answer.size());
  ::close(fd);
  return answer.substr(0, got < 0 ? 0 : static_cast<size_t>(got));
}

int shell(const std::string& command) {
  int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace ptc
