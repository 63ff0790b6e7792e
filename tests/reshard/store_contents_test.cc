// What a store does with directories of jobs that nothing names.
#include "reshard/node/store_contents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>

#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;

class StoreContentsTest : public ::testing::Test {
 protected:
  std::string job(const std::string& name) const { return (dir_.path() / "jobs" / name).string(); }
  void open() {
    images_ = ImageStore::open((dir_.path() / "images").string()).value();
    contents_ = std::make_unique<StoreContents>(dir_.path(), *images_);
  }

  TempDir dir_;
  std::unique_ptr<ImageStore> images_;
  std::unique_ptr<StoreContents> contents_;
};

/// Also where only part of what a job begins with is there: a removal was broken off, or a making.
TEST_F(StoreContentsTest, WhatNobodyRemovedIsKeptWhereAnythingIsInIt) {
  write_file(job("staged") + "/files/incoming/x/notes", "of a user");
  write_file(job("beside") + "/files/notes", "of a user, and there is no incoming/");
  write_file(job("set") + "/files/dataset/notes", "of a user, and there is no incoming/");
  write_file(job("taken") + "/committing/notes", "of a commit");
  fs::create_directories(job("empty") + "/files/incoming");
  fs::create_directories(job("begun"));
  open();
  ASSERT_TRUE(contents_->settle_directories({}, {}).has_value());
  EXPECT_THAT(contents_->kept(), ::testing::UnorderedElementsAre("jobs/staged", "jobs/beside",
                                                                 "jobs/set", "jobs/taken"));
  for (const char* name : {"staged", "beside", "set", "taken"}) EXPECT_TRUE(fs::exists(job(name)));
  for (const char* name : {"empty", "begun"}) EXPECT_FALSE(fs::exists(job(name)));
  // Nor does a new job of the name take them away.
  ASSERT_TRUE(contents_->open_job_directory("beside", "0123", {}, /*is_new=*/true).has_value());
  EXPECT_EQ(read_file(dir_.path() / "kept/beside-/files/notes"),
            "of a user, and there is no incoming/");
}

}  // namespace
}  // namespace ptc::testing
