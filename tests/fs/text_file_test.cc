#include "fs/nodes/text_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

namespace ptc {
namespace {

using ::testing::ElementsAre;

/// Of a user whom this process is not; root may read all.
const Caller kOther{.uid = 65534, .gid = 65534, .pid = 1};

class TextFileTest : public ::testing::Test {
 protected:
  TextFileTest() : modes_{0644} {}
  FsResult<std::string> read() {
    PTC_TRY(auto opened, file_.open(kOther, O_RDONLY));
    std::array<std::byte, 64> bytes;
    PTC_TRY(const size_t size, opened.handle->read(bytes, 0, [] { return false; }));
    return std::string(reinterpret_cast<const char*>(bytes.data()), size);
  }

  std::vector<mode_t> modes_;  // one a look, the last for ever
  size_t looks_ = 0;
  std::vector<std::string> told_;
  TextFile file_{"key",
                 [this] {
                   told_.push_back("text " + std::to_string(told_.size()));
                   return told_.back();
                 },
                 [this] {
                   struct stat facts = {};
                   facts.st_mode = S_IFREG | modes_[std::min(looks_++, modes_.size() - 1)];
                   facts.st_uid = facts.st_gid = 4711;
                   return facts;
                 }};
};

TEST_F(TextFileTest, ItIsReadByWhoMay) { EXPECT_EQ(read().value(), "text 0"); }

/// The kernel has looked at the mode before.
TEST_F(TextFileTest, WhatIsClosedMeanwhileIsNotOpened) {
  modes_ = {0600};
  EXPECT_EQ(read().error().value, EACCES);
  EXPECT_TRUE(told_.empty());
}

TEST_F(TextFileTest, TheTextIsOfOneMode) {
  modes_ = {0644, 0640, 0644};  // closed and opened again while the first was made
  EXPECT_EQ(read().error().value, EACCES);
  looks_ = 0;
  modes_ = {0644, 0664, 0664};
  EXPECT_EQ(read().value(), "text 2");
}

}  // namespace
}  // namespace ptc
