// The kernel keeps listings and names: they change when what they show changes, whoever changed it.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

using Names = std::set<std::string>;

/// Every name, with how often it was listed.
std::map<std::string, int> list(const std::string& path) {
  std::map<std::string, int> names;
  DIR* stream = ::opendir(path.c_str());
  EXPECT_NE(stream, nullptr) << path;
  while (dirent* entry = stream != nullptr ? ::readdir(stream) : nullptr) ++names[entry->d_name];
  if (stream != nullptr) ::closedir(stream);
  names.erase(".");
  names.erase("..");
  return names;
}

Names names_in(const std::string& path) {
  Names names;
  for (const auto& [name, times] : list(path)) {
    EXPECT_EQ(times, 1) << name;
    names.insert(name);
  }
  return names;
}

class ListingTest : public MountTest {
 protected:
  /// Asks the daemon, as `ptc` does; the answer.
  std::string ask(const std::string& question) {
    std::string answer = mount_.top() + "/answer";
    shell("exec 3<>" + mount_.path() + "/.ptc/ask && printf '%s' '" + question +
          "' >&3 && cat <&3 >" + answer);
    return read_file(answer);
  }
  void save_layout(const std::string& text) {
    ASSERT_EQ(write_file(job("layout.json"), text), 0);
    for (int i = 0; i < 1000; ++i) {
      std::string status = read_file(job("status.json"));
      if (status.find("\"idle\"") != std::string::npos) return;
      ::usleep(5000);
    }
    FAIL() << read_file(job("status.json"));
  }
};

TEST_F(ListingTest, FollowsWhatTheDaemonDoes) {
  EXPECT_EQ(names_in(job()).count("current"), 0u);
  EXPECT_EQ(names_in(job("checkpoints")), Names());
  write_incoming(job(), "a");
  EXPECT_EQ(names_in(job("incoming")), Names{"a"});
  ASSERT_EQ(commit(job(), "a"), 0);
  EXPECT_EQ(names_in(job("incoming")), Names());
  EXPECT_EQ(names_in(job()).count("current"), 1u);
  EXPECT_EQ(names_in(job("checkpoints")), Names{"a"});
  EXPECT_EQ(names_in(job("checkpoints/a/layouts")), Names{"tp1-pp1-dp1"});
  save_layout(R"({"tp":1,"pp":1,"dp":2})");
  EXPECT_EQ(names_in(job("checkpoints/a/layouts")), Names{"tp1-pp1-dp2"});

  write_incoming(job(), "b");
  ASSERT_EQ(commit(job(), "b"), 0);
  EXPECT_EQ(names_in(job("checkpoints")), (Names{"a", "b"}));
  save_layout(R"({"tp":1,"pp":1,"dp":2,"keep":1})");
  for (int i = 0; i < 1000 && names_in(job("checkpoints")).size() > 1; ++i) ::usleep(5000);
  EXPECT_EQ(names_in(job("checkpoints")), Names{"b"});
  struct stat stat = {};
  EXPECT_NE(::stat(job("checkpoints/a").c_str(), &stat), 0) << "a name that has gone";
  EXPECT_EQ(errno, ENOENT);

  write_incoming(job(), "bad");
  ASSERT_EQ(::truncate(job("incoming/bad/rank/0/model.safetensors").c_str(), 20), 0);
  EXPECT_EQ(names_in(job("incoming")), Names{"bad"});
  EXPECT_EQ(commit(job(), "bad"), ECANCELED);
  EXPECT_EQ(names_in(job("incoming")), (Names{"bad", "bad.error"}));
}

TEST_F(ListingTest, CurrentIsNeverTheOldOne) {
  write_incoming(job(), "a");
  ASSERT_EQ(commit(job(), "a"), 0);
  for (int i = 0; i < 20; ++i) {
    std::string dp = std::to_string(1 + i % 2);
    // The name is in the kernel's cache before the flip.
    char target[256];
    ASSERT_GT(::readlink(job("current").c_str(), target, sizeof(target)), 0);
    save_layout("{\"tp\":1,\"pp\":1,\"dp\":" + dp + "}");
    ssize_t size = ::readlink(job("current").c_str(), target, sizeof(target));
    ASSERT_GT(size, 0);
    EXPECT_EQ(std::string(target, size), "checkpoints/a/layouts/tp1-pp1-dp" + dp) << i;
  }
}

TEST_F(ListingTest, LargeAndChangingShowsEveryLastingNameOnce) {
  const std::string many = job("incoming/many");
  ASSERT_EQ(::mkdir(many.c_str(), 0755), 0);
  Names lasting;
  for (int i = 0; i < 3000; ++i) {
    std::string name = "a file with a name of some length, number " + std::to_string(i);
    ASSERT_EQ(::mknod((many + "/" + name).c_str(), S_IFREG | 0644, 0), 0);
    lasting.insert(name);
  }
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int i = 0; !stop; ++i) {
      std::string path = many + "/coming and going " + std::to_string(i % 100);
      ::mknod(path.c_str(), S_IFREG | 0644, 0);
      ::unlink((many + "/coming and going " + std::to_string((i + 50) % 100)).c_str());
    }
  });
  for (int round = 0; round < 5; ++round) {
    std::map<std::string, int> listed = list(many);
    for (const std::string& name : lasting) EXPECT_EQ(listed[name], 1) << name;
  }
  stop = true;
  changer.join();
}

TEST_F(ListingTest, AJobRemovedByCommandIsGoneAtOnce) {
  ASSERT_EQ(::mkdir((mount_.path() + "/other").c_str(), 0755), 0);
  EXPECT_EQ(names_in(mount_.path()).count("other"), 1u);
  struct stat stat = {};
  ASSERT_EQ(::stat((mount_.path() + "/other/incoming").c_str(), &stat), 0);
  std::string answer = ask(R"({"do":"remove","job":"other","force":true})");
  EXPECT_EQ(names_in(mount_.path()).count("other"), 0u) << answer;
  EXPECT_NE(::stat((mount_.path() + "/other").c_str(), &stat), 0);
}

}  // namespace
}  // namespace ptc
