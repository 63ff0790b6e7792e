// What a job does next, as a table: of what is known, and how far the round has come.
#include "reshard/job/next_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "reshard/cluster/lone_node.h"
#include "reshard/job/job_status.h"
#include "reshard/job/leadership.h"
#include "store/base/json.h"
#include "tests/support/deciding_node.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using StepKind = JobStep::Kind;
using Time = KnownJob::Clock::time_point;

const Time kNow = Time(1000s);
constexpr bool kAlone = false, kCluster = true, kParts = true, kNoParts = false;

/// Settled, with these checkpoints, the last of them current.
KnownJob settled_with(const std::vector<std::string>& names) {
  KnownJob known;
  known.saved.revision = known.in_force.revision = 3;
  for (const std::string& name : names) {
    CheckpointRecord& record = known.checkpoints[name];
    record.id = "id of " + name;
    record.sequence = static_cast<int64_t>(known.checkpoints.size());
    record.where = std::make_shared<const StoredState>();
    known.in_force.current = name;
  }
  return known;
}

KnownJob edited(KnownJob known) {
  ++known.saved.revision;
  return known;
}

Round leading() {
  Round round;
  round.began = round.leads = true;
  return round;
}

TEST(NextStep, WhereNothingIsToBeDoneItWaitsUntilItIsWoken) {
  for (const bool shares_bytes : {kAlone, kCluster})
    for (const KnownJob& known : {settled_with({}), settled_with({"a", "b"})}) {
      const JobStep step = next_step(known, shares_bytes, kNoParts, {}, kNow);
      EXPECT_EQ(step.kind, StepKind::kWait);
      EXPECT_FALSE(step.until.has_value());
    }
}

TEST(NextStep, WhateverIsToBeDoneIsLed) {
  KnownJob uncommitted = settled_with({"a", "b"});
  uncommitted.in_force.current = "a";  // b was committed in another layout
  KnownJob removed = settled_with({});
  removed.in_force.current = "gone";
  KnownJob looks = settled_with({"a"});
  looks.look_anyway = true;
  for (const KnownJob& known :
       {edited(settled_with({"a"})), edited(settled_with({})), uncommitted, removed, looks})
    EXPECT_EQ(next_step(known, kCluster, kNoParts, {}, kNow).kind, StepKind::kLead);
}

TEST(NextStep, WhatFailedIsNotTriedAgainUntilSomethingChanges) {
  KnownJob known = edited(settled_with({"a"}));
  known.failed = {known.saved.revision, "a"};
  EXPECT_EQ(next_step(known, kAlone, kNoParts, {}, kNow).kind, StepKind::kWait);
  EXPECT_EQ(known.state(false), JobState::kFailed);
  EXPECT_EQ(next_step(edited(known), kAlone, kNoParts, {}, kNow).kind, StepKind::kLead);
  KnownJob committed = known;
  committed.checkpoints["b"].sequence = 9;
  EXPECT_EQ(next_step(committed, kAlone, kNoParts, {}, kNow).kind, StepKind::kLead);
}

TEST(NextStep, ANodeThatDoesNotKnowAllLeadsNothing) {
  KnownJob known = edited(settled_with({"a"}));
  known.damaged["b"].lost = true;
  EXPECT_EQ(next_step(known, kCluster, kNoParts, {}, kNow).kind, StepKind::kWait);
  EXPECT_EQ(known.state(false), JobState::kFailed);
  known.damaged["b"].lost = false;  // damaged here, and no other has it right: the rest goes on
  EXPECT_EQ(next_step(known, kCluster, kNoParts, {}, kNow).kind, StepKind::kLead);
}

TEST(NextStep, AnotherNodeIsTheFirstToTry) {
  KnownJob known = edited(settled_with({"a"}));
  known.others_first = kNow + 50ms;
  const JobStep waits = next_step(known, kCluster, kNoParts, {}, kNow);
  EXPECT_EQ(waits.kind, StepKind::kWait);
  EXPECT_EQ(waits.until, kNow + 50ms);
  EXPECT_EQ(next_step(known, kCluster, kNoParts, {}, kNow + 50ms).kind, StepKind::kLead);
  EXPECT_EQ(next_step(known, kAlone, kNoParts, {}, kNow).kind, StepKind::kLead);  // there is none
  Round round;
  round.began = round.another_leads = true;
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).until, kNow + 50ms);
}

TEST(NextStep, ALeaderSettlesTheNewestThenEachOlderOneAndGivesBack) {
  const KnownJob known = edited(settled_with({"a", "b", "c"}));
  Round round = leading();
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).kind, StepKind::kSettleNewest);
  round.newest_is_brought = true;
  std::vector<std::string> older;
  for (JobStep step = next_step(known, kCluster, kParts, round, kNow);
       step.kind == StepKind::kSettleOlder && older.size() < 9;
       step = next_step(known, kCluster, kParts, round, kNow)) {
    older.push_back(step.older->id);
    round.brought.insert(step.older->id);
  }
  EXPECT_THAT(older, ElementsAre("id of a", "id of b"));
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).kind, StepKind::kGiveBack);
}

TEST(NextStep, AloneThereAreNoCopiesOfOlderOnes) {
  Round round = leading();
  round.newest_is_brought = true;
  EXPECT_EQ(next_step(settled_with({"a", "b"}), kAlone, kNoParts, round, kNow).kind,
            StepKind::kGiveBack);
}

TEST(NextStep, WhereTheNewestHasNoRoomInDevicesOlderOnesLeaveThemFirst) {
  KnownJob known = edited(settled_with({"a", "b", "c"}));
  EXPECT_FALSE(is_older_in_devices(known));
  const NodeMemory device = NodeMemory::cuda(0);
  StoredState in_device;
  StoredImage& image = in_device.images.emplace_back();
  image.memory = device;
  known.checkpoints["a"].where = std::make_shared<const StoredState>(in_device);
  EXPECT_FALSE(is_older_in_devices(known)) << "it ended with a daemon";
  image.image = std::make_shared<const Image>(ImageId{"one"}, MemoryPlace{"", device}, 8);
  known.checkpoints["c"].where = std::make_shared<const StoredState>(in_device);
  EXPECT_FALSE(is_older_in_devices(known)) << "the newest";
  known.checkpoints["b"].where = known.checkpoints["c"].where;
  EXPECT_TRUE(is_older_in_devices(known));
  Round round = leading();
  round.newest_lacks_room = true;
  JobStep step = next_step(known, kCluster, kNoParts, round, kNow);
  ASSERT_EQ(step.kind, StepKind::kSettleOlder);
  EXPECT_EQ(step.older->id, "id of b") << "the others are no hindrance";
  round.brought.insert("id of b");
  EXPECT_EQ(next_step(known, kCluster, kNoParts, round, kNow).kind, StepKind::kMakeRoom);
  round.room_is_made = true;
  EXPECT_EQ(next_step(known, kCluster, kNoParts, round, kNow).kind, StepKind::kSettleNewest);
  round.newest_is_brought = true;
  step = next_step(known, kCluster, kNoParts, round, kNow);
  ASSERT_EQ(step.kind, StepKind::kSettleOlder);
  EXPECT_EQ(step.older->id, "id of a");
}

TEST(NextStep, AfterAnErrorItIsGivenBackAtOnce) {
  Round round = leading();
  round.gives_back = true;
  const KnownJob known = edited(settled_with({"a", "b"}));
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).kind, StepKind::kGiveBack);
  round.newest_is_brought = true;
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).kind, StepKind::kGiveBack);
}

TEST(NextStep, TrimsTheOldestButForWhatIsPinnedCurrentOrNewest) {
  KnownJob known = settled_with({"a", "b", "c", "d", "e"});
  known.saved.layout.keep = 2;
  known.checkpoints["a"].pinned = true;
  JobStep step = next_step(known, kAlone, kNoParts, {}, kNow);
  ASSERT_EQ(step.kind, StepKind::kTrim);
  EXPECT_THAT(step.too_many, ElementsAre(Pair("b", "id of b"), Pair("c", "id of c")));
  known.in_force.current = "b";
  known.failed = {3, "e"};  // it cannot become current, and stays
  step = next_step(known, kAlone, kNoParts, {}, kNow);
  EXPECT_THAT(step.too_many, ElementsAre(Pair("c", "id of c"), Pair("d", "id of d")));
  known.saved.layout.keep = 0;  // all
  EXPECT_EQ(next_step(known, kAlone, kNoParts, {}, kNow).kind, StepKind::kWait);
}

TEST(NextStep, WhatCouldNotBeRemovedIsLookedAtAgain) {
  KnownJob known = settled_with({"a", "b"});
  known.saved.layout.keep = 1;
  Round round;
  round.began = round.trimmed = true;
  EXPECT_EQ(next_step(known, kCluster, kNoParts, round, kNow).until, kNow + 2s);
  known.saved.layout.keep = 2;
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).kind, StepKind::kDropParts);
  round.looked_at_parts = true;
  EXPECT_EQ(next_step(known, kCluster, kParts, round, kNow).until, kNow + 2s);
  EXPECT_FALSE(next_step(known, kCluster, kNoParts, round, kNow).until.has_value());
  // What has come meanwhile is begun at once, in a round of its own.
  const JobStep again = next_step(edited(known), kCluster, kNoParts, round, kNow);
  EXPECT_EQ(again.kind, StepKind::kWait);
  EXPECT_EQ(again.until, kNow);
}

TEST(NextStep, WhatBecomesOfAnAttempt) {
  const struct {
    Code code;
    Outcome alone, in_cluster;
  } kRows[] = {
      {Code::kCancelled, Outcome::kAbandoned, Outcome::kAbandoned},
      {Code::kConflict, Outcome::kAbandoned, Outcome::kAbandoned},
      {Code::kUnavailable, Outcome::kFailed, Outcome::kTryAgain},
      {Code::kInDoubt, Outcome::kFailed, Outcome::kTryAgain},
      {Code::kNoSpace, Outcome::kFailed, Outcome::kFailed},
      {Code::kCorrupt, Outcome::kFailed, Outcome::kFailed},
  };
  EXPECT_EQ(outcome_of(nullptr, kAlone), Outcome::kDone);
  for (const auto& row : kRows) {
    const Error error(row.code, "");
    EXPECT_EQ(outcome_of(&error, kAlone), row.alone);
    EXPECT_EQ(outcome_of(&error, kCluster), row.in_cluster);
  }
}

TEST(NextStep, WhatIsKnownAfterAnAttempt) {
  const Error error(Code::kNoSpace, "no memory");
  KnownJob before = edited(settled_with({"a"}));
  before.leads = true;
  auto after = [&](Outcome outcome, bool shares_bytes = kCluster) {
    KnownJob known = before;
    note_outcome(known, outcome, &error, shares_bytes, "job", "tp2", {known.saved.revision, "a"},
                 kNow);
    EXPECT_FALSE(known.leads);
    return known;
  };
  const KnownJob failed = after(Outcome::kFailed);
  EXPECT_FALSE(failed.has_work());
  EXPECT_EQ(failed.counts.reshards_failed, 1u);
  EXPECT_THAT(failed.last_error->what, HasSubstr("reshard to tp2 failed: no memory"));
  const KnownJob again = after(Outcome::kTryAgain);
  EXPECT_TRUE(again.has_work());
  EXPECT_EQ(again.others_first, kNow + 1s);
  EXPECT_THAT(again.last_error->what, HasSubstr("tried again"));
  EXPECT_EQ(after(Outcome::kAbandoned).others_first, kNow + 100ms);
  EXPECT_TRUE(after(Outcome::kAbandoned).look_anyway);
  EXPECT_FALSE(after(Outcome::kAbandoned, kAlone).look_anyway);
  before = failed;
  EXPECT_FALSE(after(Outcome::kDone).last_error.has_value());
  EXPECT_FALSE(after(Outcome::kDone).failed.has_value());
}

TEST(JobKnowledge, ASnapshotStaysAsItWas) {
  std::atomic<int> told = 0;
  JobKnowledge knowledge([&] { ++told; });
  const JobKnowledge::Snapshot before = knowledge.now();
  EXPECT_EQ(knowledge.update([](KnownJob& known) { return ++known.saved.revision; }), 1);
  EXPECT_EQ(before->saved.revision, 0);
  EXPECT_EQ(knowledge.now()->saved.revision, 1);
  EXPECT_EQ(told, 0);
  std::jthread waits(
      [&] { knowledge.wait([](const KnownJob& known) { return known.saved.revision == 2; }); });
  knowledge.update([](KnownJob& known) { known.saved.revision = 2; });
  knowledge.tell();
  waits.join();
  EXPECT_EQ(told, 1);
}

TEST(JobStatus, SaysWhatIsKnown) {
  KnownJob known = settled_with({});
  known.set_error("something \xff else");
  known.damaged["bad"].why = "its manifest is gone";
  known.drained = {"w2"};
  known.saved.layout.replicas = 1;
  StatusBeside beside;
  beside.alive = {"w1", "w2"};
  const std::string text = status_of(known, "job", "w1", kCluster, beside);
  Result<json::value> parsed = parse_json(text);
  ASSERT_TRUE(parsed.has_value()) << text;
  const json::object& status = parsed.value().as_object();
  EXPECT_EQ(status.at("state").as_string(), "idle");
  EXPECT_EQ(status.at("revision").as_int64(), 3);
  EXPECT_TRUE(status.at("checkpoint").is_null());
  EXPECT_EQ(status.at("unreadable").as_array().size(), 1u);
  EXPECT_EQ(status.at("nodes").as_array().size(), 2u);
  EXPECT_EQ(status_of(known, "job", "w1", kAlone, {}).find("this cluster has one node") ==
                std::string::npos,
            false);
  known.in_force.revision = 2;
  EXPECT_THAT(status_of(known, "job", "w1", kCluster, beside), HasSubstr("resharding"));
  EXPECT_EQ(numbers_of(known, "w1", false).state, JobState::kResharding);
}

TEST(Leadership, IsOneNodesUntilItGoes) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  DecidingNode one(*meta, "w1"), two(*meta, "w2");
  JobDecision creates("job");
  creates.create("id of the job", "2026-01-01T00:00:00Z");
  ASSERT_TRUE(meta->commit(std::move(creates).transaction()).has_value());
  auto place_on = [&](DecidingNode& node) {
    JobPlace place;
    place.name = "job";
    place.id = "id of the job";
    place.services.meta = meta.get();
    place.services.cluster = &node;
    return place;
  };
  const JobPlace on_one = place_on(one), on_two = place_on(two);
  std::unique_ptr<Leadership> first = Leadership::take(on_one);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(Leadership::take(on_two), nullptr);
  // What this node could not give back in time it takes over: an earlier one decides nothing more.
  std::unique_ptr<Leadership> second = Leadership::take(on_one);
  ASSERT_NE(second, nullptr);
  EXPECT_GT(second->epoch(), first->epoch());
  auto decide = [&](const Leadership& leadership) {
    JobDecision decision("job");
    leadership.name_in(decision);
    decision.put(LastSequence{1});
    return on_one.commit(std::move(decision));
  };
  const Result<int64_t> late = decide(*first);
  ASSERT_TRUE(late.has_error());
  EXPECT_EQ(late.error().code(), Code::kConflict);
  EXPECT_TRUE(decide(*second).has_value());
  first.reset();  // a later one's stays
  EXPECT_TRUE(meta->get("leaders/job").value().has_value());
  second.reset();
  EXPECT_FALSE(meta->get("leaders/job").value().has_value());
  EXPECT_NE(Leadership::take(on_two), nullptr);
  two.is_cut_off();
  EXPECT_EQ(Leadership::take(on_two), nullptr);
  JobPlace another = place_on(one);  // under the same name
  another.id = "id of another";
  EXPECT_EQ(Leadership::take(another), nullptr);
}

TEST(Leadership, WhatALeaderHasLookedAtNobodyNeedLookAtAgain) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  DecidingNode one(*meta, "w1"), two(*meta, "w2");
  JobDecision creates("job");
  creates.create("id of the job", "2026-01-01T00:00:00Z");
  ASSERT_TRUE(meta->commit(std::move(creates).transaction()).has_value());
  const auto place_on = [&](DecidingNode& node, const std::string& id) {
    JobPlace place;
    place.name = "job";
    place.id = id;
    place.services.meta = meta.get();
    place.services.cluster = &node;
    return place;
  };
  const JobPlace on_one = place_on(one, "id of the job"), on_two = place_on(two, "id of the job");
  std::unique_ptr<Leadership> leads = Leadership::take(on_one);
  leads->has_looked("what it knows");
  EXPECT_FALSE(Leadership::has_anybody_looked(on_two, "what it knows")) << "it is still at it";
  leads.reset();
  EXPECT_TRUE(Leadership::has_anybody_looked(on_two, "what it knows"));
  EXPECT_FALSE(Leadership::has_anybody_looked(on_two, "something newer"));
  EXPECT_FALSE(Leadership::has_anybody_looked(place_on(two, "id of another"), "what it knows"));
  Leadership::take(on_two).reset();  // which failed, or found more
  EXPECT_TRUE(Leadership::has_anybody_looked(on_two, "what it knows"));
  one.is_cut_off();
  EXPECT_FALSE(Leadership::has_anybody_looked(on_two, "what it knows")) << "it goes with its node";
}

TEST(KnownJob, ViewsAreEqualOnlyWhereALookWouldFindTheSame) {
  KnownJob known;
  known.alive = known.followed_alive = {"w0", "w1"};
  CheckpointRecord record;
  record.id = "0123";
  record.stored = "stored-1.json";
  known.checkpoints.emplace("base", record);
  const std::string before = known.view();
  EXPECT_EQ(KnownJob(known).view(), before);
  const std::vector<std::function<void(KnownJob&)>> changes{
      [](KnownJob& now) { now.saved.meta_revision = 7; },
      [](KnownJob& now) { now.in_force.meta_revision = 7; },
      [](KnownJob& now) { now.followed_alive.pop_back(); },
      [](KnownJob& now) { now.followed_drained = {"w1"}; },
      [](KnownJob& now) { now.checkpoints.clear(); },
      [](KnownJob& now) { now.checkpoints.at("base").stored = "stored-2.json"; },
      [](KnownJob& now) { now.checkpoints.at("base").id = "4567"; },
      [&](KnownJob& now) {
        now.damaged.emplace("base", Unreadable{record, "gone"});
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    KnownJob changed = known;
    changes[i](changed);
    EXPECT_NE(changed.view(), before) << i;
  }
  // A look that ends before stored states were opened with the nodes that are there now was not at
  // these.
  KnownJob half = known;
  half.alive.pop_back();
  half.drained = {"w1"};
  EXPECT_EQ(half.view(), before);
}

TEST(Leadership, OneThatIsAloneAlwaysLeads) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  LoneNode node("w1");
  JobPlace place;
  place.name = "job";
  place.services.meta = meta.get();
  place.services.cluster = &node;
  const std::unique_ptr<Leadership> leads = Leadership::take(place);
  EXPECT_EQ(leads->epoch(), 0);
  leads->has_looked("what it knows");
  JobDecision decision("job");
  leads->name_in(decision);
  EXPECT_TRUE(std::move(decision).transaction().compares.empty());
}

/// Nothing is read for it: that would wait for metadata which do not answer, and say just that.
TEST(JobPlace, WhoIsCutOffDecidesNothingAndSaysSo) {
  const std::unique_ptr<MetaClient> meta = make_memory_meta();
  DecidingNode node(*meta, "w1");
  node.is_cut_off();
  JobPlace place;
  place.name = "job";
  place.services.meta = meta.get();
  place.services.cluster = &node;
  const Result<int64_t> decided = place.commit(MetaTransaction());
  ASSERT_TRUE(decided.has_error());
  EXPECT_EQ(decided.error().code(), Code::kUnavailable) << decided.error().message();
}

}  // namespace
}  // namespace ptc
