// A commit, stage by stage: what it leaves behind wherever it ends.
#include "reshard/job/commit_attempt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <thread>

#include "tests/support/becomes.h"
#include "tests/support/job_nodes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

bool is_of_a_commit(const MetaTransaction& transaction) {
  return std::any_of(transaction.puts.begin(), transaction.puts.end(),
                     [](const auto& put) { return put.first.ends_with("/sequence"); });
}

/// Content by path.
std::map<std::string, std::string> tree_of(const std::string& directory) {
  std::map<std::string, std::string> files;
  std::error_code none;
  for (const auto& entry : fs::recursive_directory_iterator(directory, none))
    files[fs::relative(entry.path(), directory).string()] =
        entry.is_regular_file() ? read_file(entry.path()) : "(a directory)";
  return files;
}

/// Where an attempt that w0 leads can be met: a question to w1, or, without one, on w0 alone.
struct Stage {
  const char* name;
  std::optional<PeerMethod> asks;
  enum class Own { kNone, kSeals, kDecides } own = Own::kNone;
};
const Stage kSeals{"seals", std::nullopt, Stage::Own::kSeals};
const Stage kDecides{"decides", std::nullopt, Stage::Own::kDecides};
const std::vector<Stage> kBeforeAsked{kSeals,
                                      {"takes elsewhere", PeerMethod::kTake},
                                      {"hashes elsewhere", PeerMethod::kHash},
                                      {"adopts elsewhere", PeerMethod::kAdopt},
                                      {"writes down", PeerMethod::kFiles},
                                      {"makes copies", PeerMethod::kPart}};
const Stage kHides{"hides", PeerMethod::kHide};

/// Two nodes: rank 0 has written on w0, which leads, and rank 1 on w1; each shall have a copy of
/// the other's files.
class CommitAttemptTest : public ::testing::Test {
 protected:
  CommitAttemptTest() {
    EXPECT_TRUE(leader_.edit(R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})").has_value());
    nodes_.follow();
  }
  void write(const std::string& incoming = "base") {
    (void)leader_.write(sample_, spec_, incoming);
    fs::create_directories(other_.incoming(incoming) + "/rank");
    fs::rename(leader_.incoming(incoming) + "/rank/1", other_.incoming(incoming) + "/rank/1");
    for (unsigned i = 0; i < 2; ++i) written_[i][incoming] = tree_of(nodes_[i].incoming(incoming));
  }
  std::shared_ptr<CommitAttempt> begin(const std::string& incoming = "base",
                                       const std::string& name = "base") {
    auto attempt = std::make_shared<CommitAttempt>(
        leader_.commits, fmt::format("attempt-{}", ++begun_), incoming, name);
    attempt->start();
    return attempt;
  }
  /// Until nothing is left to do but what somebody must ask for.
  bool becomes_ready() {
    return becomes([&] {
      const auto commits = leader_.activities.commits();
      return commits.size() == 1 && commits.front().phase == "ready";
    });
  }
  /// As by the same mv, again and again, of which each has too little time for all of it.
  static bool is_asked_until(CommitAttempt& attempt, const std::atomic<bool>& met) {
    return becomes([&] {
             return attempt.wait(CommitAttempt::Clock::now() + 500ms).has_value() || met;
           }) &&
           met;
  }
  std::string phase_of(const std::string& incoming) {
    for (const Activity::Progress& one : leader_.activities.commits())
      if (one.subject.from == "incoming/" + incoming) return one.phase;
    return "";
  }
  /// While what is returned lives, `met` is called whenever an attempt comes to the stage; its
  /// error is what comes of that.
  using Met = std::function<std::optional<Error>()>;
  struct Meeting {
    decltype(JobNodes::asks)::Meanwhile asks;
    decltype(JobNodes::decides)::Meanwhile decides;
    decltype(JobNode::seals)::Meanwhile seals;
  };
  Meeting meet(const Stage& stage, const Met& met) {
    Meeting meeting;
    if (stage.asks)
      meeting.asks = nodes_.asks.during(
          [met, at = *stage.asks](const std::string&, PeerMethod method) -> std::optional<Error> {
            return method == at ? met() : std::nullopt;
          });
    if (stage.own == Stage::Own::kDecides)
      meeting.decides = nodes_.decides.during(
          [met](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
            return is_of_a_commit(transaction) ? met() : std::nullopt;
          });
    if (stage.own == Stage::Own::kSeals)
      meeting.seals =
          leader_.seals.during([met](const std::string&) -> std::optional<Error> { return met(); });
    return meeting;
  }
  /// As it was before anybody asked, on both nodes.
  void expect_back(const std::string& incoming = "base") {
    for (unsigned i = 0; i < 2; ++i) {
      SCOPED_TRACE(JobNodes::name(i));
      JobNode& node = nodes_[i];
      EXPECT_EQ(tree_of(node.incoming(incoming)), written_[i][incoming]);
      EXPECT_EQ(node.images(), node.named_images());
      std::set<std::string> of_others;  // of checkpoints that there are
      for (const std::string& file : node.files_about())
        if (file.find("attempt-") != std::string::npos && !is_known(file)) of_others.insert(file);
      EXPECT_THAT(of_others, IsEmpty());
      EXPECT_TRUE(node.shelf.empty());
      EXPECT_FALSE(node.taken.any());
      EXPECT_EQ(node.seals_now, 0);
      EXPECT_THAT(node.activities.commits(), IsEmpty());
      EXPECT_FALSE(node.doubts.any());
    }
  }
  /// It is a checkpoint, with all its copies, and nothing else is left of it once the same mv on
  /// the other node was told so.
  void expect_committed(const std::string& name = "base", std::string incoming = "") {
    if (incoming.empty()) incoming = name;
    nodes_.follow();
    const auto heard = other_.taken.hear(incoming, name, CommitAttempt::Clock::now() + 10s,
                                         [&](const std::string& id) {
                                           const auto now = other_.knowledge.now();
                                           return now->find_id(id)->checkpoint->name();
                                         });
    EXPECT_TRUE(heard && heard->has_value());
    EXPECT_FALSE(fs::exists(other_.incoming(incoming)));
    for (unsigned i = 0; i < 2; ++i) {
      SCOPED_TRACE(JobNodes::name(i));
      JobNode& node = nodes_[i];
      ASSERT_TRUE(node.knowledge.now()->checkpoints.contains(name));
      const CheckpointRef checkpoint = node.record(name).checkpoint;
      expect_layout(*checkpoint, sample_, spec_);
      expect_model(*checkpoint, sample_);
      EXPECT_EQ(node.images(), node.named_images());
      EXPECT_FALSE(node.images().empty());
      for (const ImageId& draft : node.store.drafts()) ADD_FAILURE() << draft.text;
      for (const std::string& file : node.files_about()) {
        EXPECT_FALSE(file.starts_with("committing/")) << file;
        EXPECT_FALSE(file.ends_with("/draft")) << file;
      }
      EXPECT_TRUE(node.shelf.empty());
      EXPECT_FALSE(node.taken.any());
      EXPECT_EQ(node.seals_now, 0);
    }
    EXPECT_EQ(leader_.images().size(), other_.images().size());  // each has all, once
  }
  bool is_known(const std::string& file) const {
    const JobKnowledge::Snapshot now = leader_.knowledge.now();
    for (const auto& [name, record] : now->checkpoints)
      if (file.find(record.id) != std::string::npos) return true;
    return false;
  }
  bool is_agreed_on(const std::string& name = "base") {
    return nodes_.meta().get("jobs/job/checkpoints/" + name).value().has_value();
  }
  std::string error_file(const std::string& incoming = "base") {
    return leader_.incoming(incoming) + ".error";
  }

  const Sample sample_ = llama_sample();
  const LayoutSpec spec_ = Layout::parse(R"({"tp": 2, "pp": 1, "dp": 1})").value().spec;
  JobNodes nodes_{2};
  JobNode& leader_ = nodes_[0];
  JobNode& other_ = nodes_[1];
  std::map<std::string, std::map<std::string, std::string>> written_[2];
  int begun_ = 0;
};

TEST_F(CommitAttemptTest, FromTwoNodesToACheckpoint) {
  write();
  const auto attempt = begin();
  EXPECT_EQ(attempt->outcome(), "open");
  const auto outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
  ASSERT_TRUE(outcome && outcome->has_value()) << outcome->error().message();
  EXPECT_EQ(attempt->outcome(), "committed");
  EXPECT_TRUE(attempt->ended());
  EXPECT_FALSE(attempt->unheard_success());
  EXPECT_EQ(leader_.knowledge.now()->counts.commits_done, 1u);
  // Its name is shown until it was answered.
  EXPECT_TRUE(fs::is_empty(leader_.incoming("base")));
  attempt->answered();
  EXPECT_FALSE(fs::exists(leader_.incoming("base")));
  expect_committed();
}

TEST_F(CommitAttemptTest, ItsEndPutsBackWhatItHasDoneInWhateverStageItIs) {
  for (const Stage& stage : kBeforeAsked) {
    SCOPED_TRACE(stage.name);
    fs::remove_all(leader_.incoming("base"));
    fs::remove_all(other_.incoming("base"));
    write();
    std::atomic<bool> met = false;
    std::atomic<CommitAttempt*> met_by = nullptr;
    // What is asked is done all the same, after nobody wants it any more.
    const Meeting meeting = meet(stage, [&]() -> std::optional<Error> {
      met = true;
      becomes([&] { return met_by.load() != nullptr && met_by.load()->stopped(); });
      return std::nullopt;
    });
    auto attempt = begin();
    met_by = attempt.get();
    ASSERT_TRUE(becomes([&] { return met.load(); }));
    EXPECT_EQ(attempt->outcome(), "open");
    attempt.reset();
    EXPECT_FALSE(is_agreed_on());
    expect_back();
    EXPECT_FALSE(fs::exists(error_file()));  // it was not refused
  }
  EXPECT_EQ(leader_.knowledge.now()->counts.commits_refused, 0u);
}

TEST_F(CommitAttemptTest, ReadyItWaitsForSomebodyToAsk) {
  write();
  auto attempt = begin();
  ASSERT_TRUE(becomes_ready());
  EXPECT_FALSE(
      attempt->wait(CommitAttempt::Clock::now() + 20ms).has_value());  // too short for a decision
  std::this_thread::sleep_for(50ms);
  EXPECT_FALSE(is_agreed_on());
  EXPECT_EQ(tree_of(leader_.incoming("base")), written_[0]["base"]);  // it can be read still
  EXPECT_EQ(tree_of(other_.incoming("base")), written_[1]["base"]);
  EXPECT_FALSE(attempt->forgotten());  // yet
  attempt.reset();
  expect_back();
  // The same once more, withdrawn.
  attempt = begin();
  ASSERT_TRUE(becomes_ready());
  EXPECT_TRUE(attempt->withdraw());
  EXPECT_TRUE(becomes([&] { return attempt->ended(); }));
  EXPECT_EQ(attempt->outcome(), "given up");
  EXPECT_FALSE(attempt->unheard_failure().has_value());
  EXPECT_EQ(attempt->wait(CommitAttempt::Clock::now() + 1s)->error().code(), Code::kConflict);
  attempt.reset();
  expect_back();
}

TEST_F(CommitAttemptTest, WhatFailsInAnyStageIsTakenBackAndSaid) {
  std::vector<Stage> stages = kBeforeAsked;
  stages.push_back(kHides);
  stages.push_back(kDecides);
  uint64_t refused = 0;
  for (const Stage& stage : stages) {
    SCOPED_TRACE(stage.name);
    fs::remove_all(leader_.incoming("base"));
    fs::remove_all(other_.incoming("base"));
    write();
    {
      const Meeting meeting = meet(stage, [&]() -> std::optional<Error> {
        return make_error(Code::kPermissionDenied, "not today");
      });
      const auto attempt = begin();
      const auto outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
      ASSERT_TRUE(outcome && outcome->has_error());
      EXPECT_EQ(attempt->outcome(), "given up");
      EXPECT_FALSE(attempt->unheard_failure().has_value());  // it was heard
    }
    EXPECT_FALSE(is_agreed_on());
    expect_back();
    EXPECT_FALSE(read_file(error_file()).empty());
    EXPECT_EQ(leader_.knowledge.now()->counts.commits_refused, ++refused);
  }
  // And the next, of the same directory, finds nothing of it.
  const auto attempt = begin();
  const auto outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
  ASSERT_TRUE(outcome && outcome->has_value()) << outcome->error().message();
  attempt->answered();
  EXPECT_FALSE(fs::exists(error_file()));
  expect_committed();
}

/// Once it is being decided, nobody can say any more that it is not: it ends as that ends.
TEST_F(CommitAttemptTest, StoppedWhileItIsDecidedItIsThereOrNot) {
  for (const Stage& stage : {kHides, kDecides}) {
    SCOPED_TRACE(stage.name);
    const std::string name = stage.asks ? "hidden" : "decided";
    write(name);
    std::atomic<bool> met = false;
    std::atomic<CommitAttempt*> met_by = nullptr;
    const Meeting meeting = meet(stage, [&]() -> std::optional<Error> {
      met = true;
      becomes([&] { return met_by.load() != nullptr && met_by.load()->stopped(); });
      return std::nullopt;
    });
    auto attempt = begin(name, name);
    met_by = attempt.get();
    ASSERT_TRUE(is_asked_until(*attempt, met));  // it is held up there
    EXPECT_FALSE(attempt->withdraw());
    EXPECT_EQ(attempt->outcome(), "open");
    EXPECT_TRUE(fs::is_empty(leader_.incoming(name)));
    attempt.reset();
    if (is_agreed_on(name)) {
      expect_committed(name);
      EXPECT_FALSE(fs::exists(leader_.incoming(name)));
    } else {
      expect_back(name);
      EXPECT_TRUE(stage.asks.has_value());  // a decision that was made is not taken back
    }
  }
}

TEST_F(CommitAttemptTest, InDoubtNothingIsPutBackUntilItIsKnown) {
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    const std::string name = done ? "done" : "not";
    write(name);
    const auto before = leader_.images().size();
    auto decides = nodes_.decides.during(
        [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
          if (!is_of_a_commit(transaction)) return std::nullopt;
          if (done) (void)nodes_.meta().commit(transaction);
          return make_error(Code::kInDoubt, "the answer was lost");
        });
    auto settles = nodes_.settles.during([]() -> std::optional<Error> {
      return make_error(Code::kUnavailable, "the metadata are away");
    });
    auto attempt = begin(name, name);
    auto outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
    ASSERT_TRUE(outcome && outcome->has_error());
    EXPECT_EQ(outcome->error().code(), Code::kInDoubt);
    EXPECT_THAT(outcome->error().message(), HasSubstr("neither committed nor put back"));
    for (int look = 0; look < 2; ++look) {
      EXPECT_TRUE(becomes([&] { return leader_.doubts.any(); }));
      EXPECT_FALSE(attempt->ended());
      EXPECT_FALSE(attempt->withdraw());
      EXPECT_EQ(attempt->outcome(), "open");
      EXPECT_GT(leader_.images().size(), before);
      EXPECT_FALSE(tree_of(leader_.place.dir + "/committing/" + attempt->id()).empty());
      EXPECT_FALSE(tree_of(other_.place.dir + "/committing/" + attempt->id()).empty());
      EXPECT_TRUE(fs::is_empty(leader_.incoming(name)));
      EXPECT_TRUE(other_.taken.holds(attempt->id()));
      leader_.settle_doubts();  // in vain
    }
    decides = {};
    settles = {};
    leader_.settle_doubts();
    EXPECT_FALSE(leader_.doubts.any());
    EXPECT_TRUE(attempt->ended());
    outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->has_value(), done);
    EXPECT_EQ(attempt->outcome(), done ? "committed" : "given up");
    if (done) {
      attempt->answered();
      expect_committed(name);
      EXPECT_FALSE(fs::exists(error_file(name)));
    } else {
      EXPECT_EQ(outcome->error().code(), Code::kUnavailable);
      expect_back(name);
    }
  }
}

/// The daemon ends: the next start finds what was hidden, and whether it was decided.
TEST_F(CommitAttemptTest, AnEndInDoubtLeavesAllWhereItIs) {
  write();
  const auto decides = nodes_.decides.during(
      [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
        if (!is_of_a_commit(transaction)) return std::nullopt;
        return make_error(Code::kInDoubt, "the answer was lost");
      });
  auto attempt = begin();
  ASSERT_EQ(attempt->wait(CommitAttempt::Clock::time_point::max())->error().code(), Code::kInDoubt);
  const std::string id = attempt->id();
  const std::set<std::string> images = leader_.images();
  attempt.reset();
  EXPECT_EQ(leader_.images(), images);
  EXPECT_EQ(tree_of(leader_.place.dir + "/committing/" + id + "/base"), written_[0]["base"]);
  EXPECT_EQ(tree_of(other_.place.dir + "/committing/" + id + "/base"), written_[1]["base"]);
  EXPECT_FALSE(fs::exists(leader_.incoming("base")));
  EXPECT_TRUE(fs::exists(leader_.place.checkpoint_dir(id) + "/draft"));
  leader_.settle_doubts();  // there is nobody any more whose it was
  EXPECT_FALSE(leader_.doubts.any());
  EXPECT_EQ(leader_.images(), images);
}

TEST_F(CommitAttemptTest, OfTwoOfOneNameOneIsIt) {
  write("a");
  write("b");
  std::shared_ptr<CommitAttempt> attempts[] = {begin("a", "base"), begin("b", "base")};
  for (const char* incoming : {"a", "b"})
    ASSERT_TRUE(becomes([&] { return phase_of(incoming) == "ready"; })) << incoming;
  std::optional<Result<>> outcomes[2];
  {
    std::vector<std::jthread> wait;
    for (int i = 0; i < 2; ++i)
      wait.emplace_back(
          [&, i] { outcomes[i] = attempts[i]->wait(CommitAttempt::Clock::time_point::max()); });
  }
  ASSERT_TRUE(outcomes[0] && outcomes[1]);
  ASSERT_NE(outcomes[0]->has_value(), outcomes[1]->has_value());
  const int lost = outcomes[0]->has_value() ? 1 : 0;
  EXPECT_EQ(outcomes[lost]->error().code(), Code::kAlreadyExists)
      << outcomes[lost]->error().message();
  attempts[lost].reset();  // all nodes were told by then
  attempts[1 - lost]->answered();
  expect_committed("base", lost == 0 ? "b" : "a");
  EXPECT_EQ(leader_.record("base").id, attempts[1 - lost]->id());
  expect_back(lost == 0 ? "a" : "b");
  EXPECT_EQ(leader_.knowledge.now()->checkpoints.size(), 1u);
}

/// Whoever asks for one that is under way waits for that.
TEST_F(CommitAttemptTest, TwoMovesOfOneDirectoryAreOneCommit) {
  write();
  std::atomic<int> takes = 0;
  const Meeting meeting = meet({"", PeerMethod::kTake}, [&]() -> std::optional<Error> {
    ++takes;
    std::this_thread::sleep_for(100ms);
    return std::nullopt;
  });
  std::vector<std::optional<Result<>>> outcomes(3);
  {
    std::vector<std::jthread> move;
    for (auto& outcome : outcomes)
      move.emplace_back([&] {
        outcome = leader_.commits.commit("base", "base", CommitAttempt::Clock::time_point::max());
      });
  }
  int committed = 0;
  for (const auto& outcome : outcomes) {
    committed += outcome->has_value();
    // Who came after all was done finds no such directory; who came while the first was ending it,
    // that it is being committed.
    if (outcome->has_value()) continue;
    EXPECT_THAT(outcome->error().code(), AnyOf(Code::kNotFound, Code::kBusy))
        << outcome->error().message();
  }
  EXPECT_GE(committed, 1);
  EXPECT_LE(takes, committed == 3 ? 1 : 3);
  expect_committed();
}

TEST_F(CommitAttemptTest, TheNextAfterARefusedOneIsAnother) {
  write();
  const std::string file = other_.incoming("base") + "/rank/1/model.safetensors";
  const std::string right = read_file(file);
  write_file(file, right.substr(0, right.size() / 2));
  written_[1]["base"] = tree_of(other_.incoming("base"));
  auto first = begin();
  const auto refused = first->wait(CommitAttempt::Clock::time_point::max());
  ASSERT_TRUE(refused && refused->has_error());
  EXPECT_EQ(refused->error().code(), Code::kInvalidArgument) << refused->error().message();
  expect_back();
  EXPECT_THAT(read_file(error_file()), HasSubstr("model.safetensors"));
  write_file(file, right);
  written_[1]["base"] = tree_of(other_.incoming("base"));
  // While somebody still holds the first.
  const auto next = begin();
  const auto outcome = next->wait(CommitAttempt::Clock::time_point::max());
  ASSERT_TRUE(outcome && outcome->has_value()) << outcome->error().message();
  EXPECT_EQ(first->outcome(), "given up");
  first.reset();
  next->answered();
  EXPECT_FALSE(fs::exists(error_file()));
  expect_committed();
}

TEST_F(CommitAttemptTest, ItsNameIsShownUntilSomebodyHearsOfIt) {
  write();
  std::atomic<bool> goes_on = false, met = false;
  const Meeting meeting = meet(kDecides, [&]() -> std::optional<Error> {
    met = true;
    becomes([&] { return goes_on.load(); });
    return std::nullopt;
  });
  const auto attempt = begin();
  ASSERT_TRUE(is_asked_until(*attempt, met));  // who asked gave up meanwhile
  goes_on = true;
  ASSERT_TRUE(becomes([&] { return attempt->ended(); }));
  EXPECT_TRUE(is_agreed_on());
  EXPECT_TRUE(attempt->unheard_success());
  EXPECT_EQ(attempt->outcome(), "unheard");
  EXPECT_TRUE(fs::is_empty(leader_.incoming("base")));
  EXPECT_FALSE(attempt->written_anew());
  // Somebody puts something else there: that is theirs.
  write_file(leader_.incoming("base") + "/rank/0/next.bin", "of the next");
  EXPECT_TRUE(attempt->written_anew());
  EXPECT_FALSE(attempt->unheard_success());
  attempt->answered();
  EXPECT_EQ(read_file(leader_.incoming("base") + "/rank/0/next.bin"), "of the next");
  expect_committed();
}

TEST_F(CommitAttemptTest, WithoutAnyFilesThereIsNothingToCommit) {
  const auto attempt = begin("none", "none");
  const auto outcome = attempt->wait(CommitAttempt::Clock::time_point::max());
  ASSERT_TRUE(outcome && outcome->has_error());
  EXPECT_EQ(outcome->error().code(), Code::kNotFound);
  expect_back("none");
}

}  // namespace
}  // namespace ptc::testing
