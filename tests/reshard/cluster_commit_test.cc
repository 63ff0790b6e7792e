// Commits to which several nodes give something: decided once, whoever fails, and nothing is left
// of those that were not.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <latch>
#include <memory>
#include <thread>

#include "reshard/job/job_record.h"
#include "store/base/json.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

/// Neither knows of the other when it is to be decided: they have numbers of their own all the
/// same, and both are listed, everywhere.
TEST_F(ClusterTest, TwoNodesCommitAtTheSameTime) {
  std::latch both(2);
  std::atomic<bool> wait = true;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (wait && method == "job/files" && node != "w2") both.arrive_and_wait();
    return false;
  });
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  std::vector<std::jthread> commits;
  for (unsigned node : {0u, 1u})
    commits.emplace_back([this, node] {
      JobRef job = cluster_.job(node, "job");
      const std::string name = "of" + std::to_string(node);
      write_ranks(sample_, LayoutSpec(), job->files_dir() + "/incoming/" + name);
      Result<> committed = job->commit(name, name);
      EXPECT_TRUE(committed.has_value()) << committed.error().message();
    });
  both.wait();
  wait = false;
  commits.clear();
  cluster_.wait_settled();
  const JobRecord record = JobRecord::read(cluster_.meta(), "job").value();
  ASSERT_EQ(record.checkpoints.size(), 2u);
  EXPECT_NE(record.checkpoints.at("of0").sequence, record.checkpoints.at("of1").sequence);
  for (unsigned node : {0u, 1u, 2u}) {
    std::vector<std::string> names;
    for (const CheckpointRef& checkpoint : cluster_.job(node, "job")->checkpoints())
      names.push_back(checkpoint->name());
    ASSERT_THAT(names, ::testing::UnorderedElementsAre("of0", "of1")) << node;
    EXPECT_EQ(
        cluster_.job(node, "job")->current_target(),  // the later of the two, whatever its name
        "checkpoints/" + names.back() + "/layouts/" + LayoutSpec().name());
  }
}

/// Each node writes some of the ranks.
TEST_F(ClusterTest, RanksMayBeWrittenOnAnyNode) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 2, "pp": 3, "dp": 1, "replicas": 1})";
  edit(0, text);
  cluster_.wait_settled();
  const LayoutSpec spec = spec_of(text);
  auto write_all = [&] {
    for (unsigned node = 0; node < 3; ++node) {
      write(node, spec);
      for (uint64_t rank = 0; rank < 6; ++rank)
        if (rank / 2 != node)
          std::filesystem::remove_all(fmt::format("{}/rank/{}", incoming(node), rank));
    }
  };
  write_all();
  // Refused as a whole, and nothing is lost: then on each node it is where it was.
  std::filesystem::resize_file(incoming(2) + "/rank/5/model.safetensors", 100);
  Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("rank/5/model.safetensors"));
  for (unsigned node = 0; node < 3; ++node)
    EXPECT_TRUE(std::filesystem::exists(incoming(node) + "/rank")) << node;
  write_all();
  const uint64_t before = cluster_.bytes_moved();
  commit(1);
  // Committed means safe: each file has its copy, and that is all that moved.
  for (uint64_t rank = 0; rank < 6; ++rank) EXPECT_EQ(holders(1, spec, rank).size(), 2u);
  const uint64_t copied = cluster_.bytes_moved() - before;
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.bytes_moved() - before, copied);
  for (unsigned node = 0; node < 3; ++node) {
    // Its name is shown until it is known that the call was answered.
    for (int i = 0; i < 500 && std::filesystem::exists(incoming(node)); ++i) usleep(10'000);
    EXPECT_FALSE(std::filesystem::exists(incoming(node))) << node;
  }
  expect_everywhere({0, 1, 2}, spec);
  cluster_.stop(2);
  cluster_.wait_settled();
  expect_everywhere({0, 1}, spec);
}

/// So may torch's files, of which the nodes send each other all but the tensors.
TEST_F(ClusterTest, TorchFilesMayBeWrittenOnAnyNode) {
  use_torch_files(sample_);
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 2, "pp": 3, "dp": 1, "replicas": 1})";
  edit(0, text);
  cluster_.wait_settled();
  const LayoutSpec spec = spec_of(text);
  for (unsigned node = 0; node < 3; ++node) {
    write(node, spec);
    for (uint64_t rank = 0; rank < 6; ++rank)
      if (rank / 2 != node)
        std::filesystem::remove_all(fmt::format("{}/rank/{}", incoming(node), rank));
  }
  const std::string file = read_file(incoming(2) + "/rank/5/model.pt");
  write_file(incoming(2) + "/rank/5/model.pt", file.substr(0, 100));
  Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("rank/5/model.pt: no end of a zip directory"));
  write_file(incoming(2) + "/rank/5/model.pt", file);
  commit(1);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec);
  const std::string other = R"({"tp": 4, "pp": 1, "dp": 1, "replicas": 1})";
  edit(2, other);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(other));
}

/// As two replicas of two ranks of FSDP have them: rows by halves, which their files say.
std::string half_of(const Sample& sample, uint64_t half) {
  std::vector<TensorEntry> entries;
  std::vector<std::string> bytes;
  std::string info;
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const TensorInfo& tensor = sample.tensors[i];
    const uint64_t rows = tensor.shape[0], step = (rows + 1) / 2;
    const uint64_t begin = half * step, end = std::min(begin + step, rows);
    TensorEntry entry{tensor.name, tensor.dtype, tensor.shape};
    entry.shape[0] = end - begin;
    const uint64_t row_bytes = sample.bytes[i].size() / rows;
    bytes.push_back(sample.bytes[i].substr(begin * row_bytes, (end - begin) * row_bytes));
    std::string offsets = std::to_string(begin);
    for (size_t axis = 1; axis < tensor.shape.size(); ++axis) offsets += ", 0";
    info += fmt::format(R"({}"{}": {{"saved_offsets": [{}], "global_shape": {}}})",
                        info.empty() ? "" : ", ", tensor.name, offsets, tensor.shape.to_string());
    entries.push_back(std::move(entry));
  }
  return safetensors_file(entries, bytes, {{"DCP_SHARDING_INFO", "{" + info + "}"}});
}

TEST_F(ClusterTest, PartsThatRanksSayMayBeWrittenOnAnyNode) {
  sample_ = llama_sample(false, 4);
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 1, "pp": 1, "dp": 4, "optimizer": "fsdp"})";
  edit(0, text);
  cluster_.wait_settled();
  auto write_all = [&](uint64_t last_half) {
    for (uint64_t rank = 0; rank < 4; ++rank) {
      const std::string directory = fmt::format("{}/rank/{}", incoming(rank % 3), rank);
      write_file(directory + "/model.safetensors",
                 half_of(sample_, rank == 3 ? last_half : rank % 2));
      write_file(directory + "/config.json", sample_.config);
    }
    std::filesystem::remove(incoming(1) + "/rank/1/model.safetensors");
  };
  write_all(0);
  Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("rank 1"));
  write_all(0);
  write_file(incoming(1) + "/rank/1/model.safetensors", half_of(sample_, 0));
  refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("and all ranks together have"));
  write_all(1);
  write_file(incoming(1) + "/rank/1/model.safetensors", half_of(sample_, 1));
  commit(1);
  size_t files = 0;
  for (const WrittenFile& file : cluster_.job(2, "job")->find_checkpoint("base")->manifest().files)
    files += file.has_tensors;
  EXPECT_EQ(files, 2u) << "a replica is kept once";
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
  edit(2, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 2, "pp": 1, "dp": 1})"));
}

TEST_F(ClusterTest, ARankWrittenOnTwoNodesIsRefused) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  for (unsigned node = 0; node < 2; ++node) write(node, LayoutSpec());
  Result<> refused = cluster_.job(0, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("was written on two nodes"));
}

/// Whether the other node refuses it, or what it said of its files is why.
TEST_F(ClusterTest, ARefusalNamesNothingThatAnotherNodeKeepsFromOthers) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  // As the file system makes it where it is mounted.
  const std::string staged = std::filesystem::path(incoming(0)).parent_path();
  std::filesystem::create_directories(staged);
  ASSERT_EQ(chmod(staged.c_str(), 0755), 0);
  for (const bool says_so : {true, false}) {
    for (const mode_t mode : {0700u, 0755u}) {
      SCOPED_TRACE(fmt::format("{} {:o}", says_so, mode));
      for (unsigned node = 0; node < 2; ++node) {
        std::filesystem::remove_all(incoming(node));
        write(node, LayoutSpec());
      }
      const std::string rank = incoming(1) + "/rank/0";
      if (says_so) write_file(rank + "/secret.safetensors", "no safetensors");
      ASSERT_EQ(chmod(rank.c_str(), mode), 0);
      const JobRef job = cluster_.job(0, "job");
      Result<> refused = job->commit("base", "base");
      ASSERT_TRUE(refused.has_error());
      EXPECT_THAT(refused.error().message(),
                  HasSubstr(says_so ? "secret.safetensors" : "was written on two nodes"));
      const std::string error_file = incoming(0) + ".error";
      struct stat facts {};
      ASSERT_EQ(stat(error_file.c_str(), &facts), 0);
      EXPECT_EQ(facts.st_mode & 0777, mode == 0700 ? 0600u : 0644u);
      EXPECT_EQ(read_file(error_file), refused.error().message() + "\n");
      EXPECT_THAT(job->status_json(), HasSubstr(mode == 0700 ? "incoming/base.error says why"
                                                             : refused.error().message()));
    }
  }
}

TEST_F(ClusterTest, NorDoesOneThatIsToldOnceMore) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  for (unsigned node = 0; node < 2; ++node) write(node, LayoutSpec());
  const std::string rank = incoming(1) + "/rank/0";
  write_file(rank + "/secret.safetensors", "no safetensors");
  ASSERT_EQ(chmod(rank.c_str(), 0700), 0);
  const JobRef job = cluster_.job(0, "job");
  Result<> refused = job->commit("base", "base", std::chrono::milliseconds(1));
  for (int i = 0; i < 1000 && job->status_json().find("says why") == std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  refused = job->commit("base", "base");  // it has not heard that yet
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("secret.safetensors"));
  struct stat facts {};
  ASSERT_EQ(stat((incoming(0) + ".error").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  EXPECT_EQ(job->status_json().find("secret"), std::string::npos);
}

/// Files of all nodes that are in no checkpoint, after a moment.
class CommitTest : public ClusterTest {
 protected:
  static constexpr const char* kHalves =
      R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 1, "devices": ["w0:0", "w1:0"]})";
  CommitTest() {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    edit(0, kHalves);
    cluster_.wait_settled();
    for (unsigned node : {0u, 1u}) write_rank(node);
  }
  void write_rank(unsigned node) {
    TempDir all;
    write_ranks(sample_, spec_of(kHalves), all.path().string());
    std::filesystem::create_directories(incoming(node) + "/rank");
    std::filesystem::copy(all.path().string() + "/rank/" + std::to_string(node),
                          incoming(node) + "/rank/" + std::to_string(node),
                          std::filesystem::copy_options::recursive);
  }
  size_t files_of(unsigned node) {
    std::filesystem::directory_iterator files(cluster_.store(node).images().directory());
    return std::distance(begin(files), end(files));
  }
  /// Of what was given to commits: directories of checkpoints.
  size_t drafts_of(unsigned node) {
    const std::string directory = cluster_.store(node).directory() + "/jobs/job/checkpoints";
    if (!std::filesystem::exists(directory)) return 0;
    std::filesystem::directory_iterator drafts(directory);
    return std::distance(begin(drafts), end(drafts));
  }
  void expect_nothing_left() {
    auto left = [&] {
      return files_of(0) + files_of(1) + files_of(2) + drafts_of(0) + drafts_of(1);
    };
    for (int i = 0; i < 200 && left() > 0; ++i) usleep(100'000);
    EXPECT_EQ(left(), 0u);
    for (unsigned node : {0u, 1u}) {
      EXPECT_TRUE(std::filesystem::exists(incoming(node) + "/rank/" + std::to_string(node)))
          << node;
    }
  }
};

TEST_F(CommitTest, OneThatFailsLeavesNoCopies) {
  auto still_lost = std::make_shared<std::atomic<bool>>(true);
  std::atomic<bool>& lost = *still_lost;
  // Nobody says that it has failed either.
  cluster_.loses = [still_lost](const std::string&, std::string_view method) {
    return *still_lost && (method == "job/hide" || method == "job/untake" || method == "job/drop");
  };
  Result<> failed = cluster_.job(0, "job")->commit("base", "base");
  ASSERT_TRUE(failed.has_error());
  expect_nothing_left();
  lost = false;
  commit(0);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(CommitTest, SaysHowMuchWasHashedOfHowMuch) {
  auto slow = std::make_shared<std::atomic<bool>>(true);
  cluster_.loses = [slow](const std::string&, std::string_view method) {
    while (*slow && method == "job/adopt") usleep(10'000);
    return false;
  };
  const JobRef job = cluster_.job(0, "job");
  EXPECT_TRUE(job->commit("base", "base", std::chrono::milliseconds(100)).has_error());
  const auto all_is_hashed = [&] {
    const json::value status = parse_json(job->status_json()).value();
    const json::array& commits = status.at("commits").as_array();
    return commits.size() == 1 && commits[0].at("phase") == "hashing" &&
           commits[0].at("bytes_total").to_number<uint64_t>() > 10'000 &&
           commits[0].at("bytes_done") == commits[0].at("bytes_total");
  };
  EXPECT_TRUE(becomes(all_is_hashed)) << job->status_json();
  *slow = false;
  commit(0);
}

TEST_F(CommitTest, OneThatTakesLongerGoesOnWithTheNextCall) {
  // Asked after the test, too.
  struct Seen {
    std::atomic<int> takes = 0, parts = 0;
    std::atomic<bool> slow = true;
  };
  auto seen = std::make_shared<Seen>();
  auto& [takes, parts, slow] = *seen;
  cluster_.loses = [seen](const std::string&, std::string_view method) {
    if (method == "job/take") ++seen->takes;
    if (method == "job/part") ++seen->parts;
    while (seen->slow && method == "job/part") usleep(10'000);
    return false;
  };
  JobRef job = cluster_.job(0, "job");
  for (int i = 0; i < 2; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Result<> waited = job->commit("base", "base", std::chrono::milliseconds(600));
    ASSERT_TRUE(waited.has_error());
    EXPECT_EQ(waited.error().errno_value(), EAGAIN) << waited.error().message();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1500));
    EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/rank/0"));
  }
  while (parts == 0) usleep(10'000);
  EXPECT_THAT(job->status_json(), HasSubstr("copying"));
  const int asked = parts;
  slow = false;
  usleep(500'000);
  EXPECT_EQ(job->find_checkpoint("base"), nullptr);  // not before somebody asks again
  Result<> committed = job->commit("base", "base", std::chrono::seconds(10));
  EXPECT_TRUE(committed.has_value()) << committed.error().message();
  EXPECT_EQ(takes, 2);
  EXPECT_EQ(parts, asked);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(CommitTest, OneThatFailsMeanwhileIsToldToTheNextCall) {
  std::filesystem::remove_all(incoming(1));
  auto still_slow = std::make_shared<std::atomic<bool>>(true);
  std::atomic<bool>& slow = *still_slow;
  cluster_.loses = [still_slow](const std::string&, std::string_view method) {
    while (*still_slow && method == "job/take") usleep(10'000);
    return false;
  };
  JobRef job = cluster_.job(0, "job");
  EXPECT_EQ(job->commit("base", "base", std::chrono::milliseconds(100)).error().errno_value(),
            EAGAIN);
  slow = false;
  while (!std::filesystem::exists(incoming(0) + ".error")) usleep(10'000);
  usleep(100'000);
  Result<> told = job->commit("base", "base", std::chrono::seconds(10));
  ASSERT_TRUE(told.has_error());
  EXPECT_EQ(told.error().code(), Code::kInvalidArgument) << told.error().message();
  write_rank(1);
  commit(0);
}

/// One decision is in doubt: what it was for stays, all else goes on, and it is settled when it can
/// be.
TEST_F(CommitTest, ADoubtIsSettledAndForgotten) {
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    cluster_.doubt(0, done);
    Result<> doubtful = cluster_.job(0, "job")->commit("base", "base");
    ASSERT_TRUE(doubtful.has_error());
    EXPECT_EQ(doubtful.error().code(), Code::kInDoubt) << doubtful.error().message();
    EXPECT_TRUE(std::filesystem::is_empty(incoming(0)));  // its name is shown, for the next call
    // One that is refused later loses nothing.
    const std::string other = cluster_.job(0, "job")->files_dir() + "/incoming/other";
    std::filesystem::create_directories(other + "/rank/0");
    write_file(other + "/rank/0/notes.txt", "no tensor");
    EXPECT_EQ(cluster_.job(0, "job")->commit("other", "other").error().code(),
              Code::kInvalidArgument);
    EXPECT_TRUE(std::filesystem::exists(other + "/rank/0/notes.txt"));
    std::filesystem::remove_all(other);
    cluster_.doubt(0, std::nullopt);
    if (!done) {
      for (int i = 0; i < 100 && !std::filesystem::exists(incoming(0) + "/rank"); ++i)
        usleep(100'000);
      EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/rank/0"));
      expect_nothing_left();
    }
  }
  for (int i = 0; i < 100 && cluster_.job(0, "job")->find_checkpoint("base") == nullptr; ++i)
    usleep(100'000);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
  Result<> again = ok();  // hears of it, once it is settled
  do {
    usleep(10'000);
    again = cluster_.job(0, "job")->commit("base", "base");
  } while (again.has_error() && again.error().errno_value() == EAGAIN);
  EXPECT_TRUE(again.has_value()) << again.error().message();
  const std::string committing = cluster_.store(0).directory() + "/jobs/job/committing";
  for (int i = 0; i < 100 && !std::filesystem::is_empty(committing); ++i) usleep(100'000);
  EXPECT_TRUE(std::filesystem::is_empty(committing));
}

/// Decided after the call that asked for it had given up.
class LateCommitTest : public CommitTest {
 protected:
  LateCommitTest() {
    auto slow = std::make_shared<std::atomic<bool>>(true);
    cluster_.loses = [slow](const std::string&, std::string_view method) {
      while (*slow && method == "job/hide") usleep(10'000);
      return false;
    };
    // Hidden, and its name is found all the time.
    for (int tries = 0; tries < 20 && !std::filesystem::is_empty(incoming(0)); ++tries)
      EXPECT_EQ(commit_as("base").error().errno_value(), EAGAIN);
    EXPECT_TRUE(std::filesystem::is_empty(incoming(0)));
    EXPECT_EQ(commit_as("base").error().errno_value(), EAGAIN);
    *slow = false;
    for (int i = 0; i < 100 && job()->find_checkpoint("base") == nullptr; ++i) usleep(50'000);
    usleep(200'000);
    EXPECT_NE(job()->find_checkpoint("base"), nullptr);
    for (unsigned node : {0u, 1u}) {
      EXPECT_TRUE(std::filesystem::is_empty(incoming(node))) << node;
    }
  }
  JobRef job() { return cluster_.job(0, "job"); }
  Result<> commit_as(const std::string& name, unsigned node = 0) {
    return cluster_.job(node, "job")->commit("base", name, std::chrono::milliseconds(1700));
  }
  bool is_gone(unsigned node) {
    for (int i = 0; i < 500 && std::filesystem::exists(incoming(node)); ++i) usleep(10'000);
    return !std::filesystem::exists(incoming(node));
  }
};

/// Hidden for the decision, which takes longer than the call; what is written there meanwhile is
/// another one's.
TEST_F(CommitTest, WhatIsWrittenAnewMeanwhileWasNotCommitted) {
  for (const bool decided : {false, true}) {
    SCOPED_TRACE(decided);
    auto slow = std::make_shared<std::atomic<bool>>(true);
    cluster_.loses = [slow, decided](const std::string&, std::string_view method) {
      while (*slow && method == "job/hide") usleep(10'000);
      return !decided && method == "job/hide";
    };
    JobRef job = cluster_.job(0, "job");
    auto commit_again = [&] {
      return job->commit("base", "base", std::chrono::milliseconds(1700));
    };
    for (int tries = 0; tries < 20 && !std::filesystem::is_empty(incoming(0)); ++tries)
      EXPECT_EQ(commit_again().error().errno_value(), EAGAIN);
    ASSERT_TRUE(std::filesystem::is_empty(incoming(0)));
    std::filesystem::remove_all(incoming(0));
    write_file(incoming(0) + "/rank/0/notes.txt", "no tensor");
    EXPECT_EQ(commit_again().error().errno_value(), EAGAIN);
    *slow = false;
    Result<> answer = ok();
    do answer = commit_again();
    while (answer.has_error() && answer.error().errno_value() == EAGAIN);
    ASSERT_TRUE(answer.has_error());
    EXPECT_EQ(answer.error().code(), decided ? Code::kAlreadyExists : Code::kInvalidArgument)
        << answer.error().message();
    EXPECT_EQ(read_file(incoming(0) + "/rank/0/notes.txt"), "no tensor");
    EXPECT_EQ(job->find_checkpoint("base") != nullptr, decided);
    std::filesystem::remove_all(incoming(0));
    // What was hidden when that was there has another name now.
    for (const auto& entry : std::filesystem::directory_iterator(job->files_dir() + "/incoming"))
      if (entry.path().filename().string().starts_with("recovered-"))
        std::filesystem::rename(entry.path(), incoming(0));
    EXPECT_EQ(std::filesystem::exists(incoming(0) + "/rank/0"), !decided);
  }
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(LateCommitTest, TheSameCallAgainHearsOfIt) {
  EXPECT_EQ(commit_as("other").error().code(), Code::kNotFound);
  Result<> heard = commit_as("base");
  EXPECT_TRUE(heard.has_value()) << heard.error().message();
  EXPECT_FALSE(std::filesystem::exists(incoming(0)));
  EXPECT_FALSE(std::filesystem::exists(incoming(0) + ".error"));
  EXPECT_EQ(commit_as("base").error().code(), Code::kAlreadyExists);  // it was answered
  EXPECT_TRUE(is_gone(1));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(LateCommitTest, TheSameCallOnAnotherNodeHearsOfIt) {
  while (cluster_.job(1, "job")->find_checkpoint("base") == nullptr) usleep(10'000);
  sleep(3);  // it is asked for now and then whether it was heard of
  EXPECT_EQ(commit_as("other", 1).error().code(), Code::kNotFound);
  Result<> heard = commit_as("base", 1);
  EXPECT_TRUE(heard.has_value()) << heard.error().message();
  EXPECT_FALSE(std::filesystem::exists(incoming(1)));
  EXPECT_FALSE(std::filesystem::exists(incoming(1) + ".error"));
  EXPECT_EQ(commit_as("base", 1).error().code(), Code::kAlreadyExists);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(LateCommitTest, WhatWasWrittenSinceOnAnotherNodeIsAnother) {
  write_rank(1);
  EXPECT_EQ(commit_as("base", 1).error().code(), Code::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(incoming(1) + "/rank/1"));
}

TEST_F(LateCommitTest, WhatWasWrittenSinceIsAnother) {
  write_rank(0);
  EXPECT_EQ(commit_as("base").error().code(), Code::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/rank/0"));
}

TEST_F(LateCommitTest, ACheckpointOfTheSameNameIsAnother) {
  ASSERT_TRUE(job()->remove_checkpoint("base").has_value());
  std::filesystem::create_directories(incoming(0) + "-2");
  write_ranks(sample_, spec_of(kHalves), incoming(0) + "-2");
  Result<> other = job()->commit("base-2", "base");
  ASSERT_TRUE(other.has_value()) << other.error().message();
  EXPECT_TRUE(commit_as("base").has_error());
}

TEST_F(LateCommitTest, TheNameGoesWithTheDaemon) {
  cluster_.stop(0);
  cluster_.start(0);
  EXPECT_FALSE(std::filesystem::exists(incoming(0)));
  EXPECT_TRUE(is_gone(1));  // nobody will hear of it any more
  cluster_.stop(1);
  cluster_.start(1);
  EXPECT_FALSE(std::filesystem::exists(incoming(1)));
}

TEST_F(CommitTest, WhatWasHeardOfShowsNoName) {
  commit(0);
  for (unsigned node : {0u, 1u}) {
    for (int i = 0; i < 500 && std::filesystem::exists(incoming(node)); ++i) usleep(10'000);
    EXPECT_FALSE(std::filesystem::exists(incoming(node))) << node;
  }
}

/// A job cannot go while a commit that another node leads is being decided.
TEST_F(CommitTest, AJobIsNotRemovedBesideItsCommit) {
  std::atomic<bool> once = true;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (method == "job/hide" && once.exchange(false)) {
      Result<> removed = cluster_.store(2).remove_job("job", false);
      EXPECT_TRUE(removed.has_error());
    }
    return node.empty();
  });
  commit(0);
  Result<> removed = cluster_.store(2).remove_job("job", false);
  ASSERT_TRUE(removed.has_error());
  EXPECT_EQ(removed.error().code(), Code::kBusy);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

}  // namespace
}  // namespace ptc::testing
