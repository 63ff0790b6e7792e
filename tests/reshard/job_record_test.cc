// What is agreed on of a job: that it is read as it was written, and that a decision fails where
// what it rests on has changed.
#include "reshard/job/job_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/serialize.hpp>
#include <functional>

#include "reshard/job/known_job.h"
#include "reshard/ptc/rule_set.h"

namespace ptc {
namespace {

using testing::HasSubstr;

LayoutEdit edit_of(std::string_view rest, int64_t revision) {
  const std::string text = fmt::format(R"({{"format": "ptc-layout/1", {}}})", rest);
  Result<Layout> layout = Layout::parse(text);
  EXPECT_TRUE(layout.has_value()) << layout.error().message();
  return {text, layout.has_value() ? layout.value() : Layout(), revision};
}

class JobRecordTest : public testing::Test {
 protected:
  void SetUp() override {
    JobDecision decision("job");
    decision.create("0123", "2026-01-01T00:00:00Z");
    decision.put(edit_of(R"("tp": 2, "pp": 1, "dp": 1)", 1));
    decision.put(InForce{LayoutSpec(), 1, {}});
    ASSERT_TRUE(commit(std::move(decision)).has_value());
  }
  Result<int64_t> commit(JobDecision decision) {
    return meta_->commit(std::move(decision).transaction());
  }
  JobRecord read() {
    Result<JobRecord> record = JobRecord::read(*meta_, "job");
    EXPECT_TRUE(record.has_value()) << record.error().message();
    return std::move(record).value();
  }
  void put_raw(std::string key, std::string value) {
    ASSERT_TRUE(meta_->commit({.puts = {{std::move(key), std::move(value)}}}).has_value());
  }

  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
};

TEST_F(JobRecordTest, IsReadAsItWasWritten) {
  const LayoutSpec custom =
      edit_of(R"("tp": 1, "pp": 2, "dp": 1, "stages": [1, 3])", 1).layout.spec;
  const CheckpointEntry entry{"cafe", 7, 3, "stored-3-beef.json", true, 2, {"a", "b"}, 5};
  const LookedOver looked{17, {"a file"}, {"another"}, {"w2"}, 3};
  JobAttributes attributes;
  attributes.update("incoming", {.uid = 1000, .gid = {}, .mode = 0700, .quota = {}});
  JobDecision decision("job");
  const LayoutEdit edit = edit_of(R"("tp": 4, "pp": 1, "dp": 1, "keep": 9)", 5);
  decision.put(edit);
  decision.put(InForce{custom, 4, "step1"});
  decision.put(LastSequence{8});
  decision.put(custom);
  decision.put(LayoutSpec());  // its name says all
  decision.put("step1", entry);
  decision.put_looked_over("cafe", looked);
  decision.put_attributes(attributes);
  decision.put_rules("{}");
  const Result<int64_t> revision = commit(std::move(decision));
  ASSERT_TRUE(revision.has_value());

  const JobRecord record = read();
  EXPECT_EQ(record.saved.text, edit.text);
  EXPECT_EQ(record.saved.layout.keep, 9u);
  EXPECT_EQ(record.saved.revision, 5);
  EXPECT_EQ(record.in_force.spec, custom);
  EXPECT_EQ(record.in_force.revision, 4);
  EXPECT_EQ(record.in_force.current, "step1");
  EXPECT_EQ(record.sequence.last, 8);
  ASSERT_EQ(record.custom_specs.size(), 1u);
  EXPECT_EQ(record.custom_specs.begin()->first, custom.name());
  EXPECT_EQ(record.custom_specs.begin()->second, custom);
  ASSERT_TRUE(record.checkpoints.contains("step1"));
  EXPECT_EQ(static_cast<const CheckpointEntry&>(record.checkpoints.find("step1")->second), entry);
  EXPECT_EQ(static_cast<const LookedOver&>(record.looked_over.at("cafe")), looked);
  EXPECT_EQ(*record.attributes.all, attributes);
  EXPECT_EQ(record.rules_text, "{}");
  for (const int64_t known :
       {record.saved.meta_revision, record.in_force.meta_revision, record.sequence.meta_revision,
        record.attributes.meta_revision, record.checkpoints.find("step1")->second.meta_revision})
    EXPECT_EQ(known, revision.value());
}

TEST_F(JobRecordTest, ACheckpointOfAThousandNodesNamesAFew) {
  StoredState stored;
  for (int i = 0; i < 1000; ++i) stored.nodes.push_back(fmt::format("node-{:04}", i));
  CheckpointRecord checkpoint;
  checkpoint.id = "cafe";
  checkpoint.lies(std::make_shared<const StoredState>(stored));
  JobDecision decision("job");
  decision.put("step1", checkpoint);
  ASSERT_TRUE(commit(std::move(decision)).has_value());
  const auto text = meta_->get("jobs/job/checkpoints/step1");
  ASSERT_TRUE(text.has_value() && text.value());
  EXPECT_LT(text.value()->value.size(), 600u);
  const CheckpointEntry read_again = read().checkpoints.at("step1");
  EXPECT_EQ(read_again, static_cast<const CheckpointEntry&>(checkpoint));
  EXPECT_EQ(read_again.nodes.size(), CheckpointEntry::kNamedNodes);
  EXPECT_EQ(read_again.more_nodes, 1000 - 16);
}

TEST_F(JobRecordTest, LayoutsOfAnOlderVersionHaveItsNamesAndTheirOwn) {
  const LayoutSpec fsdp =
      edit_of(R"("tp": 1, "pp": 1, "dp": 4, "optimizer": "fsdp")", 1).layout.spec;
  const LayoutSpec stages =
      edit_of(R"("tp": 1, "pp": 2, "dp": 4, "optimizer": "fsdp", "stages": [1, 3])", 1).layout.spec;
  put_raw("jobs/job/specs/tp1-pp1-dp4+00c0ffee", json::serialize(fsdp.to_json()));
  put_raw("jobs/job/specs/tp1-pp2-dp4+5ea51de5", json::serialize(stages.to_json()));
  const JobRecord record = read();
  EXPECT_EQ(record.custom_specs.at("tp1-pp1-dp4+00c0ffee"), fsdp);
  EXPECT_EQ(record.custom_specs.at("tp1-pp2-dp4+5ea51de5"), stages);
  EXPECT_EQ(record.custom_specs.at(stages.name()), stages);  // `current` shows this one
}

TEST_F(JobRecordTest, LayoutsKeepTheRulesThatTheyWereSavedWith) {
  LayoutEdit edit = edit_of(R"("tp": 4, "pp": 1, "dp": 1, "rules": "rules.json")", 5);
  EXPECT_FALSE(edit.layout.spec.rules);
  edit.layout.spec.rules = LayoutRules(RuleSet::builtin("gpt2").value());
  JobDecision decision("job");
  decision.put(edit);
  decision.put(InForce{edit.layout.spec, 4, "step1"});
  decision.put(edit.layout.spec);
  ASSERT_TRUE(commit(std::move(decision)).has_value());
  const JobRecord record = read();
  EXPECT_EQ(record.saved.layout.spec, edit.layout.spec);
  EXPECT_EQ(record.in_force.spec, edit.layout.spec);
  EXPECT_EQ(record.custom_specs.at(edit.layout.spec.name()), edit.layout.spec);
}

TEST_F(JobRecordTest, ADecisionFailsWhereWhatItRestsOnHasChanged) {
  {
    JobDecision decision("job");
    decision.put(LastSequence{1});
    decision.put("step1", CheckpointEntry{"cafe", 1, 1, "stored-1-0.json", false});
    decision.put_attributes({});
    ASSERT_TRUE(commit(std::move(decision)).has_value());
  }
  const std::vector<std::pair<const char*, std::function<void(JobDecision&, const JobRecord&)>>>
      rests = {
          {"layout", [](JobDecision& d, const JobRecord& r) { d.rests_on(r.saved); }},
          {"in_force", [](JobDecision& d, const JobRecord& r) { d.rests_on(r.in_force); }},
          {"sequence", [](JobDecision& d, const JobRecord& r) { d.rests_on(r.sequence); }},
          {"attributes", [](JobDecision& d, const JobRecord& r) { d.rests_on(r.attributes); }},
          {"checkpoints/step1",
           [](JobDecision& d, const JobRecord& r) {
             d.rests_on("step1", r.checkpoints.find("step1")->second);
           }},
          {"checkpoints/step2",
           [](JobDecision& d, const JobRecord&) { d.rests_on_no_checkpoint("step2"); }},
          {"", [](JobDecision& d, const JobRecord&) { d.rests_on_key("nodes/a", 0); }},
      };
  for (const auto& [changed, unused] : rests) {
    const JobRecord before = read();
    const std::string key = *changed == '\0' ? "nodes/a" : std::string("jobs/job/") + changed;
    const auto now = meta_->get(key).value();
    put_raw(key, now ? now->value : "");
    for (const auto& [name, rest] : rests) {
      JobDecision decision("job");
      rest(decision, before);
      decision.put_rules("{}");
      const Result<int64_t> done = commit(std::move(decision));
      EXPECT_EQ(done.has_value(), std::string_view(name) != changed)
          << name << " after a change of " << key;
      if (done.has_error()) {
        EXPECT_EQ(done.error().code(), Code::kConflict);
      }
    }
    if (!now) {
      ASSERT_TRUE(meta_->commit({.deletes = {key}}).has_value());
    }
  }
}

TEST_F(JobRecordTest, AJobIsCreatedOnce) {
  JobDecision decision("job");
  decision.create("4567", "2026-01-01T00:00:00Z");
  EXPECT_EQ(commit(std::move(decision)).error().code(), Code::kConflict);
  EXPECT_EQ(JobRecord::read(*meta_, "other").error().code(), Code::kNotFound);
}

TEST_F(JobRecordTest, WhatIsRemovedHasATombstone) {
  const CheckpointEntry entry{"cafe", 1, 1, "stored-1-0.json", false};
  for (const bool remove : {false, true}) {
    JobDecision decision("job");
    remove ? decision.remove("step1", entry) : decision.put("step1", entry);
    ASSERT_TRUE(commit(std::move(decision)).has_value());
    EXPECT_EQ(read().checkpoints.contains("step1"), !remove);
    EXPECT_EQ(meta_->list("removed/").value().size(), remove ? 1u : 0u);
  }
}

TEST_F(JobRecordTest, DamageIsSaidWithItsKey) {
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {"layout", "{"},
      {"layout", R"({"revision": 1})"},
      {"layout", R"({"revision": -1, "text": "{}"})"},
      {"in_force", R"({"revision": 1})"},
      {"sequence", "12x"},
      {"attributes", "[]"},
      {"specs/tp2+0", "[]"},
      {"checkpoints/a", R"({"stored": "stored-1.json"})"},
      {"checkpoints/a", R"({"id": "cafe"})"},
      {"checkpoints/a", R"({"id": "cafe", "stored": "s", "generation": "1"})"},
  };
  for (const auto& [key, value] : damaged) {
    const auto before = meta_->get("jobs/job/" + key).value();
    put_raw("jobs/job/" + key, value);
    const Result<JobRecord> record = JobRecord::read(*meta_, "job");
    ASSERT_TRUE(record.has_error()) << key << " " << value;
    EXPECT_EQ(record.error().code(), Code::kCorrupt);
    EXPECT_THAT(record.error().message(), HasSubstr("jobs/job/" + key));
    if (before) put_raw(before->key, before->value);
    else ASSERT_TRUE(meta_->commit({.deletes = {"jobs/job/" + key}}).has_value());
  }
  put_raw("jobs/job/looked_over/cafe", "{");  // is looked over anew
  put_raw("jobs/job/of_a_later_version", "{");
  EXPECT_TRUE(read().looked_over.empty());
}

TEST_F(JobRecordTest, CommittedBeforeThereWasACountItIsThatOfTheLastCheckpoint) {
  JobDecision decision("job");
  decision.put("a", CheckpointEntry{"cafe", 4, 1, "stored-1-0.json", false});
  decision.put("b", CheckpointEntry{"beef", 3, 1, "stored-1-1.json", false});
  ASSERT_TRUE(commit(std::move(decision)).has_value());
  EXPECT_EQ(read().sequence.last, 4);
  EXPECT_EQ(read().sequence.meta_revision, 0);
}

}  // namespace
}  // namespace ptc
