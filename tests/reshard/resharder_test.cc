// What a job does in the background, round by round: on one node, and on two.
#include "reshard/job/resharder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <mutex>
#include <thread>

#include "reshard/job/part_request.h"
#include "reshard/job/wanted_states.h"
#include "tests/support/becomes.h"
#include "tests/support/job_nodes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kCut = R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w0:0", "w1:0"]})";
const std::string kStaged = R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w1:0", "w0:0"]})";

LayoutSpec spec_in(const std::string& layout) { return Layout::parse(layout).value().spec; }

bool flips(const MetaTransaction& transaction) {
  return std::any_of(transaction.puts.begin(), transaction.puts.end(),
                     [](const auto& put) { return put.first == "jobs/job/in_force"; });
}

bool is_settled(const JobNode& node) {
  const JobKnowledge::Snapshot known = node.knowledge.now();
  return !known->has_work() && !known->leads && !node.activities.any_reshard();
}

/// On every node there is what is decided, and nothing else.
void expect_nothing_left(JobNodes& nodes) {
  nodes.follow();
  EXPECT_FALSE(nodes.meta().get("leaders/job").value().has_value());
  for (unsigned i = 0; i < nodes.size(); ++i) {
    SCOPED_TRACE(JobNodes::name(i));
    JobNode& node = nodes[i];
    EXPECT_EQ(node.images(), node.named_images());
    EXPECT_THAT(node.store.drafts(), IsEmpty());
    EXPECT_TRUE(node.shelf.empty());
    EXPECT_FALSE(node.doubts.any());
    EXPECT_FALSE(node.activities.any_reshard());
    std::set<std::string> expected;
    const JobKnowledge::Snapshot known = node.knowledge.now();
    for (const auto& [name, record] : known->checkpoints) {
      const std::string directory = "checkpoints/" + record.id;
      expected.insert(directory);
      for (const std::string& file : {std::string("manifest.json"), std::string("headers.bin"),
                                      record.stored, plan_file_of(record.stored)})
        if (!file.empty()) expected.insert(directory + "/" + file);
    }
    std::set<std::string> there = node.files_about();
    EXPECT_EQ(there, expected);
  }
}

/// Two nodes; w0 has all bytes of the checkpoint, and its resharder runs.
class ResharderTest : public ::testing::Test {
 protected:
  ResharderTest() {
    node_.commit(sample_, LayoutSpec());
    nodes_.follow();
    node_.start_resharder();
    EXPECT_TRUE(becomes([&] { return is_settled(node_); }));
  }
  bool comes_into_force(const std::string& layout) {
    return becomes([&] {
      return node_.knowledge.now()->in_force.spec == spec_in(layout) && is_settled(node_);
    });
  }
  void expect_in_force(const std::string& layout) {
    const auto agreed = JobRecord::read(nodes_.meta(), "job").value();
    EXPECT_EQ(agreed.in_force.spec, spec_in(layout));
    EXPECT_EQ(agreed.in_force.revision, agreed.saved.revision);
    EXPECT_EQ(agreed.in_force.current, "base");
    expect_nothing_left(nodes_);
    for (unsigned i = 0; i < nodes_.size(); ++i) {
      const CheckpointRecord record = nodes_[i].record();
      EXPECT_EQ(record.where->spec, spec_in(layout));
      expect_layout(*record.checkpoint, sample_, spec_in(layout));
      expect_model(*record.checkpoint, sample_);
    }
  }
  /// What it makes of a question for w1's part.
  using Parts = std::function<std::optional<Error>()>;
  [[nodiscard]] auto parts_of_w1(const Parts& answer) {
    return nodes_.asks.during(
        [answer](const std::string& node, PeerMethod method) -> std::optional<Error> {
          return node == "w1" && method == PeerMethod::kPart ? answer() : std::nullopt;
        });
  }
  JobCounts counts() const { return node_.knowledge.now()->counts; }

  const Sample sample_ = llama_sample(true);
  JobNodes nodes_{2};
  JobNode& node_ = nodes_[0];
};

TEST_F(ResharderTest, AnEditIsCarriedOutAndItIsSaidThatAllIsDone) {
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(comes_into_force(kCut));
  expect_in_force(kCut);
  EXPECT_EQ(counts().reshards_done, 1u);
  EXPECT_EQ(counts().reshards_abandoned, 0u);
  EXPECT_EQ(node_.knowledge.now()->running_plan, nullptr);
  EXPECT_FALSE(node_.knowledge.now()->last_error.has_value());
  EXPECT_TRUE(becomes(
      [&] { return Leadership::has_anybody_looked(node_.place, node_.knowledge.now()->view()); }));
  // So the next who looks has nothing to do, and does not lead for that.
  std::atomic<int> led = 0;
  const auto decides = nodes_.decides.during(
      [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
        for (const auto& [key, value] : transaction.leased_puts) led += key == "leaders/job";
        return std::nullopt;
      });
  nodes_[1].start_resharder();
  EXPECT_TRUE(becomes([&] { return is_settled(nodes_[1]); }));
  EXPECT_EQ(led, 0);
}

TEST_F(ResharderTest, AnEditInTheMiddleOfAMoveStopsItAndTheNewerWins) {
  std::atomic<int> flipped = 0;
  const auto decides = nodes_.decides.during(
      [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
        flipped += flips(transaction);
        return std::nullopt;
      });
  std::atomic<bool> edited = false;
  const auto parts = parts_of_w1([&]() -> std::optional<Error> {
    if (edited.exchange(true)) return std::nullopt;
    EXPECT_TRUE(node_.edit(kStaged).has_value());
    return std::nullopt;
  });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(comes_into_force(kStaged));
  expect_in_force(kStaged);
  EXPECT_EQ(flipped, 1);
  EXPECT_EQ(counts().reshards_done, 1u);
  EXPECT_EQ(counts().reshards_abandoned, 1u);
  EXPECT_EQ(counts().reshards_failed, 0u);
}

/// Of which this node hears by its decision alone.
TEST_F(ResharderTest, AnEditOfAnotherNodeInTheMiddleOfAMoveWins) {
  std::atomic<bool> edited = false;
  const auto parts = parts_of_w1([&]() -> std::optional<Error> {
    if (edited.exchange(true)) return std::nullopt;
    EXPECT_TRUE(nodes_[1].follow().has_value());
    EXPECT_TRUE(nodes_[1].edit(kStaged).has_value());
    return std::nullopt;
  });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return edited.load(); }));
  ASSERT_TRUE(comes_into_force(kStaged));
  expect_in_force(kStaged);
  EXPECT_EQ(counts().reshards_failed, 0u);
}

TEST_F(ResharderTest, AMoveThatFailedForNowIsTriedAgainSoon) {
  std::atomic<int> asked = 0;
  std::atomic<std::chrono::steady_clock::time_point> first{}, second{};
  const auto parts = parts_of_w1([&]() -> std::optional<Error> {
    const int now = ++asked;
    if (now == 2) second = std::chrono::steady_clock::now();
    if (now > 1) return std::nullopt;
    first = std::chrono::steady_clock::now();
    return make_error(Code::kUnavailable, "it restarts");
  });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return node_.knowledge.now()->last_error.has_value(); }));
  EXPECT_THAT(node_.knowledge.now()->last_error->what, HasSubstr("is tried again"));
  EXPECT_FALSE(node_.knowledge.now()->failed.has_value());
  EXPECT_EQ(node_.images(), node_.named_images());  // meanwhile nothing is kept for it
  ASSERT_TRUE(comes_into_force(kCut));
  EXPECT_GE(second.load() - first.load(), 1s);
  expect_in_force(kCut);
  EXPECT_EQ(counts().reshards_failed, 0u);
  EXPECT_FALSE(node_.knowledge.now()->last_error.has_value());
}

TEST_F(ResharderTest, AMoveThatFailedWaitsUntilItIsWantedAgain) {
  struct Case {
    Code code;
    int tries;
  };
  // Room may come in a moment; of what is damaged somebody may have it right.
  for (const Case& one : {Case{Code::kInternal, 1}, {Code::kNoSpace, 6}, {Code::kCorrupt, 1}}) {
    SCOPED_TRACE(static_cast<int>(one.code));
    const std::string layout =
        node_.knowledge.now()->in_force.spec == spec_in(kCut) ? kStaged : kCut;
    const uint64_t failed_before = counts().reshards_failed;
    std::atomic<int> asked = 0;
    {
      const auto parts = parts_of_w1([&]() -> std::optional<Error> {
        ++asked;
        return Error(one.code, "not so");
      });
      ASSERT_TRUE(node_.edit(layout).has_value());
      ASSERT_TRUE(becomes([&] { return node_.knowledge.now()->failed.has_value(); }));
      ASSERT_TRUE(becomes([&] { return is_settled(node_); }));
      EXPECT_EQ(asked, one.tries);
      node_.resharder.wake();
      std::this_thread::sleep_for(200ms);
      EXPECT_EQ(asked, one.tries);
      EXPECT_EQ(counts().reshards_failed, failed_before + 1);
      EXPECT_EQ(node_.knowledge.now()->state(false), JobState::kFailed);
      EXPECT_THAT(node_.knowledge.now()->last_error->what, HasSubstr("save layout.json again"));
      expect_nothing_left(nodes_);
    }
    ASSERT_TRUE(node_.edit(layout).has_value());  // the same text once more
    ASSERT_TRUE(comes_into_force(layout));
    expect_in_force(layout);
  }
}

/// A flip that was not made because of what it rests on is no failure.
TEST_F(ResharderTest, AFlipThatIsRefusedIsTakenBackAndTriedAnew) {
  std::atomic<int> flipped = 0;
  const auto decides = nodes_.decides.during(
      [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
        if (!flips(transaction) || ++flipped > 2) return std::nullopt;
        return make_error(flipped == 1 ? Code::kConflict : Code::kUnavailable, "not now");
      });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(comes_into_force(kCut));
  EXPECT_EQ(flipped, 3);
  expect_in_force(kCut);
  EXPECT_EQ(counts().reshards_abandoned, 1u);
  EXPECT_EQ(counts().reshards_failed, 0u);
}

/// What was written for it would stay until the next move, and here none comes.
TEST_F(ResharderTest, AnEditBackRightBeforeTheFlipLeavesNothing) {
  const std::string as_it_is = R"({"tp": 1, "pp": 1, "dp": 1, "keep": 0})";
  std::atomic<bool> edited = false;
  const auto decides = nodes_.decides.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        if (node != "w0" || !flips(transaction) || edited.exchange(true)) return std::nullopt;
        EXPECT_TRUE(nodes_[1].follow().has_value());
        EXPECT_TRUE(nodes_[1].edit(as_it_is).has_value());
        return std::nullopt;
      });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return edited.load(); }));
  ASSERT_TRUE(comes_into_force(as_it_is));
  EXPECT_EQ(counts().reshards_abandoned, 1u);
  expect_in_force(as_it_is);
}

/// Nobody else takes what says where the bytes would lie, as where a store is full: each time it is
/// tried again, and nothing is left of the times before.
TEST_F(ResharderTest, AMoveThatNobodyElseKnowsOfLeavesNothing) {
  std::atomic<int> asked = 0;
  auto asks =
      nodes_.asks.during([&](const std::string&, PeerMethod method) -> std::optional<Error> {
        if (method != PeerMethod::kFiles) return std::nullopt;
        ++asked;
        return make_error(Code::kNoSpace, "no room for it");
      });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return asked >= 2; }));
  node_.resharder.stop();
  EXPECT_THAT(node_.knowledge.now()->last_error->what, HasSubstr("is tried again"));
  EXPECT_EQ(counts().reshards_failed, 0u);
  expect_nothing_left(nodes_);
}

class ResharderInDoubt : public ResharderTest, public ::testing::WithParamInterface<bool> {
 protected:
  bool done() const { return GetParam(); }
  /// The first flip from now on is in doubt.
  void doubt() {
    flipped_ = 0;
    decides_ = nodes_.decides.during(
        [this](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
          if (!flips(transaction) || ++flipped_ > 1) return std::nullopt;
          if (done()) (void)nodes_.meta().commit(transaction);
          return make_error(Code::kInDoubt, "the answer was lost");
        });
  }
  std::atomic<int> flipped_ = 0;
  decltype(JobNodes::decides)::Meanwhile decides_;
};

TEST_P(ResharderInDoubt, WhatItMadeStaysUntilItIsKnown) {
  doubt();
  const std::set<std::string> before = node_.images();
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return node_.doubts.any(); }));
  node_.resharder.stop();
  EXPECT_GE(node_.looks_at_doubts, 1);
  {
    const auto settles = nodes_.settles.during([]() -> std::optional<Error> {
      return make_error(Code::kUnavailable, "the metadata are away");
    });
    node_.settle_doubts();
  }
  EXPECT_TRUE(node_.doubts.any());
  EXPECT_GT(node_.images().size(), before.size());
  EXPECT_FALSE(nodes_[1].images().empty());
  node_.settle_doubts();
  expect_nothing_left(nodes_);
  if (!done()) {
    EXPECT_EQ(node_.images(), before);
  }
  const CheckpointRecord record = nodes_[1].record();
  expect_layout(*record.checkpoint, sample_, done() ? spec_in(kCut) : LayoutSpec());
  EXPECT_EQ(record.where->spec, done() ? spec_in(kCut) : LayoutSpec());
}

/// The next attempt may come before it is known what became of this one.
TEST_P(ResharderInDoubt, WhatIsMadeAnewIsNotGivenUpWithIt) {
  doubt();
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return node_.doubts.any(); }));
  ASSERT_TRUE(comes_into_force(kCut));
  EXPECT_EQ(flipped_, done() ? 1 : 2);
  EXPECT_TRUE(node_.doubts.any());
  node_.settle_doubts();
  expect_in_force(kCut);
  EXPECT_EQ(counts().reshards_failed, 0u);
}
INSTANTIATE_TEST_SUITE_P(MadeOrNot, ResharderInDoubt, ::testing::Bool());

TEST_F(ResharderTest, WhileAnotherLeadsItWaits) {
  const int64_t led = nodes_.meta().commit({.puts = {{"leaders/job", "w1"}}}).value();
  ASSERT_TRUE(node_.edit(kCut).has_value());
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(JobRecord::read(nodes_.meta(), "job").value().in_force.revision, 1);
  EXPECT_FALSE(node_.knowledge.now()->leads);
  EXPECT_FALSE(node_.activities.any_reshard());
  EXPECT_GT(node_.knowledge.now()->others_first.time_since_epoch().count(), 0);
  EXPECT_EQ(node_.images(), node_.named_images());
  EXPECT_EQ(nodes_.meta().get("leaders/job").value()->revision, led);  // it is still that one's
  ASSERT_TRUE(nodes_.meta().commit({.deletes = {"leaders/job"}}).has_value());
  ASSERT_TRUE(comes_into_force(kCut));
  expect_in_force(kCut);
}

/// Who was stopped for so long that another leads gets nothing done, and leaves the other its key.
TEST_F(ResharderTest, WhoLeadsNoMoreDecidesNothing) {
  std::atomic<int64_t> other = 0;
  const auto parts = parts_of_w1([&]() -> std::optional<Error> {
    if (other == 0) other = nodes_.meta().commit({.puts = {{"leaders/job", "w1"}}}).value();
    return std::nullopt;
  });
  ASSERT_TRUE(node_.edit(kCut).has_value());
  ASSERT_TRUE(becomes([&] { return counts().reshards_abandoned == 1; }));
  EXPECT_EQ(JobRecord::read(nodes_.meta(), "job").value().in_force.revision, 1);
  EXPECT_EQ(nodes_.meta().get("leaders/job").value()->revision, other);
  EXPECT_EQ(node_.images(), node_.named_images());
  EXPECT_EQ(nodes_[1].images(), nodes_[1].named_images());
  ASSERT_TRUE(nodes_.meta().commit({.deletes = {"leaders/job"}}).has_value());
  ASSERT_TRUE(comes_into_force(kCut));
  expect_in_force(kCut);
}

/// The leader that wanted it is gone, and nobody says so.
TEST_F(ResharderTest, PartsWhoseLeaderIsGoneGo) {
  JobNode& other = nodes_[1];
  const CheckpointRecord record = node_.record();
  const int64_t led = nodes_.meta().commit({.puts = {{"leaders/job", "w0"}}}).value();
  const std::string request =
      PartRequest{.id = record.id,
                  .generation = record.generation,
                  .stored = record.stored,
                  .revision = 1,
                  .wanted = wanted_state(node_.place, *record.checkpoint,
                                         Layout::parse(kCut).value(), node_.cluster.alive())
                                .value(),
                  .epoch = led}
          .to_text();
  ASSERT_TRUE(other.maker.make_for(request).has_value());
  EXPECT_FALSE(other.images().empty());
  other.start_resharder();
  std::this_thread::sleep_for(100ms);
  EXPECT_FALSE(other.shelf.empty());  // it is led still
  ASSERT_TRUE(nodes_.meta().commit({.deletes = {"leaders/job"}}).has_value());
  other.resharder.wake();
  EXPECT_TRUE(becomes([&] {
    return other.shelf.empty() && other.images().empty() && other.store.drafts().empty();
  }));
  expect_nothing_left(nodes_);
}

TEST_F(ResharderTest, OlderCheckpointsGetTheirCopiesToo) {
  node_.commit(sample_, LayoutSpec(), "next");
  nodes_.follow();
  ASSERT_TRUE(
      node_.edit(R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"], "replicas": 1})").has_value());
  EXPECT_TRUE(
      becomes([&] { return is_settled(node_) && node_.knowledge.now()->missing_copies() == 0; }));
  expect_nothing_left(nodes_);
  for (const char* name : {"base", "next"}) {
    std::set<std::string> on;
    for (const StoredImage& image : nodes_[1].record(name).where->images) on.insert(image.node);
    EXPECT_THAT(on, ElementsAre("w0", "w1")) << name;
  }
  EXPECT_EQ(nodes_[1].images().size(), node_.images().size());
  // Fewer are wanted: those that are too many go, of all.
  ASSERT_TRUE(
      node_.edit(R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"], "replicas": 0})").has_value());
  const size_t files = 2 * node_.record().checkpoint->manifest().files.size();
  EXPECT_TRUE(becomes([&] {
    const auto followed = nodes_[1].follow();
    return followed.has_value() && is_settled(node_) &&
           node_.images().size() + nodes_[1].images().size() == files;
  }));
  expect_nothing_left(nodes_);
}

TEST_F(ResharderTest, ThoseThatAreTooManyAreRemovedUntilTheyAreGone) {
  for (const char* name : {"second", "third"}) node_.commit(sample_, LayoutSpec(), name);
  nodes_.follow();
  std::mutex mutex;
  std::vector<std::string> removed;
  const auto removes = nodes_.removes.during(
      [&](const std::string&, const std::string& checkpoint) -> std::optional<Error> {
        const std::lock_guard lock(mutex);
        removed.push_back(checkpoint);
        return make_error(Code::kBusy, "somebody reads it");
      });
  ASSERT_TRUE(node_.edit(R"({"tp": 1, "pp": 1, "dp": 1, "keep": 1})").has_value());
  EXPECT_TRUE(becomes([&] {
    const std::lock_guard lock(mutex);
    return removed.size() >= 4;  // it looks again, after two seconds
  }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(std::set<std::string>(removed.begin(), removed.end()),
            (std::set<std::string>{"base", "second"}));
}

TEST(ResharderAlone, OfManyEditsTheLastIsInForceAndNothingIsLeftOfTheOthers) {
  const Sample sample = llama_sample(true);
  JobNodes nodes(1, JobNodes::Kind::kAlone);
  JobNode& node = nodes[0];
  node.commit(sample, LayoutSpec());
  node.start_resharder();
  const char* layouts[] = {R"({"tp": 2, "pp": 1, "dp": 1})", R"({"tp": 1, "pp": 2, "dp": 1})",
                           R"({"tp": 2, "pp": 2, "dp": 1})", R"({"tp": 4, "pp": 1, "dp": 1})"};
  int64_t revision = 1;
  for (int round = 0; round < 3; ++round) {
    for (const char* layout : layouts) {
      ASSERT_TRUE(node.edit(layout).has_value());
      std::this_thread::sleep_for(std::chrono::milliseconds(round * 3));
      ++revision;
    }
    ASSERT_TRUE(becomes([&] { return is_settled(node); }));
    const auto agreed = JobRecord::read(nodes.meta(), "job").value();
    EXPECT_EQ(agreed.in_force.revision, revision);
    EXPECT_EQ(agreed.in_force.spec, spec_in(layouts[3]));
    EXPECT_EQ(node.knowledge.now()->counts.reshards_failed, 0u);
    expect_layout(*node.record().checkpoint, sample, spec_in(layouts[3]));
    expect_nothing_left(nodes);
  }
}

/// There is nobody who could be away: it fails, and once it is known what became of it, it is.
TEST(ResharderAlone, AFlipInDoubtFailsUntilItIsKnownToBeDone) {
  const Sample sample = llama_sample();
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    JobNodes nodes(1, JobNodes::Kind::kAlone);
    JobNode& node = nodes[0];
    node.commit(sample, LayoutSpec());
    const std::set<std::string> before = node.images();
    auto decides = nodes.decides.during(
        [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
          if (!flips(transaction)) return std::nullopt;
          if (done) (void)nodes.meta().commit(transaction);
          return make_error(Code::kInDoubt, "the answer was lost");
        });
    node.start_resharder();
    const std::string layout = R"({"tp": 2, "pp": 1, "dp": 1})";
    ASSERT_TRUE(node.edit(layout).has_value());
    ASSERT_TRUE(becomes([&] { return node.knowledge.now()->failed.has_value(); }));
    EXPECT_GT(node.images().size(), before.size());
    decides = {};
    node.settle_doubts();
    ASSERT_TRUE(becomes([&] { return is_settled(node); }));
    EXPECT_EQ(node.knowledge.now()->failed.has_value(), !done);
    EXPECT_EQ(node.images(), node.named_images());
    if (!done) {
      EXPECT_EQ(node.images(), before);
      ASSERT_TRUE(node.edit(layout).has_value());
    }
    ASSERT_TRUE(becomes([&] { return node.knowledge.now()->in_force.revision == 2; }));
    ASSERT_TRUE(becomes([&] { return is_settled(node); }));
    expect_layout(*node.record().checkpoint, sample, spec_in(layout));
    expect_nothing_left(nodes);
  }
}

}  // namespace
}  // namespace ptc::testing
