// What is said to have happened to a job, of what was known and is known now; and its file.
#include "reshard/job/job_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json/parse.hpp>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace ptc {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

std::vector<std::string> kinds_of(const std::vector<json::object>& events) {
  std::vector<std::string> kinds;
  for (const json::object& event : events) kinds.emplace_back(event.at("event").as_string());
  return kinds;
}

EventView::Checkpoint seen_checkpoint(const std::string& id) {
  EventView::Checkpoint one;
  one.id = id;
  one.layout = "tp1-pp1-dp1";
  one.tensors = 3;
  one.bytes = 300;
  return one;
}

TEST(EventsBetween, NothingWhereNothingHasChanged) {
  EventView view;
  view.checkpoints["base"] = seen_checkpoint("1");
  view.alive = {"a", "b"};
  view.unreadable["old"] = true;
  view.revision = 3;
  EXPECT_THAT(events_between(view, view), IsEmpty());
}

TEST(EventsBetween, CommitsAndRemovals) {
  EventView before, after;
  before.checkpoints["gone"] = seen_checkpoint("1");
  before.checkpoints["again"] = seen_checkpoint("2");
  after.checkpoints["again"] = seen_checkpoint("3");  // removed, and another has its name
  after.checkpoints["new"] = seen_checkpoint("4");
  const auto events = events_between(before, after);
  EXPECT_THAT(kinds_of(events), ElementsAre("commit", "commit", "removed"));
  EXPECT_EQ(events[0].at("checkpoint").as_string(), "again");
  EXPECT_EQ(events[1].at("bytes").as_uint64(), 300u);
  EXPECT_EQ(events[2].at("checkpoint").as_string(), "gone");
}

TEST(EventsBetween, WhatCannotBeReadIsNoRemoval) {
  EventView before, after;
  before.checkpoints["base"] = seen_checkpoint("1");
  after.unreadable["base"] = true;
  EXPECT_THAT(kinds_of(events_between(before, after)), ElementsAre("not_readable"));
  EXPECT_THAT(kinds_of(events_between(after, before)), ElementsAre("readable_again"));
  EXPECT_THAT(kinds_of(events_between(after, EventView())), ElementsAre("removed"));
}

TEST(EventsBetween, LossesDamageAndNodes) {
  EventView before, after;
  before.alive = {"a", "b"};
  before.checkpoints["base"] = after.checkpoints["base"] = seen_checkpoint("1");
  after.alive = {"a", "c"};
  after.drained = {"c"};
  after.checkpoints["base"].lost = 2;
  after.checkpoints["base"].damaged = 1;
  after.checkpoints["base"].mended = 1;
  after.checkpoints["base"].pinned = true;
  EXPECT_THAT(kinds_of(events_between(before, after)),
              ElementsAre("nodes_came", "nodes_went", "nodes_drained", "pinned", "lost", "mended",
                          "damage"));
  EXPECT_THAT(kinds_of(events_between(after, before)),
              ElementsAre("nodes_came", "nodes_went", "nodes_in_service", "unpinned", "found_again",
                          "damage"));
}

TEST(EventsBetween, AThousandNodesAreOneEvent) {
  EventView before, after;
  for (int node = 1000; node < 2000; ++node) after.alive.push_back(std::to_string(node));
  const auto events = events_between(before, after);
  ASSERT_THAT(kinds_of(events), ElementsAre("nodes_came"));
  EXPECT_THAT(events[0].at("nodes").as_array(), SizeIs(16));
  EXPECT_EQ(events[0].at("more_nodes").as_uint64(), 984u);
}

TEST(EventsBetween, WhyALayoutWasRefusedIsNotTold) {
  EventView before, after;
  after.layout_refused_ns = 1;
  after.last_error = "layout.json: a secret";
  auto events = events_between(before, after);
  ASSERT_THAT(kinds_of(events), ElementsAre("layout_refused"));
  EXPECT_FALSE(events[0].contains("why"));
  after.layout_refused_ns = 0;
  after.commits_refused = 1;
  events = events_between(before, after);
  ASSERT_THAT(kinds_of(events), ElementsAre("commit_refused"));
  EXPECT_EQ(events[0].at("why").as_string(), "layout.json: a secret");
}

class JobEventsFile : public testing::Test {
 protected:
  JobEventsFile() { std::filesystem::create_directories(directory_); }
  ~JobEventsFile() override { std::filesystem::remove_all(directory_); }

  static std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }
  void note(JobEvents& events, int64_t revision) {
    auto known = std::make_shared<KnownJob>();
    known->saved.revision = revision;
    events.note([&] { return known; });
  }

  const std::string directory_ = testing::TempDir() + "job-events-" + std::to_string(::getpid());
  const std::string path_ = directory_ + "/events.jsonl";
};

TEST_F(JobEventsFile, GoesOnAfterATornLine) {
  {
    JobEvents events(path_, "a");
    note(events, 2);  // before it has begun
    events.begin(KnownJob());
    note(events, 2);
    note(events, 2);
    EXPECT_THAT(lines(events.text()), SizeIs(2));
    events.end();
    note(events, 3);
    EXPECT_THAT(lines(events.text()), SizeIs(2));
  }
  std::ofstream(path_, std::ios::app) << R"({"seq":3,"time":"20)";
  JobEvents events(path_, "a");
  EXPECT_THAT(lines(events.text()), SizeIs(2));
  events.begin(KnownJob());
  const auto all = lines(events.text());
  ASSERT_THAT(all, SizeIs(3));
  const json::object last = boost::json::parse(all.back()).as_object();
  EXPECT_EQ(last.at("event").as_string(), "daemon_started");
  EXPECT_EQ(last.at("seq").to_number<uint64_t>(), 3u);
}

TEST_F(JobEventsFile, KeepsTheLastOnes) {
  JobEvents events(path_, "a");
  events.begin(KnownJob());
  for (int64_t revision = 1; revision <= 2500; ++revision) note(events, revision);
  const auto shown = lines(events.text());
  EXPECT_THAT(shown, SizeIs(JobEvents::kMost));
  EXPECT_NE(shown.back().find("\"revision\":2500"), std::string::npos);
  std::ifstream file(path_);
  std::stringstream kept;
  kept << file.rdbuf();
  EXPECT_LE(lines(kept.str()).size(), 2 * JobEvents::kMost);
}

TEST_F(JobEventsFile, RubbishInItHoldsUpNothing) {
  std::ofstream(path_) << "rubbish\n\n[1]\n";
  JobEvents events(path_, "a");
  events.begin(KnownJob());
  EXPECT_THAT(lines(events.text()), SizeIs(4));
}

TEST_F(JobEventsFile, WithoutItsDirectoryNothingIsKept) {
  JobEvents events(directory_ + "/none/events.jsonl", "a");
  events.begin(KnownJob());
  note(events, 2);
  EXPECT_EQ(events.text(), "");
}

}  // namespace
}  // namespace ptc
