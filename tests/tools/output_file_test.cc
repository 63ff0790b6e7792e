#include "tools/ptc/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "store/base/file.h"

namespace ptc::cli {
namespace {

class OutputFileTest : public testing::Test {
 protected:
  OutputFileTest() {
    std::string name = testing::TempDir() + "ptc-output-XXXXXX";
    at_ = ::mkdtemp(name.data());
    old_mask_ = ::umask(022);
  }
  ~OutputFileTest() override {
    ::umask(old_mask_);
    std::filesystem::remove_all(at_);
  }
  std::string path(const std::string& name) const { return at_ + "/" + name; }
  static std::string content(const std::string& path) {
    return read_text_file(AT_FDCWD, path, 1 << 20).value();
  }
  static mode_t mode(const std::string& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  }
  static std::string written(const std::string& path, const std::vector<std::string>& inputs = {}) {
    auto file = OutputFile::at(path, inputs);
    if (file.has_error()) return file.error().message();
    const Result<> done = file.value().write("new");
    return done ? "done" : done.error().message();
  }

  std::string at_;
  mode_t old_mask_ = 0;
};

TEST_F(OutputFileTest, IsReplacedAndKeepsItsMode) {
  EXPECT_EQ(written(path("f")), "done");
  EXPECT_EQ(mode(path("f")), 0644u);
  std::filesystem::permissions(path("f"), std::filesystem::perms(0640));
  std::filesystem::create_hard_link(path("f"), path("old"));
  ::truncate(path("f").c_str(), 1);
  EXPECT_EQ(written(path("f")), "done");
  EXPECT_EQ(content(path("f")), "new");
  EXPECT_EQ(content(path("old")), "n");  // another file has its name now
  EXPECT_EQ(mode(path("f")), 0640u);
  std::filesystem::remove(path("old"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(at_), {}), 1);
}

TEST_F(OutputFileTest, LinksStayAndTheirEndsAreWritten) {
  std::filesystem::create_directory(path("d"));
  std::filesystem::create_symlink("d/f", path("link"));
  std::filesystem::create_symlink("link", path("link2"));
  EXPECT_EQ(written(path("link2")), "done");  // nothing there yet
  EXPECT_EQ(content(path("d/f")), "new");
  EXPECT_EQ(written(path("link2")), "done");
  EXPECT_TRUE(std::filesystem::is_symlink(path("link2")));
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  std::filesystem::create_symlink("round", path("round"));
  EXPECT_NE(written(path("round")), "done");
}

TEST_F(OutputFileTest, WhatIsNoFileIsWrittenInto) {
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  std::string got(8, '\0');
  std::thread reader([&] {
    const UniqueFd fd(::open(path("fifo").c_str(), O_RDONLY | O_CLOEXEC));
    got.resize(static_cast<size_t>(std::max<ssize_t>(0, ::read(fd.get(), got.data(), got.size()))));
  });
  EXPECT_EQ(written(path("fifo")), "done");
  reader.join();
  EXPECT_EQ(got, "new");
  EXPECT_TRUE(std::filesystem::is_fifo(path("fifo")));
  EXPECT_EQ(written("/dev/null"), "done");
  EXPECT_TRUE(OutputFile::at("-", {}).value().is_standard_output());
  EXPECT_TRUE(OutputFile::at("/dev/stdout", {}).value().is_standard_output());
}

TEST_F(OutputFileTest, RefusesBeforeAnythingIsWritten) {
  ASSERT_EQ(written(path("in")), "done");
  std::filesystem::create_symlink("in", path("link"));
  std::filesystem::create_hard_link(path("in"), path("hard"));
  for (const char* name : {"in", "link", "hard"})
    EXPECT_EQ(written(path(name), {path("none"), path("in")}),
              path(name) + " is read, and would be overwritten: name another file to write");
  EXPECT_EQ(written(at_), at_ + " is a directory");
  EXPECT_TRUE(OutputFile::at(path("none/f"), {}).has_error());
  EXPECT_TRUE(OutputFile::at(path("none/"), {}).has_error());
  EXPECT_TRUE(OutputFile::at("", {}).has_error());
}

}  // namespace
}  // namespace ptc::cli
