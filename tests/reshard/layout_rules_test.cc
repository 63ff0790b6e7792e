// Rules that are mended after a commit: a layout says by which it cuts, and no other changes.
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "reshard/job/job.h"
#include "reshard/node/job_store.h"
#include "store/base/json.h"
#include "tests/support/job_fixture.h"
#include "tests/support/local_cluster.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// Of these projections each rank has all.
std::string whole(const std::string& projections) {
  return R"({"format": "ptc-rules/1", "extends": "llama",
             "rules": [{"names": ["layers.{layer}.self_attn.)" +
         projections + R"(.weight"]}]})";
}

class LayoutRulesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    open();
    job_ = store_->create_job("job").value();
    write_ranks(sample_, LayoutSpec(), incoming("base"));
    commit("base");
  }
  void open() {
    job_.reset();
    store_.reset();
    store_ = JobStore::open({.directory = dir_.path(), .node = "n0", .copy_threads = 2}, nullptr)
                 .value();
    job_ = store_->find("job");
  }
  fs::path incoming(const std::string& name) const {
    return fs::path(job_->files_dir()) / "incoming" / name;
  }
  void commit(const std::string& name) {
    const Result<> committed = job_->commit(name, name);
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
    job_->wait_settled();
  }
  void save(const std::string& layout) {
    const Result<> saved = job_->save_layout(layout);
    ASSERT_TRUE(saved.has_value()) << saved.error().message();
    job_->wait_settled();
  }
  std::string refusal(const std::string& layout) {
    const std::string before = job_->layout_text();
    const Result<> saved = job_->save_layout(layout);
    if (saved.has_value()) return "it was saved";
    EXPECT_EQ(job_->layout_text(), before);
    EXPECT_EQ(saved.error().code(), Code::kInvalidArgument);
    EXPECT_THAT(job_->status_json(), HasSubstr("layout.json refused"));
    return saved.error().message();
  }
  std::vector<std::string> warnings() const {
    const json::value status = parse_json(job_->status_json()).value();
    std::vector<std::string> all;
    for (const json::value& one : status.at("warnings").as_array())
      all.emplace_back(one.as_string());
    return all;
  }
  /// Of three layers; config.json says four.
  void write_a_layer_too_many(const std::string& name, const std::string& layout) {
    Sample sample = llama_sample(false, 3);
    const std::string said = "\"num_hidden_layers\": ";
    sample.config.replace(sample.config.find(said) + said.size(), 1, "4");
    write_ranks(sample, LayoutSpec::from_name(layout).value(), incoming(name));
  }
  void commit_of_a_layer_too_many(const std::string& name,
                                  const std::string& layout = "tp1-pp2-dp1") {
    write_a_layer_too_many(name, layout);
    commit(name);
  }
  /// The layout's name of `current`.
  std::string current() const {
    const std::string target = job_->current_target().value_or("");
    return target.substr(target.rfind('/') + 1);
  }
  LayoutSpec layout(const std::string& name, const std::string& checkpoint = "base") const {
    const CheckpointRef found = job_->find_checkpoint(checkpoint);
    const auto spec = job_->find_layout(*found, name);
    EXPECT_TRUE(spec.has_value()) << name;
    return spec.has_value() ? spec.value() : LayoutSpec();
  }
  /// Whether rank 1 has all of the first layer's projection.
  bool has_all(const std::string& layout_name, const std::string& projection,
               const std::string& checkpoint = "base") const {
    const CheckpointRef found = job_->find_checkpoint(checkpoint);
    const FileSetRef part = found->rank_tensors(layout(layout_name, checkpoint), 1).value();
    const FileSetRef model = found->model_files().value();
    for (const FileSet::Entry& entry : part->entries())
      if (entry.path.find(projection) != std::string::npos)
        return read_content(*part, entry.path) == read_content(*model, entry.path);
    ADD_FAILURE() << "there is no " << projection;
    return false;
  }

  const TempDir dir_;
  const Sample sample_ = llama_sample();
  std::unique_ptr<JobStore> store_;
  JobRef job_;
};

constexpr char kMended[] = R"({"tp": 2, "pp": 1, "dp": 1, "rules": "rules.json"})";

TEST_F(LayoutRulesTest, AreThoseOfRulesJsonWhenTheLayoutIsSaved) {
  ASSERT_TRUE(job_->save_rules(whole("q_proj")).has_value());
  EXPECT_EQ(current(), "tp1-pp1-dp1");
  save(kMended);
  const std::string first = current();
  EXPECT_THAT(first, StartsWith("tp2-pp1-dp1-rules_"));
  EXPECT_TRUE(has_all(first, "q_proj"));
  EXPECT_FALSE(has_all(first, "k_proj"));
  expect_layout(*job_->find_checkpoint("base"), sample_, layout("tp2-pp1-dp1"));
  const std::string id = first.substr(first.size() - 8);
  EXPECT_TRUE(has_all("tp4-pp1-dp1-rules_" + id, "q_proj")) << "of any sizes";

  // Other rules change nothing, until a layout is saved: if need be, the same once more.
  ASSERT_TRUE(job_->save_rules(whole("{q,k}_proj")).has_value());
  EXPECT_TRUE(job_->is_settled());
  EXPECT_EQ(current(), first);
  save(kMended);
  const std::string second = current();
  EXPECT_NE(second, first);
  EXPECT_TRUE(has_all(second, "k_proj"));
  EXPECT_FALSE(has_all(first, "k_proj")) << "one path has one content";

  open();
  EXPECT_EQ(current(), second);
  EXPECT_TRUE(has_all(second, "k_proj"));
  EXPECT_FALSE(has_all(first, "k_proj"));
  ASSERT_TRUE(job_->remove_rules().has_value());
  save(R"({"tp": 2, "pp": 1, "dp": 1, "rules": ")" + id + R"("})");
  EXPECT_EQ(current(), first);
  EXPECT_EQ(job_->find_checkpoint("base")->stored()->spec, layout(first));
  save(R"({"tp": 2, "pp": 1, "dp": 1})");
  EXPECT_EQ(current(), "tp2-pp1-dp1");
  expect_layout(*job_->find_checkpoint("base"), sample_, layout("tp2-pp1-dp1"));
  const Result<std::string> verified = job_->verify("base");
  EXPECT_TRUE(verified.has_value()) << verified.error().message();
}

TEST_F(LayoutRulesTest, WhatIsWrittenUnderThemIsCommittedByThem) {
  ASSERT_TRUE(job_->save_rules(whole("{q,k,v}_proj")).has_value());
  save(kMended);
  const std::string name = current();
  for (uint64_t rank = 0; rank < 2; ++rank) {
    const FileSetRef files = job_->find_checkpoint("base")->rank_files(layout(name), rank).value();
    for (const FileSet::Entry& entry : files->entries())
      write_file(incoming("next") / "rank" / std::to_string(rank) / entry.path,
                 read_content(*files, entry.path));
  }
  ASSERT_TRUE(job_->save_rules(whole("o_proj")).has_value());
  commit("next");
  const CheckpointRef next = job_->find_checkpoint("next");
  expect_model(*next, sample_);
  EXPECT_EQ(current(), name);
  EXPECT_EQ(next->stored()->spec, layout(name, "next"));
  EXPECT_TRUE(has_all(name, "v_proj", "next"));
  EXPECT_TRUE(has_all("tp2-pp1-dp1", "v_proj", "next")) << "they are those of its commit";
}

/// Also for what was written under other sizes, if its layout says so.
TEST_F(LayoutRulesTest, StayInForceWithoutRulesJson) {
  ASSERT_TRUE(job_->save_rules(whole("v_proj")).has_value());
  save(kMended);
  const std::string name = current();
  ASSERT_TRUE(job_->remove_rules().has_value());
  save(R"({"tp": 2, "pp": 1, "dp": 1, "rules": "rules.json", "keep": 5})");
  EXPECT_EQ(current(), name);
  write_ranks(sample_, LayoutSpec(), incoming("next"));
  write_file(incoming("next") / "layout.json",
             R"({"tp": 1, "pp": 1, "dp": 1, "rules": "rules.json"})");
  commit("next");
  EXPECT_EQ(current(), name);
  EXPECT_TRUE(has_all("tp2-pp1-dp1", "v_proj", "next")) << "they are those of its commit";
  expect_model(*job_->find_checkpoint("next"), sample_);
}

/// Its facts, too, are those that the mended rules ask for.
TEST_F(LayoutRulesTest, MakeAModelThatNoRulesKnewOneThatCanBeCut) {
  Sample other = sample_;
  other.config.replace(other.config.find("\"llama\""), 7, "\"nobodys\"");
  for (TensorInfo& tensor : other.tensors) tensor.name = "odd." + tensor.name;
  write_ranks(other, LayoutSpec(), incoming("odd"));
  commit("odd");
  EXPECT_THAT(refusal(R"({"tp": 2, "pp": 1, "dp": 1})"), HasSubstr("rules.json"));
  ASSERT_TRUE(job_->save_rules(R"({"format": "ptc-rules/1", "extends": "llama",
                                   "prefixes": ["odd.model.", "odd."]})")
                  .has_value());
  save(kMended);
  EXPECT_THAT(current(), StartsWith("tp2-pp1-dp1-rules_"));
  EXPECT_FALSE(has_all(current(), "k_proj", "odd"));
  EXPECT_THAT(refusal(R"({"tp": 8, "pp": 1, "dp": 1, "rules": "rules.json"})"), HasSubstr("tp"))
      << "of two key-value heads and four others";
}

TEST_F(LayoutRulesTest, WhatCannotBeIsRefused) {
  EXPECT_THAT(refusal(kMended), AllOf(HasSubstr("line 1"), HasSubstr("no rules.json")));
  EXPECT_THAT(refusal(R"({"tp": 2, "pp": 1, "dp": 1, "rules": "0a1b2c3d"})"),
              HasSubstr("no layout of this job had rules 0a1b2c3d"));
  EXPECT_THAT(refusal(R"({"tp": 2, "pp": 1, "dp": 1, "rules": "mine.json"})"),
              HasSubstr("'rules' must be \"rules.json\""));
  ASSERT_TRUE(job_->save_rules(R"({"format": "ptc-rules/1", "extends": "llama",
      "facts": {"blocks": ["nowhere"]}, "rules": [
      {"names": ["layers.{layer}.mlp.up_proj.weight"], "cut": {"axis": 0, "heads": "blocks"}}]})")
                  .has_value());
  EXPECT_THAT(refusal(kMended), HasSubstr("blocks"));
  EXPECT_EQ(current(), "tp1-pp1-dp1");
  EXPECT_TRUE(
      job_->find_layout(*job_->find_checkpoint("base"), "tp2-pp1-dp1-rules_0a1b2c3d").has_error());
}

/// What is in force is edited on, but for what the contradiction is about.
TEST_F(LayoutRulesTest, AConfigJsonThatTheTensorsContradictKeepsNobodyFromOtherEdits) {
  constexpr const char* kWarning =
      "checkpoint more: config.json says 4 layers, and there are tensors of 3";
  save(R"({"tp": 1, "pp": 2, "dp": 1})");
  EXPECT_EQ(warnings(), std::vector<std::string>());
  commit_of_a_layer_too_many("more");
  EXPECT_EQ(current(), "tp1-pp2-dp1");
  EXPECT_EQ(warnings(), std::vector<std::string>{kWarning});
  save(R"({"tp": 1, "pp": 2, "dp": 1, "keep": 3})");
  save(R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["n0:1", "n0:0"]})");
  save(R"({"tp": 2, "pp": 2, "dp": 2, "optimizer": "zero1"})");
  EXPECT_EQ(current(), "tp2-pp2-dp2-zero1");
  EXPECT_THAT(refusal(R"({"tp": 1, "pp": 3, "dp": 1})"),
              AllOf(StartsWith("line 1, column 17: "), HasSubstr("says 4 layers")));
  EXPECT_THAT(refusal(R"({"tp": 1, "pp": 2, "dp": 1, "stages": [1, 3]})"),
              AllOf(StartsWith("line 1, column 39: "), HasSubstr("says 4 layers")));
  EXPECT_THAT(refusal(R"({"tp": 3, "pp": 2, "dp": 1})"),
              AllOf(StartsWith("line 1, column 8: "), Not(HasSubstr("says 4 layers"))));
  save(R"({"tp": 1, "pp": 1, "dp": 1})");
  EXPECT_EQ(warnings(), std::vector<std::string>{kWarning});
  EXPECT_THAT(refusal(R"({"tp": 1, "pp": 2, "dp": 1})"), HasSubstr("says 4 layers"));
  // Rules that know better.
  ASSERT_TRUE(
      job_->save_rules(R"({"format": "ptc-rules/1", "extends": "llama", "facts": {"layers": 3}})")
          .has_value());
  EXPECT_EQ(warnings(), std::vector<std::string>{kWarning}) << "they are no layout's yet";
  save(R"({"tp": 1, "pp": 2, "dp": 1, "rules": "rules.json"})");
  EXPECT_EQ(warnings(), std::vector<std::string>());
  EXPECT_THAT(refusal(R"({"tp": 1, "pp": 2, "dp": 1})"), HasSubstr("says 4 layers"));
  // Of the newest checkpoint alone.
  save(R"({"tp": 1, "pp": 1, "dp": 1})");
  write_ranks(llama_sample(false, 3), LayoutSpec(), incoming("right"));
  commit("right");
  EXPECT_EQ(warnings(), std::vector<std::string>());
}

TEST_F(LayoutRulesTest, ManyContradictionsAreAFewWarnings) {
  Sample sample = sample_;
  sample.config.replace(sample.config.find("101"), 3, "300");
  write_ranks(sample, LayoutSpec(), incoming("rows"));
  // The same embedding in further files.
  for (int i = 0; i < 9; ++i)
    fs::copy(incoming("rows") / "rank/0/model.safetensors",
             incoming("rows") / fmt::format("rank/0/more-{}.safetensors", i));
  commit("rows");
  const std::vector<std::string> told = warnings();
  ASSERT_EQ(told.size(), 5u) << fmt::format("{}", fmt::join(told, "\n"));
  EXPECT_EQ(told[0],
            "checkpoint rows: config.json says a vocabulary of 300, and "
            "model.embed_tokens.weight has 101 rows");
  EXPECT_THAT(told[4], AllOf(StartsWith("checkpoint rows: and "), HasSubstr(" more")));
}

/// Its facts, and names of its tensors, are not for all who see the job.
TEST_F(LayoutRulesTest, WhatIsContradictedIsToldToWhoMayReadIt) {
  write_a_layer_too_many("closed", "tp1-pp1-dp1");
  fs::permissions(incoming("closed") / "rank/0/config.json", fs::perms(0600));
  commit("closed");
  EXPECT_EQ(warnings(), std::vector<std::string>{
                            "checkpoint closed: its tensors contradict its config.json: ptc rules "
                            "check says how"});
}

/// The same sizes, and another name for each way in which a name can be written wrong.
TEST_F(LayoutRulesTest, OneLayoutHasOneName) {
  ASSERT_TRUE(job_->save_rules(whole("q_proj")).has_value());
  save(kMended);
  const std::string id = current().substr(current().size() - 8);
  const CheckpointRef base = job_->find_checkpoint("base");
  for (const std::string& name :
       {"tp2-pp1-rules_" + id, "tp02-pp1-dp1-rules_" + id, "tp2-rules_" + id + "-pp1-dp1",
        "tp2-pp1-dp1-rules_" + id + "-rules_" + id, "rules_" + id, "-rules_" + id,
        "tp2-pp1-dp1-rules_" + id.substr(1)})
    EXPECT_TRUE(job_->find_layout(*base, name).has_error()) << name;
  EXPECT_EQ(layout("tp2-pp2-dp1-naming_stage-rules_" + id).name(),
            "tp2-pp2-dp1-naming_stage-rules_" + id);
}

TEST(LayoutRulesOfAClusterTest, HoldOnAllNodesAlsoOnOneThatComesLater) {
  const Sample sample = llama_sample();
  LocalCluster cluster(3);
  const JobRef here = cluster.store(0).create_job("job").value();
  cluster.wait_settled();
  write_ranks(sample, LayoutSpec(), fs::path(here->files_dir()) / "incoming/base");
  ASSERT_TRUE(here->commit("base", "base").has_value());
  cluster.wait_settled();
  cluster.stop(2);
  ASSERT_TRUE(cluster.job(1, "job")->save_rules(whole("q_proj")).has_value());
  cluster.wait_settled();
  ASSERT_TRUE(here->save_layout(R"({"tp": 2, "pp": 1, "dp": 1, "rules": "rules.json",
                                    "devices": ["w1:0", "w0:0"]})")
                  .has_value());
  cluster.wait_settled();
  ASSERT_TRUE(here->remove_rules().has_value());
  cluster.start(2);
  cluster.wait_settled();
  const std::string target = here->current_target().value_or("");
  const std::string name = target.substr(target.rfind('/') + 1);
  EXPECT_THAT(name, StartsWith("tp2-pp1-dp1-rules_"));
  for (unsigned node = 0; node < 3; ++node) {
    const JobRef job = cluster.job(node, "job");
    EXPECT_EQ(job->current_target(), target);
    const CheckpointRef base = job->find_checkpoint("base");
    ASSERT_NE(base, nullptr);
    const FileSetRef model = base->model_files().value();
    size_t compared = 0;
    for (uint64_t rank = 0; rank < 2; ++rank) {
      const FileSetRef part =
          base->rank_tensors(job->find_layout(*base, name).value(), rank).value();
      for (const FileSet::Entry& entry : part->entries())
        if (entry.path.find("q_proj") != std::string::npos) {
          EXPECT_EQ(read_content(*part, entry.path), read_content(*model, entry.path));
          ++compared;
        }
    }
    EXPECT_EQ(compared, 4u);
  }
}

}  // namespace
}  // namespace ptc::testing
