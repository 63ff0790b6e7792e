// What a job is busy with, and who is in doubt or waits for whom.
#include "reshard/job/activity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "reshard/cluster/keyed_lock.h"
#include "reshard/job/doubts.h"

namespace ptc {
namespace {

TEST(Activities, WhatOneEndsIsNoOthers) {
  Activities all;
  auto led = all.begin({Activity::Kind::kReshard, "base", "tp1", "tp2"});
  led->begin("moving", 100);
  led->bytes_done() = 40;
  {
    auto part = all.begin({Activity::Kind::kPart, "older", "tp1", "tp1"});
    part->begin("moving", 7);
    EXPECT_EQ(all.reshard()->subject.checkpoint, "base");  // what is led here comes first
  }
  ASSERT_TRUE(all.reshard().has_value());
  EXPECT_EQ(all.reshard()->bytes_done, 40u);
  EXPECT_EQ(all.reshard()->phase, "moving");
  led.reset();
  EXPECT_FALSE(all.any_reshard());
}

TEST(Activities, ANewerEditStopsReshardsAndNoCommits) {
  Activities all;
  auto led = all.begin({Activity::Kind::kReshard, "base", "", ""});
  auto part = all.begin({Activity::Kind::kPart, "base", "", ""});
  auto commit = all.begin({Activity::Kind::kCommit, "next", "incoming/next", ""});
  auto fetch = all.begin({Activity::Kind::kFetch, "id", "", "manifest.json"});
  all.stop_reshards();
  EXPECT_TRUE(led->stop_token().stop_requested());
  EXPECT_TRUE(part->stop_token().stop_requested());
  EXPECT_FALSE(commit->stop_token().stop_requested());
  led.reset();
  part.reset();
  EXPECT_FALSE(all.any_reshard());  // a commit is none
  EXPECT_EQ(all.commits().size(), 1u);
  EXPECT_FALSE(fetch->stop_token().stop_requested());
  ASSERT_EQ(all.fetches().size(), 1u);
  EXPECT_EQ(all.fetches().front().subject.to, "manifest.json");
  all.stop_all();
  EXPECT_TRUE(fetch->stop_token().stop_requested());
  EXPECT_TRUE(commit->stop_token().stop_requested());
  EXPECT_TRUE(all.begin({Activity::Kind::kReshard, "late", "", ""})->stop_token().stop_requested());
}

TEST(KeyedLock, OneKeyWaitsAndAnotherDoesNot) {
  KeyedLock lock;
  std::atomic<bool> got = false;
  std::jthread waits;
  {
    const KeyedLock::Held held = lock.hold("a");
    const KeyedLock::Held other = lock.hold("b");
    waits = std::jthread([&] {
      const KeyedLock::Held same = lock.hold("a");
      got = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(got);
  }
  waits.join();
  EXPECT_TRUE(got);
}

TEST(Doubts, WaitUntilTheyCanBeSettled) {
  Doubts doubts;
  std::vector<int> known;
  for (int i : {1, 2}) doubts.add([&, i] { known.push_back(i); });
  doubts.settle([] { return Result<>(make_error(Code::kUnavailable, "away")); });
  EXPECT_TRUE(doubts.any());
  EXPECT_TRUE(known.empty());
  doubts.settle([&] {
    doubts.add([&] { known.push_back(3); });  // a later one: nobody has asked about it yet
    return Result<>(ok());
  });
  EXPECT_THAT(known, ::testing::ElementsAre(1, 2));
  doubts.settle([] { return Result<>(ok()); });
  EXPECT_THAT(known, ::testing::ElementsAre(1, 2, 3));
  EXPECT_FALSE(doubts.any());
}

}  // namespace
}  // namespace ptc
