#include "tools/ptc/mount.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ptc::cli {
namespace {

using testing::HasSubstr;

/// A directory that looks like a mount with the job "llama" in it.
class FindMountTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "ptc-mount-XXXXXX";  // TempDir() ends in a slash
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    top_ = path;
    std::filesystem::create_directories(top_ + "/.ptc");
    std::filesystem::create_directories(top_ + "/llama/checkpoints/base");
    std::ofstream(top_ + "/.ptc/version") << "ptcfs 0.1.0\n";
    std::ofstream(top_ + "/llama/status.json") << "{}";
    std::filesystem::create_symlink("checkpoints/base/layouts/tp1-pp1-dp1",
                                    top_ + "/llama/current");
  }
  void TearDown() override { std::filesystem::remove_all(top_); }

  std::string top_;
};

TEST_F(FindMountTest, FoundFromADirectoryInIt) {
  EXPECT_EQ(find_mount(top_).value(), top_);
  EXPECT_EQ(find_mount(top_ + "/llama/checkpoints").value(), top_);
  EXPECT_EQ(find_mount(top_ + "/llama/").value(), top_);
  auto lost = find_mount("/proc");
  ASSERT_FALSE(lost.has_value());
  EXPECT_THAT(lost.error().message(), HasSubstr("/proc"));
}

TEST_F(FindMountTest, NamesOfJobsAndCheckpoints) {
  for (std::string text : {std::string("llama"), std::string("llama/"), top_ + "/llama"}) {
    auto target = find_target(top_, text).value();
    EXPECT_EQ(target.name(), "llama") << text;
    EXPECT_EQ(target.job_dir(), top_ + "/llama") << text;
  }
  for (std::string text : {std::string("llama/base"), std::string("llama/checkpoints/base"),
                           top_ + "/llama/checkpoints/base/model"}) {
    auto target = find_target(top_, text).value();
    EXPECT_EQ(target.name(), "llama/base") << text;
    EXPECT_EQ(target.checkpoint_dir(), top_ + "/llama/checkpoints/base") << text;
  }
}

TEST_F(FindMountTest, APathLeadsToItsOwnMount) {
  EXPECT_EQ(find_job("/proc", top_ + "/llama").value().mount, top_);
}

TEST_F(FindMountTest, AnUnknownJobIsAnErrorWithTheNearestName) {
  auto target = find_target(top_, "lama");
  ASSERT_FALSE(target.has_value());
  EXPECT_EQ(target.error().code(), Code::kNotFound);
  EXPECT_THAT(target.error().message(), HasSubstr("is it 'llama'?"));
  EXPECT_EQ(find_target(top_, "fresh", true).value().job, "fresh");
}

TEST_F(FindMountTest, WhatIsNoJob) {
  for (std::string text : {std::string(""), std::string("."), std::string(".ptc"), top_,
                           std::string("../x"), std::string("a/b/c/d")}) {
    EXPECT_FALSE(find_target(top_, text).has_value()) << text;
  }
  EXPECT_FALSE(find_job(top_, "llama/base").has_value());
}

TEST_F(FindMountTest, TheCurrentCheckpointIsTheDefault) {
  EXPECT_EQ(with_checkpoint({top_, "llama", ""}).value().checkpoint, "base");
  auto other = with_checkpoint({top_, "llama", "other"});
  ASSERT_FALSE(other.has_value());
  EXPECT_THAT(other.error().message(), HasSubstr("it has base"));
}

}  // namespace
}  // namespace ptc::cli
