#include "dataset/run/data_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "store/base/json.h"

namespace ptc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const User kSelf{::geteuid(), ::getegid(), {}};

class DataSetTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/ptc_data_set_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    std::filesystem::create_directory(dir_ + "/data");
    write_lines("a.jsonl", 12);
    write_lines("b.jsonl", 8);
    reopen_meta();
    put_job();
  }
  void TearDown() override {
    node_.reset();
    meta_.reset();
    std::filesystem::remove_all(dir_);
  }

  void reopen_meta() { meta_ = open_sqlite_meta(dir_ + "/meta.db").value(); }
  void put_dp(const std::string& text) {
    ASSERT_TRUE(meta_->commit({.compares = {}, .puts = {{"jobs/llama/in_force", text}}}));
  }
  void put_job() { ASSERT_TRUE(meta_->commit({.compares = {}, .puts = {{"jobs/llama", "{}"}}})); }
  void write_lines(const std::string& name, int count) {
    std::ofstream out(dir_ + "/data/" + name);
    for (int i = 0; i < count; ++i) out << "{\"i\": " << i << "}\n";
  }
  std::unique_ptr<DataSet> open(const std::string& node, DataParallel dp) {
    std::filesystem::create_directory(dir_ + "/" + node);
    DataSetOptions options{.job = "llama",
                           .meta = meta_.get(),
                           .directory = dir_ + "/" + node,
                           .pool = &pool_,
                           .dp = dp};
    options.checkpoint_has = [this](uint64_t count) { return checkpoints_.contains(count); };
    auto opened = DataSet::open(std::move(options));
    EXPECT_TRUE(opened->loaded());
    opened->wait_settled();
    return opened;
  }
  std::string source() const { return fmt::format("{{\"shards\": [\"{}/data\"]}}", dir_); }
  /// A run of 20 samples, batch 6, dp 3.
  DataSet& begun(std::string_view more = "") {
    node_ = open("w0", {3, 1});
    EXPECT_TRUE(node_->save_source(source(), kSelf));
    node_->wait_settled();
    const auto saved = node_->save_order(order(6, more));
    EXPECT_TRUE(saved) << saved.error().message();
    return *node_;
  }
  static std::string order(uint64_t batch, std::string_view more = "") {
    return fmt::format("{{\"batch\": {}, \"epochs\": 2{}}}", batch, more);
  }
  static json::object status_of(const DataSet& set) {
    return parse_json(set.status_json()).value().as_object();
  }
  static std::string why(const Result<>& result) {
    return result ? "accepted" : result.error().message();
  }
  static std::vector<uint64_t> ids(const DataSet& set, uint64_t generation) {
    const ShownGenerationRef shown = set.generation(generation);
    return shown->cuts.global_ids(shown->cuts.first_epoch(), 0, 100);
  }

  std::string dir_;
  std::unique_ptr<MetaClient> meta_;
  StepPool pool_{2};
  std::unique_ptr<DataSet> node_;
  std::set<uint64_t> checkpoints_;
};

TEST_F(DataSetTest, NothingYet) {
  node_ = open("w0", {1, 1});
  EXPECT_EQ(node_->source_text(), std::nullopt);
  EXPECT_EQ(node_->consumed_text(), "0\n");
  EXPECT_EQ(node_->plan_json(), "{}\n");
  EXPECT_THAT(node_->generations(), IsEmpty());
  EXPECT_EQ(status_of(*node_)["state"], "no source.json");
  EXPECT_THAT(why(node_->save_consumed("5")), HasSubstr("there is no run yet"));
  EXPECT_TRUE(node_->check_dp(7));
}

/// Beside a text something else may be decided, of which the data set knows nothing: in the same
/// transaction, or neither.
TEST_F(DataSetTest, WhatIsDecidedWithATextComesOrGoesWithIt) {
  node_ = open("w0", {3, 1});
  const auto with = [&](const std::string& key, int64_t revision) {
    return [this, key, revision](MetaTransaction transaction) {
      transaction.compares.push_back({"jobs/llama/beside", revision});
      transaction.puts.emplace_back(key, "x");
      return meta_->commit(transaction);
    };
  };
  ASSERT_TRUE(node_->save_source(source(), kSelf, DataSet::kCheckingTakes, with("a", 0)));
  ASSERT_TRUE(node_->save_order(order(6), with("b", 0)));
  ASSERT_TRUE(node_->save_order(order(6), with("c", 0))) << "the same text";
  for (const char* key : {"a", "b", "c"}) EXPECT_TRUE(meta_->get(key).value().has_value()) << key;
  EXPECT_FALSE(node_->save_order(order(12), with("d", 7)));
  EXPECT_EQ(node_->order_text(), order(6));
  EXPECT_FALSE(meta_->get("d").value().has_value());
}

TEST_F(DataSetTest, BeginsWhicheverIsSavedFirst) {
  node_ = open("w0", {3, 1});
  ASSERT_TRUE(node_->save_order(order(6)));
  EXPECT_EQ(status_of(*node_)["state"], "no source.json");
  ASSERT_TRUE(node_->save_source(source(), kSelf));
  node_->wait_settled();
  EXPECT_THAT(node_->generations(), ElementsAre(1));
  EXPECT_EQ(status_of(*node_)["state"], "ready");
  EXPECT_EQ(status_of(*node_)["source"].at("samples"), 20);
  EXPECT_EQ(node_->generation(1)->cuts.steps(0), 4u);
}

TEST_F(DataSetTest, ChangesOfDpAndBatchAtConsumed) {
  DataSet& set = begun();
  EXPECT_THAT(set.generations(), ElementsAre(1));
  const ShownGenerationRef first = set.generation(1);
  ASSERT_TRUE(set.save_consumed("6\n"));
  EXPECT_EQ(set.consumed_text(), "6\n");
  set.set_dp({2, 2});
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(1, 2));
  EXPECT_EQ(set.generation(2)->cuts.segment().from, 6u);
  EXPECT_EQ(set.generation(2)->cuts.segment().dp, 2u);
  ASSERT_TRUE(set.save_order(order(8)));
  EXPECT_THAT(set.generations(), ElementsAre(1, 3));
  // All of them in the same order, and the first as it was.
  const std::vector<uint64_t> all = ids(set, 1), rest = ids(set, 3);
  EXPECT_TRUE(std::equal(all.begin() + 6, all.begin() + 20, rest.begin()));
  EXPECT_EQ(set.generation(1), first);
}

TEST_F(DataSetTest, RefusesAndSaysWhy) {
  DataSet& set = begun();
  EXPECT_EQ(why(set.save_order("{\"batch\": 6,\n \"bach\": 1}")),
            "order.json: line 2, column 2: unknown key 'bach' (did you mean 'batch'?)");
  EXPECT_THAT(status_of(set)["error"].as_string(), HasSubstr("unknown key 'bach'"));
  EXPECT_EQ(set.order_text(), order(6));
  EXPECT_THAT(why(set.save_order(order(7))),
              HasSubstr("order.json: line 1, column 11: a global batch of 7 does not divide"));
  EXPECT_THAT(why(set.save_source("{}", kSelf)), HasSubstr("source.json: "));
  EXPECT_THAT(why(set.save_consumed("-1")), HasSubstr("consumed: '-1' is not a count"));
  EXPECT_THAT(why(set.save_consumed("")), HasSubstr("is not a count"));
  EXPECT_THAT(why(set.save_consumed("41")), HasSubstr("more than the 40 samples"));
  ASSERT_TRUE(set.save_consumed("8"));
  EXPECT_TRUE(status_of(set)["error"].is_null());
  EXPECT_THAT(why(set.save_consumed("7")), HasSubstr("7 is less than the 8 that are consumed"));
  EXPECT_THAT(why(set.check_dp(2)),
              HasSubstr("the data set: 8 consumed samples are not whole steps"));
  EXPECT_THAT(why(set.check_dp(4)), HasSubstr("does not divide among 4"));
  EXPECT_TRUE(set.check_dp(3));
  EXPECT_THAT(why(set.save_order(order(6, ", \"seed\": 1"))),
              HasSubstr("neither can change any more"));
  EXPECT_THAT(why(set.remove_order()), HasSubstr("8 samples are consumed"));
  EXPECT_THAT(why(set.remove_source()), HasSubstr("8 of its samples are consumed"));
  EXPECT_THAT(set.generations(), ElementsAre(1));
}

TEST_F(DataSetTest, ADpThatCameTooSoonWaitsForTheEndOfAStep) {
  DataSet& set = begun();
  ASSERT_TRUE(set.save_consumed("8"));
  set.set_dp({2, 2});
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(1));
  EXPECT_THAT(status_of(set)["error"].as_string(),
              HasSubstr("the nearest ends of steps are 6 and 12"));
  EXPECT_EQ(status_of(set)["state"], "waiting");
  ASSERT_TRUE(set.save_consumed("12"));
  set.wait_settled();
  EXPECT_EQ(status_of(set)["state"], "ready");
  EXPECT_THAT(set.generations(), ElementsAre(1, 2));
  EXPECT_TRUE(status_of(set)["error"].is_null());
}

TEST_F(DataSetTest, ANodeThatMayNotDecideSaysWhyAtOnce) {
  begun();
  node_.reset();
  DataSetOptions options{
      .job = "llama", .meta = meta_.get(), .directory = dir_ + "/w0", .pool = &pool_, .dp = {3, 1}};
  options.may_decide = [] { return make_error(Code::kUnavailable, "cut off"); };
  node_ = DataSet::open(std::move(options));
  ASSERT_TRUE(node_->loaded());
  node_->wait_settled();
  EXPECT_EQ(why(node_->save_order(order(3))), "cut off");
  EXPECT_EQ(why(node_->save_consumed("6")), "cut off");
  EXPECT_EQ(why(node_->save_source(source(), kSelf)), "cut off");
  EXPECT_EQ(status_of(*node_)["error"], "cut off");
  EXPECT_THAT(node_->generations(), ElementsAre(1));
}

TEST_F(DataSetTest, RoundedDownRepeats) {
  DataSet& set = begun(", \"round\": \"down\"");
  ASSERT_TRUE(set.save_consumed("8"));
  set.set_dp({2, 2});
  set.wait_settled();
  EXPECT_EQ(set.consumed_text(), "6\n");
  EXPECT_THAT(set.plan_json(), HasSubstr("\"repeated\""));
}

TEST_F(DataSetTest, GoesBackWithACheckpoint) {
  DataSet& set = begun();
  ASSERT_TRUE(set.save_consumed("12"));
  ASSERT_TRUE(set.save_order(order(3)));
  ASSERT_TRUE(set.save_consumed("18"));
  EXPECT_THAT(set.generations(), ElementsAre(1, 2));
  checkpoints_ = {6};
  const ShownGenerationRef held = set.generation(2);
  EXPECT_FALSE(set.save_consumed("12"));
  ASSERT_TRUE(set.save_consumed("6"));
  EXPECT_EQ(set.consumed_text(), "6\n");
  EXPECT_THAT(set.generations(), ElementsAre(1, 3));
  EXPECT_EQ(set.generation(3)->cuts.segment().from, 6u);
  EXPECT_EQ(set.generation(3)->cuts.segment().batch, 3u);
  EXPECT_EQ(held->cuts.segment().from, 12u);
}

TEST_F(DataSetTest, SurvivesARestart) {
  begun();
  ASSERT_TRUE(node_->save_consumed("6"));
  ASSERT_TRUE(node_->save_order(order(9)));
  const std::string plan = node_->plan_json();
  const std::vector<uint64_t> before = ids(*node_, 2);
  node_.reset();
  reopen_meta();
  node_ = open("w0", {3, 1});
  EXPECT_EQ(node_->plan_json(), plan);
  EXPECT_EQ(node_->consumed_text(), "6\n");
  EXPECT_EQ(ids(*node_, 2), before);
}

TEST_F(DataSetTest, OtherShardsInTheMiddleOfARun) {
  DataSet& set = begun();
  // Before anything is consumed they may be others.
  write_lines("c.jsonl", 10);
  const std::string fewer = fmt::format("{{\"shards\": [\"{}/data/c.jsonl\"]}}", dir_);
  ASSERT_TRUE(set.save_source(fewer, kSelf));
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(2));
  ASSERT_TRUE(set.save_consumed("6"));
  ASSERT_TRUE(set.save_source(source(), kSelf));
  set.wait_settled();
  EXPECT_THAT(set.generations(), IsEmpty());
  EXPECT_EQ(status_of(set)["state"], "refused");
  EXPECT_THAT(status_of(set)["error"].as_string(), HasSubstr("name the former shards again"));
  ASSERT_TRUE(set.save_source(fewer, kSelf));
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(2));
}

TEST_F(DataSetTest, OtherContentOfEqualSizeIsNoticed) {
  DataSet& set = begun();
  ASSERT_TRUE(set.save_consumed("6"));
  const auto held = set.generation(1);
  // Saved again, nothing having changed: looked at anew, and the same.
  ASSERT_TRUE(set.save_source(source(), kSelf));
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(1));
  std::fstream file(dir_ + "/data/a.jsonl", std::ios::in | std::ios::out);
  file.seekp(6) << '7';
  file.close();
  EXPECT_FALSE(held->source->open_shard(0));
  ASSERT_TRUE(set.save_source(source(), kSelf));
  set.wait_settled();
  EXPECT_THAT(set.generations(), IsEmpty());
  EXPECT_EQ(status_of(set)["state"], "refused");
  EXPECT_THAT(status_of(set)["error"].as_string(),
              HasSubstr("are not those of which 6 are consumed"));
}

TEST_F(DataSetTest, SavedAgainOnOneNodeItIsIndexedAnewOnAll) {
  meta_ = make_memory_meta();
  put_job();
  auto a = open("a", {1, 1}), b = open("b", {1, 1});
  const std::string none = fmt::format("{{\"shards\": [\"{}/data/late.jsonl\"]}}", dir_);
  ASSERT_TRUE(a->save_source(none, kSelf));
  auto state = [](DataSet& set) {
    set.catch_up();
    set.wait_settled();
    return std::string(status_of(set)["state"].as_string());
  };
  EXPECT_EQ(state(*a), "refused");
  EXPECT_EQ(state(*b), "refused");
  write_lines("late.jsonl", 5);
  ASSERT_TRUE(b->save_source(none, kSelf));
  EXPECT_EQ(state(*b), "no order.json");
  EXPECT_EQ(state(*a), "no order.json");
}

TEST_F(DataSetTest, RefusedIsNeverWithoutAReason) {
  DataSet& set = begun();
  ASSERT_TRUE(meta_->commit(
      {.compares = {},
       .puts = {{"jobs/llama/dataset/order", "{\"batch\": \"of a later version\"}"}}}));
  for (int i = 0; i < 100; ++i) {
    const auto status = status_of(set);
    if (status.at("state") == "refused") {
      EXPECT_FALSE(status.at("error").is_null());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    set.catch_up();
  }
}

TEST_F(DataSetTest, ABadShardIsNamedAndTriedAgain) {
  node_ = open("w0", {1, 1});
  std::ofstream(dir_ + "/data/bad.tar") << "no tar";
  const std::string bad =
      fmt::format("{{\"format\": \"tar\", \"shards\": [\"{}/data/bad.tar\"]}}", dir_);
  ASSERT_TRUE(node_->save_source(bad, kSelf));
  node_->wait_settled();
  EXPECT_EQ(status_of(*node_)["state"], "refused");
  EXPECT_THAT(status_of(*node_)["error"].as_string(), HasSubstr("bad.tar"));
  ASSERT_EQ(std::system(fmt::format("tar -C {0}/data -cf {0}/data/bad.tar a.jsonl", dir_).c_str()),
            0);
  ASSERT_TRUE(node_->save_source(bad, kSelf));
  node_->wait_settled();
  EXPECT_EQ(status_of(*node_)["state"], "no order.json");
  EXPECT_EQ(status_of(*node_)["source"].at("samples"), 1);
}

TEST_F(DataSetTest, TwoNodesAgree) {
  meta_ = make_memory_meta();
  put_job();
  auto a = open("a", {3, 1}), b = open("b", {3, 1});
  ASSERT_TRUE(a->save_source(source(), kSelf));
  ASSERT_TRUE(b->save_order(order(6)));
  auto settle = [&] {
    for (int i = 0; i < 20; ++i) {
      a->wait_settled();
      b->wait_settled();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  settle();
  EXPECT_EQ(a->plan_json(), b->plan_json());
  EXPECT_THAT(b->generations(), ElementsAre(1));
  ASSERT_TRUE(b->save_consumed("6"));
  // a hears of the layout first; b, which does not know it yet, must not take it back.
  a->set_dp({2, 5});
  settle();
  EXPECT_THAT(b->generations(), ElementsAre(1, 2));
  EXPECT_EQ(a->plan_json(), b->plan_json());
  EXPECT_EQ(b->generation(2)->cuts.segment().dp, 2u);
  b->set_dp({2, 5});
  settle();
  EXPECT_THAT(a->generations(), ElementsAre(1, 2));
  EXPECT_EQ(ids(*a, 2), ids(*b, 2));
  // Both move on at the same time: one of them is refused, or both are heard in turn.
  std::thread other([&] { (void)b->save_consumed("24"); });
  (void)a->save_consumed("18");
  other.join();
  settle();
  EXPECT_EQ(a->consumed_text(), "24\n");
  EXPECT_EQ(b->consumed_text(), "24\n");
}

TEST_F(DataSetTest, FollowsTheLayoutInForce) {
  put_dp("3 1");
  std::filesystem::create_directory(dir_ + "/w0");
  node_ = DataSet::open(
      {.job = "llama",
       .meta = meta_.get(),
       .directory = dir_ + "/w0",
       .pool = &pool_,
       .dp_key = "jobs/llama/in_force",
       .dp_of = [](std::string_view text) {
         return std::optional(DataParallel{static_cast<uint64_t>(text[0] - '0'), text[2] - '0'});
       }});
  ASSERT_TRUE(node_->save_source(source(), kSelf));
  ASSERT_TRUE(node_->save_order(order(6)));
  node_->wait_settled();
  EXPECT_EQ(node_->generation(1)->cuts.segment().dp, 3u);
  put_dp("2 2");
  for (int i = 0; i < 200 && node_->generations() != std::vector<uint64_t>{2}; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(node_->generation(2)->cuts.segment().dp, 2u);
  // What is saved is measured by the layout as it is, whether or not this node has heard of it.
  for (int revision = 3; revision < 9; ++revision) {
    const int ranks = 2 + revision % 2;
    put_dp(fmt::format("{} {}", ranks, revision));
    EXPECT_EQ(why(node_->save_order(order(ranks == 2 ? 4 : 9))), "accepted") << revision;
  }
}

TEST_F(DataSetTest, BeginsAnewAfterARemoval) {
  DataSet& set = begun();
  ASSERT_TRUE(set.save_consumed("6"));
  ASSERT_TRUE(set.remove());
  set.wait_settled();
  EXPECT_THAT(set.generations(), IsEmpty());
  EXPECT_EQ(set.consumed_text(), "0\n");
  EXPECT_EQ(set.order_text(), std::nullopt);
  ASSERT_TRUE(set.save_source(source(), kSelf));
  ASSERT_TRUE(set.save_order(order(9, ", \"seed\": 4")));
  set.wait_settled();
  EXPECT_THAT(set.generations(), ElementsAre(1));
}

/// Without a pause: whoever follows sees the same text of source.json before and after.
TEST_F(DataSetTest, MadeAnewAtOnceItIsIndexedAnewOnAllNodes) {
  DataSet& set = begun();
  auto other = open("w1", {3, 1});
  for (int i = 0; i < 30; ++i) {
    const int lines = 13 + i;
    ASSERT_TRUE(set.remove());
    write_lines("a.jsonl", lines);
    ASSERT_TRUE(set.save_source(source(), kSelf));
    ASSERT_TRUE(set.save_order(order(6)));
    set.wait_settled();
    ASSERT_EQ(status_of(set)["state"], "ready");
    EXPECT_EQ(status_of(set)["source"].at("samples"), lines + 8);
    ASSERT_NE(set.generation(1), nullptr);
    EXPECT_EQ(set.generation(1)->cuts.run().samples, static_cast<uint64_t>(lines) + 8);
    for (int wait = 0; wait < 1000 && other->generation(1) == nullptr; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    other->wait_settled();
    ASSERT_NE(other->generation(1), nullptr);
    EXPECT_EQ(other->generation(1)->cuts.run().samples, static_cast<uint64_t>(lines) + 8);
  }
}

TEST_F(DataSetTest, NobodyLooksForShardsThatAreNotAskedForAnyMore) {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                         std::filesystem::directory_iterator());
  };
  const auto wait = [&](ptrdiff_t count) {
    while (threads() > count) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  std::filesystem::create_directory_symlink(".", dir_ + "/data/x");
  std::filesystem::create_directory_symlink(".", dir_ + "/data/y");
  std::string endless = dir_ + "/data";
  for (int i = 0; i < 30; ++i) endless += "/*";  // 2³⁰ directories
  const std::string text = fmt::format("{{\"shards\": [\"{}/nothing\"]}}", endless);
  node_ = open("w0", {});
  const auto before = threads();
  EXPECT_TRUE(node_->save_source(text, kSelf));
  EXPECT_TRUE(node_->save_source(text, kSelf));
  EXPECT_TRUE(node_->save_source(source(), kSelf));
  wait(before);
  EXPECT_TRUE(node_->save_source(text, kSelf));
  EXPECT_TRUE(node_->remove());
  wait(before);
  EXPECT_TRUE(node_->save_source(text, kSelf));
  node_.reset();
  wait(before);
}

TEST_F(DataSetTest, OfARemovedJobNothingIsWritten) {
  begun();
  ASSERT_TRUE(meta_->commit({.compares = {}, .puts = {}, .deletes = {"jobs/llama"}}));
  EXPECT_THAT(why(node_->save_consumed("6")), HasSubstr("job llama was removed"));
}

}  // namespace
}  // namespace ptc
