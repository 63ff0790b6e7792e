// What a decision about a job rests on: all that it has read, and nothing at which it only glances.
#include "reshard/job/job_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/cluster/lone_node.h"
#include "reshard/job/decisions.h"
#include "reshard/job/drain.h"
#include "reshard/job/leadership.h"
#include "tests/support/deciding_node.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

/// A node, with what it knows of the job.
struct Decider {
  Decider(MetaClient& meta, const std::string& name) : cluster(meta, name) {
    place.name = "job";
    place.id = "id";
    place.services.meta = &meta;
    place.services.cluster = &cluster;
    follow();
  }
  void follow() {
    MutexLock change(decisions.mutex());
    JobRecord record = JobRecord::read(*place.services.meta, "job").value();
    knowledge.update([&](KnownJob& known) {
      known.saved = record.saved;
      known.in_force = record.in_force;
      known.sequence = record.sequence;
      known.checkpoints.clear();
      for (const auto& [name, entry] : record.checkpoints)
        static_cast<Agreed<CheckpointEntry>&>(known.checkpoints[name]) = entry;
      const auto bad = known.checkpoints.extract("bad");  // cannot be shown here
      if (bad) known.damaged["bad"].record = bad.mapped();
    });
  }

  DecidingNode cluster;
  JobPlace place;
  JobPeers peers{{"job", "id"}, cluster};
  JobKnowledge knowledge{[] {}};
  Activities activities;
  CheckpointFiles files{place, peers, knowledge, activities};
  Decisions decisions{place, files, knowledge};
};

class JobUpdateTest : public testing::Test {
 protected:
  JobUpdateTest() {
    JobDecision decision("job");
    decision.create("id", "2026-01-01T00:00:00Z");
    const std::string text = R"({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1})";
    decision.put(LayoutEdit{text, Layout::parse(text).value(), 1});
    decision.put(InForce{LayoutSpec(), 1, {}});
    decision.put(LastSequence{2});
    decision.put("step1", CheckpointEntry{"cafe", 1, 1, "stored-1-0.json", false});
    decision.put("bad", CheckpointEntry{"beef", 2, 1, "stored-1-0.json", false});
    decision.put_looked_over("cafe", LookedOver{17});
    decision.put_attributes({});
    EXPECT_TRUE(meta_->commit(std::move(decision).transaction()).has_value());
  }
  /// Somebody else decides something about this.
  void touch(const std::string& key) {
    const auto now = meta_->get(key).value();
    const std::string made = key == "jobs/job/checkpoints/step2"
                                 ? R"({"id": "f00d", "stored": "stored-1-0.json"})"
                                 : "{}";
    ASSERT_TRUE(meta_->commit({.puts = {{key, now ? now->value : made}}}).has_value());
  }

  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
};

Result<bool> decided(JobUpdate& update) {
  update.put_rules("{}");
  return true;
}

TEST_F(JobUpdateTest, RestsOnWhatItHasRead) {
  using Read = std::function<void(JobUpdate&, const Decider&)>;
  const std::vector<std::pair<std::string, Read>> reads = {
      {"jobs/job/layout", [](auto& u, auto&) { EXPECT_EQ(u.saved().revision, 1); }},
      {"jobs/job/in_force", [](auto& u, auto&) { EXPECT_EQ(u.in_force().revision, 1); }},
      {"jobs/job/sequence", [](auto& u, auto&) { EXPECT_EQ(u.sequence().last, 2); }},
      {"jobs/job/checkpoints/step1",
       [](auto& u, auto&) { EXPECT_EQ(u.checkpoint("step1")->id, "cafe"); }},
      {"jobs/job/checkpoints/step2",
       [](auto& u, auto&) { EXPECT_EQ(u.checkpoint("step2"), nullptr); }},
      {"jobs/job/checkpoints/bad",
       [](auto& u, auto&) {
         EXPECT_EQ(u.checkpoint("bad"), nullptr);
         EXPECT_EQ(u.record_of("bad")->id, "beef");
       }},
      {"jobs/job/attributes",
       [](auto& u, auto&) { EXPECT_EQ(*u.attributes().value().all, JobAttributes()); }},
      {"jobs/job/rules", [](auto& u, auto&) { EXPECT_TRUE(u.rules().has_value()); }},
      {"jobs/job/looked_over/cafe",
       [](auto& u, auto&) { EXPECT_EQ(u.looked_over("cafe").value().time_ns, 17); }},
      {"jobs/job/checkpoints/step2", [](auto& u, auto&) { u.no_checkpoint("step2"); }},
      {"drained/w7", [](auto& u, auto&) { u.in_service("w7"); }},
      {"elsewhere",
       [](auto& u, auto&) {
         u.rests_on({{"elsewhere", 0}});
       }},
      {"jobs/job/sequence", [](auto& u, const Decider& d) {
         u.add({.compares = {{"jobs/job/sequence", d.knowledge.now()->sequence.meta_revision}}});
       }}};
  for (const auto& [changed, unused] : reads) {
    for (const auto& [key, read] : reads) {
      SCOPED_TRACE(key + " is read, and " + changed + " changes");
      const auto before = meta_->get(changed).value();
      Decider here(*meta_, "w1");
      const Result<int64_t> done = here.decisions.update([&](JobUpdate& update) -> Result<bool> {
        read(update, here);
        touch(changed);
        return decided(update);
      });
      EXPECT_EQ(done.has_value(), key != changed);
      if (done.has_error()) {
        EXPECT_EQ(done.error().code(), Code::kConflict);
      }
      if (!before) {
        ASSERT_TRUE(meta_->commit({.deletes = {changed}}).has_value());
      }
      ASSERT_TRUE(meta_->commit({.deletes = {"jobs/job/rules"}}).has_value());
    }
  }
}

TEST_F(JobUpdateTest, RestsOnNothingAtWhichItOnlyGlances) {
  Decider here(*meta_, "w1");
  const Result<int64_t> done = here.decisions.update([&](JobUpdate& update) -> Result<bool> {
    EXPECT_EQ(update.glance().saved.revision, 1);
    EXPECT_NE(update.glance().latest(), nullptr);
    EXPECT_TRUE(update.glance_at_attributes().has_value());
    for (const char* what : {"layout", "in_force", "sequence", "checkpoints/step1", "attributes"})
      touch("jobs/job/" + std::string(what));
    return decided(update);
  });
  EXPECT_TRUE(done.has_value()) << done.error().message();
}

TEST_F(JobUpdateTest, IsOfThisJobAndOfANodeThatIsThere) {
  for (const std::string key : {"jobs/job", "nodes/w1"}) {
    Decider here(*meta_, "w1");
    ASSERT_TRUE(here.place.existence().has_value());
    const Result<int64_t> done = here.decisions.update([&](JobUpdate& update) -> Result<bool> {
      touch(key);
      return decided(update);
    });
    ASSERT_TRUE(done.has_error()) << key;
    EXPECT_EQ(done.error().code(), Code::kConflict);
  }
}

TEST_F(JobUpdateTest, OfALeaderRestsOnThatItLeads) {
  Decider here(*meta_, "w1");
  const auto first = Leadership::take(here.place), later = Leadership::take(here.place);
  EXPECT_TRUE(here.decisions.update_as(*later, decided).has_value());
  EXPECT_TRUE(here.decisions.update(decided).has_value());
  const Result<int64_t> late = here.decisions.update_as(*first, decided);
  ASSERT_TRUE(late.has_error());
  EXPECT_EQ(late.error().code(), Code::kConflict);
}

TEST_F(JobUpdateTest, WritesNothingOfTheJobThatItHasNotRead) {
  Decider here(*meta_, "w1");
  const CheckpointEntry entry{"cafe", 1, 1, "stored-1-0.json", true};
  const std::vector<std::pair<std::string, std::function<void(JobUpdate&)>>> writes = {
      {"layout", [](JobUpdate& u) { u.put(LayoutEdit()); }},
      {"in_force", [](JobUpdate& u) { u.put(InForce()); }},
      {"sequence", [](JobUpdate& u) { u.put(LastSequence{3}); }},
      {"checkpoints/step1", [&](JobUpdate& u) { u.put("step1", entry); }},
      {"checkpoints/step1", [&](JobUpdate& u) { u.remove("step1", entry); }},
      {"attributes", [](JobUpdate& u) { u.put_attributes({}); }},
      {"looked_over/cafe", [](JobUpdate& u) { u.put_looked_over("cafe", {}); }},
      {"dataset/order",
       [](JobUpdate& u) {
         u.add({.puts = {{"jobs/job/dataset/order", ""}}});
       }},
  };
  for (const auto& [key, write] : writes) {
    const auto before = meta_->get("jobs/job/" + key).value();
    const Result<int64_t> done = here.decisions.update([&](JobUpdate& update) -> Result<bool> {
      (void)update.glance();
      write(update);
      return true;
    });
    ASSERT_TRUE(done.has_error()) << key;
    EXPECT_EQ(done.error().code(), Code::kInternal);
    EXPECT_THAT(done.error().message(), HasSubstr("jobs/job/" + key));
    const auto after = meta_->get("jobs/job/" + key).value();
    EXPECT_EQ(after ? after->revision : 0, before ? before->revision : 0);
  }
}

TEST_F(JobUpdateTest, WhereThereIsNothingToDecideNothingIsWritten) {
  Decider here(*meta_, "w1");
  const Result<int64_t> nothing = here.decisions.update([](JobUpdate& update) -> Result<bool> {
    update.put_rules("{}");
    return false;
  });
  EXPECT_EQ(nothing.value(), 0);
  const Result<int64_t> refused = here.decisions.update([](JobUpdate& update) -> Result<bool> {
    update.put_rules("{}");
    return make_error(Code::kNotFound, "there is none");
  });
  EXPECT_EQ(refused.error().message(), "there is none");
  EXPECT_FALSE(meta_->get("jobs/job/rules").value().has_value());
}

TEST_F(JobUpdateTest, OfTwoAtOnceOneIsRefused) {
  Decider one(*meta_, "w1"), two(*meta_, "w2");
  const auto put_next = [](JobUpdate& update) -> Result<bool> {
    update.put(LastSequence{update.sequence().last + 1});
    return true;
  };
  const Result<int64_t> late = one.decisions.update([&](JobUpdate& update) -> Result<bool> {
    PTC_TRY(const bool is_decided, put_next(update));
    EXPECT_TRUE(two.decisions.update(put_next).has_value());
    return is_decided;
  });
  ASSERT_TRUE(late.has_error());
  EXPECT_EQ(late.error().code(), Code::kConflict);
  EXPECT_EQ(one.decisions.update(put_next).error().code(), Code::kConflict);  // it knows no better
  one.follow();
  EXPECT_TRUE(one.decisions.update(put_next).has_value());
  EXPECT_EQ(JobRecord::read(*meta_, "job").value().sequence.last, 4);
}

TEST_F(JobUpdateTest, OfManyAtOnceNoneIsLost) {
  constexpr int kNodes = 3, kEach = 20;
  std::vector<std::jthread> nodes;
  for (int i = 0; i < kNodes; ++i)
    nodes.emplace_back([&, i] {
      Decider here(*meta_, "w" + std::to_string(i));
      for (int done = 0; done < kEach;) {
        const Result<bool> counted = here.decisions.count_mending("step1", "cafe");
        if (counted.has_value()) ++done;
        else {
          EXPECT_EQ(counted.error().code(), Code::kConflict);
        }
        here.follow();
      }
    });
  nodes.clear();
  EXPECT_EQ(JobRecord::read(*meta_, "job").value().checkpoints.find("step1")->second.mended,
            kNodes * kEach);
}

}  // namespace
}  // namespace ptc
