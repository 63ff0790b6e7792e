// What a node gives to a commit: taken back whole, unless it was decided.
#include "reshard/intake/commit_share.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;

struct TestSeal : Seal {
  explicit TestSeal(int& open) : open_(open) { ++open_; }
  ~TestSeal() override { --open_; }
  void committed() override {}
  int& open_;
};

class CommitShareTest : public ::testing::Test {
 protected:
  CommitShareTest() {
    fs::create_directories(incoming_ + "/rank/0");
    write_file(file_, "some bytes");
    images_ = ImageStore::open(dir_.path().string() + "/images").value();
  }
  std::shared_ptr<CommitShare> take(GivesWay may_give_way = {}) {
    auto share = CommitShare::take(
        {dir_.path().string() + "/job", images_.get(), &hashes_}, "id", "base",
        [&](GivesWay gives_way) -> Result<std::unique_ptr<Seal>> {
          gives_way_ = std::move(gives_way);
          return std::make_unique<TestSeal>(sealed_);
        },
        std::move(may_give_way));
    EXPECT_TRUE(share.has_value()) << share.error().message();
    return std::move(share).value();
  }
  long images() const {
    long count = 0;
    for (const auto& entry : fs::directory_iterator(dir_.path().string() + "/images"))
      count += !entry.path().has_extension();
    return count;
  }

  TempDir dir_;
  const std::string incoming_ = dir_.path().string() + "/job/files/incoming/base",
                    file_ = incoming_ + "/rank/0/a.txt";
  const std::string hidden_ = dir_.path().string() + "/job/committing/id/base";
  std::unique_ptr<ImageStore> images_;
  HashCache hashes_;
  GivesWay gives_way_;
  int sealed_ = 0;
};

TEST_F(CommitShareTest, GoesBackUnlessItIsDecided) {
  auto share = take();
  EXPECT_EQ(sealed_, 1);
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  EXPECT_TRUE(fs::exists(file_));  // until it is hidden
  ASSERT_TRUE(share->hide().has_value());
  EXPECT_FALSE(fs::exists(file_));
  EXPECT_TRUE(fs::exists(hidden_));
  share.reset();
  EXPECT_TRUE(fs::exists(file_));
  EXPECT_EQ(images(), 0);
  EXPECT_EQ(sealed_, 0);
  EXPECT_EQ(fs::hard_link_count(file_), 1u);
}

TEST_F(CommitShareTest, WhatIsDecidedStays) {
  auto share = take();
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  ASSERT_TRUE(share->hide().has_value());
  share->committed();
  share.reset();
  EXPECT_FALSE(fs::exists(incoming_));
  EXPECT_FALSE(fs::exists(hidden_));
  EXPECT_EQ(images(), 1);
}

TEST_F(CommitShareTest, ItsFilesAreDraftsUntilTheCheckpointsOwnFilesAreHere) {
  auto share = take();
  const auto adopted = share->adopt({"rank/0/a.txt"});
  ASSERT_TRUE(adopted.has_value());
  ASSERT_TRUE(share->hide().has_value());
  share->committed();
  const ImageId id = adopted.value().front()->id();
  EXPECT_TRUE(images_->is_draft(id));  // a start that finds no checkpoint of it removes it
  const auto mode = fs::status(dir_.path().string() + "/images/" + id.text).permissions();
  EXPECT_EQ(mode, fs::perms(0400));  // and it is not its owner's to write any more
}

TEST_F(CommitShareTest, ItsNameCanBeShownMeanwhile) {
  for (const bool decided : {false, true}) {
    for (const bool used : {false, true}) {
      SCOPED_TRACE(fmt::format("decided {}, used {}", decided, used));
      fs::remove_all(incoming_);
      fs::create_directories(incoming_ + "/rank/0");
      write_file(file_, "some bytes");
      fs::permissions(incoming_, fs::perms(0750));
      auto share = take();
      ASSERT_TRUE(share->hide(CommitShare::Name::kShown).has_value());
      const std::shared_ptr<ShownName> shown = share->shown();
      ASSERT_NE(shown, nullptr);
      EXPECT_TRUE(fs::is_empty(incoming_));
      EXPECT_EQ(fs::status(incoming_).permissions(), fs::perms(0750));
      EXPECT_TRUE(fs::exists(hidden_ + "/rank/0/a.txt"));
      if (used) write_file(incoming_ + "/mine", "of somebody else");
      if (decided) share->committed();
      share.reset();
      EXPECT_EQ(fs::exists(hidden_), decided);  // its trace, empty
      if (decided) {
        EXPECT_TRUE(fs::is_empty(hidden_));
      }
      EXPECT_EQ(fs::exists(incoming_ + "/mine"), used);
      const std::string back = used ? incoming_ + "/../recovered-id" : incoming_;
      EXPECT_EQ(fs::exists(back + "/rank/0/a.txt"), !decided);
      EXPECT_EQ(shown->is_at(incoming_), decided || used);
      shown->remove_from(incoming_);
      EXPECT_EQ(fs::exists(incoming_), !decided || used);
      EXPECT_FALSE(fs::exists(hidden_));
      fs::remove_all(back);
    }
  }
}

TEST_F(CommitShareTest, WhatIsInDoubtIsLeftToTheNextStart) {
  auto share = take();
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  ASSERT_TRUE(share->hide().has_value());
  share->leave();
  share.reset();
  EXPECT_TRUE(fs::exists(hidden_));
  EXPECT_EQ(images(), 1);
}

TEST_F(CommitShareTest, AWriteIsNoticedAtTheLastMoment) {
  auto share = take();
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  write_file(file_, "other bytes, past the seal");
  Result<> hidden = share->hide();
  ASSERT_TRUE(hidden.has_error());
  EXPECT_EQ(hidden.error().code(), Code::kBusy);
  share.reset();
  EXPECT_TRUE(fs::exists(file_));

  share = take();
  UniqueFd writer(open(file_.c_str(), O_RDWR));
  EXPECT_EQ(share->adopt({"rank/0/a.txt"}).error().code(), Code::kBusy);
  share.reset();
  EXPECT_EQ(images(), 0);
}

TEST_F(CommitShareTest, GivesWayToAWriter) {
  bool may = false;
  auto share = take([&] { return may; });
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  EXPECT_FALSE(gives_way_());
  EXPECT_EQ(sealed_, 1);
  may = true;
  EXPECT_TRUE(gives_way_());
  EXPECT_EQ(sealed_, 0);
  EXPECT_EQ(images(), 0);  // the file is the user's alone again, at once
  EXPECT_EQ(share->hide().error().code(), Code::kConflict);
  EXPECT_EQ(share->adopt({"rank/0/a.txt"}).error().code(), Code::kConflict);
  EXPECT_EQ(images(), 0);
  EXPECT_TRUE(fs::exists(file_));
}

/// It is hidden between the question whether it may give way and the answer: a decision may rest on
/// it now.
TEST_F(CommitShareTest, WhatIsHiddenMeanwhileDoesNotGiveWay) {
  std::shared_ptr<CommitShare> share;
  share = take([&] { return share->hide().has_value(); });
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  EXPECT_FALSE(gives_way_());
  EXPECT_EQ(sealed_, 1);
  EXPECT_EQ(images(), 1);
  EXPECT_TRUE(fs::exists(hidden_ + "/rank/0/a.txt"));
  share->committed();
}

TEST_F(CommitShareTest, ALinkIsNoWrite) {
  struct stat st {};
  ASSERT_EQ(stat(file_.c_str(), &st), 0);
  hashes_.put(version_of(st), hashes_.begin(version_of(st)), "key", Checksum());
  auto share = take();
  ASSERT_TRUE(share->adopt({"rank/0/a.txt"}).has_value());
  share.reset();
  ASSERT_EQ(stat(file_.c_str(), &st), 0);
  EXPECT_TRUE(hashes_.find(version_of(st), "key").has_value());  // nothing is hashed twice
}

}  // namespace
}  // namespace ptc::testing
