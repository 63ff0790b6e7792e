// Who makes or removes a job with little patience is answered in time, whatever etcd does; what he
// is told holds on all nodes, and the same again goes on where it was.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kLittle{300}, kLong{10000};

JobAttributes of_user(uint32_t uid) {
  JobAttributes attributes;
  attributes.update("", {uid, uid, 0750, std::nullopt});
  return attributes;
}

class ClusterJobsTest : public ClusterTest {
 protected:
  ~ClusterJobsTest() override { answer(); }
  static bool decides(const MetaTransaction& transaction, std::string_view begin) {
    return std::any_of(transaction.puts.begin(), transaction.puts.end(),
                       [&](const auto& put) { return put.first.starts_with(begin); });
  }
  /// Until answer(), w0 hears nothing that it asks the metadata about the job …
  void silent_when_asked(const std::string& job) {
    cluster_.lists = [job, silence = silence_.get_future().share()](const std::string& node,
                                                                    std::string_view prefix) {
      if (node == "w0" && prefix == "jobs/" + job + "/") silence.wait();
    };
  }
  /// … or that a transaction which puts such a key is on its way.
  void silent_when_decided(const std::string& key) {
    cluster_.refuses = [key, silence = silence_.get_future().share()](
                           const std::string& node,
                           const MetaTransaction& transaction) -> std::optional<Error> {
      if (node == "w0" && decides(transaction, key)) silence.wait();
      return std::nullopt;
    };
  }
  void answer() {
    cluster_.lists = nullptr;
    cluster_.refuses = nullptr;
    std::exchange(silence_, {}).set_value();
  }
  /// The answer is lost; the transaction may have come through.
  void doubt_once(const std::string& key, bool done) {
    cluster_.refuses = [this, key, done, once = std::make_shared<std::atomic<bool>>(true)](
                           const std::string& node,
                           const MetaTransaction& transaction) -> std::optional<Error> {
      if (node != "w0" || !decides(transaction, key) || !once->exchange(false)) return std::nullopt;
      if (done) {
        EXPECT_TRUE(cluster_.meta().commit(transaction).has_value());
      }
      return make_error(Code::kInDoubt, "the answer was lost");
    };
  }

  /// EAGAIN, in time, with what to do.
  template <class Ask>
  static void expect_again(Ask ask, const std::string& command) {
    const Clock::time_point begun = Clock::now();
    const auto asked = ask();
    EXPECT_LT(Clock::now() - begun, kLittle + milliseconds(700));
    ASSERT_TRUE(asked.has_error());
    EXPECT_EQ(asked.error().errno_value(), EAGAIN);
    EXPECT_THAT(asked.error().message(), HasSubstr("the same " + command + " again"));
  }
  auto make(const std::string& name, uint32_t uid, milliseconds patience = kLittle) {
    return cluster_.store(0).create_job(name, of_user(uid), patience);
  }
  auto remove(const std::string& name, const std::string& id, milliseconds patience = kLittle) {
    return cluster_.store(0).remove_job(name, false, id, patience);
  }
  void expect_nowhere(const std::string& name) {
    EXPECT_FALSE(cluster_.meta().get("jobs/" + name).value().has_value());
    for (unsigned node : {0u, 1u, 2u}) {
      EXPECT_EQ(cluster_.store(node).find(name), nullptr) << node;
      EXPECT_FALSE(std::filesystem::exists(cluster_.directory(node) + "/jobs/" + name)) << node;
    }
  }
  void expect_on_all(const std::string& name, const std::string& id, uint32_t uid) {
    for (unsigned node : {0u, 1u, 2u}) {
      const JobRef job = cluster_.job(node, name);
      ASSERT_NE(job, nullptr) << node;
      EXPECT_EQ(job->id(), id);
      EXPECT_EQ(job->attributes()->of("").uid, uid) << node;
    }
  }

 private:
  std::promise<void> silence_;
};

TEST_F(ClusterJobsTest, NothingIsMadeForWhoWaitsNoMore) {
  silent_when_asked("new");
  expect_again([&] { return make("new", 7); }, "mkdir");
  // One has waited in vain: the next, who has the mount's root locked too, waits for a moment.
  const Clock::time_point begun = Clock::now();
  EXPECT_EQ(make("other", 7, milliseconds(299)).error().errno_value(), EAGAIN);
  EXPECT_LT(Clock::now() - begun, milliseconds(290));
  answer();
  std::this_thread::sleep_for(milliseconds(200));
  for (const char* name : {"new", "other"}) {
    expect_nowhere(name);
    const Result<JobRef> made = make(name, 7, kLong);
    ASSERT_TRUE(made.has_value()) << made.error().message();
    expect_on_all(name, made.value()->id(), 7);
    EXPECT_EQ(make(name, 7).error().code(), Code::kAlreadyExists);
  }
}

TEST_F(ClusterJobsTest, TheSameAgainIsToldWhatWasDecidedMeanwhile) {
  silent_when_decided("jobs/new");
  expect_again([&] { return make("new", 7); }, "mkdir");
  expect_again([&] { return make("new", 7); }, "mkdir");
  expect_again([&] { return make("new", 8); }, "mkdir");
  answer();
  ASSERT_TRUE(becomes([&] { return cluster_.store(0).find("new") != nullptr; }));
  const std::string id = cluster_.store(0).find("new")->id();
  const Result<JobRef> made = make("new", 7, kLong);
  ASSERT_TRUE(made.has_value()) << made.error().message();
  EXPECT_EQ(made.value()->id(), id);
  expect_on_all("new", id, 7);
  // That is told once, and nobody else.
  EXPECT_EQ(make("new", 7).error().code(), Code::kAlreadyExists);
  EXPECT_EQ(make("new", 8).error().code(), Code::kAlreadyExists);
}

TEST_F(ClusterJobsTest, OfTwoWhoWantANameOneHasIt) {
  silent_when_asked("new");
  expect_again([&] { return make("new", 7); }, "mkdir");
  // Nobody waits for the first any more, so that the second need not wait for that.
  std::jthread answers([&] {
    std::this_thread::sleep_for(milliseconds(100));
    answer();
  });
  const Result<JobRef> made = make("new", 8, kLong);
  ASSERT_TRUE(made.has_value()) << made.error().message();
  expect_on_all("new", made.value()->id(), 8);
  EXPECT_EQ(make("new", 7).error().code(), Code::kAlreadyExists);
}

TEST_F(ClusterJobsTest, AnotherNodeMakesItMeanwhile) {
  silent_when_decided("jobs/new");
  expect_again([&] { return make("new", 7); }, "mkdir");
  // It tells w0, which hears that when it has its answer.
  auto other = std::async(std::launch::async,
                          [&] { return cluster_.store(1).create_job("new", of_user(8)); });
  EXPECT_TRUE(becomes([&] { return cluster_.meta().get("jobs/new").value().has_value(); }));
  answer();
  const Result<JobRef> made = other.get();
  ASSERT_TRUE(made.has_value()) << made.error().message();
  expect_on_all("new", made.value()->id(), 8);
  EXPECT_EQ(make("new", 7, kLong).error().code(), Code::kAlreadyExists);
}

TEST_F(ClusterJobsTest, WhatIsInDoubtIsSettledBeforeItIsTold) {
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    doubt_once("jobs/new", done);
    const Result<JobRef> made = make("new", 7, kLong);
    ASSERT_EQ(made.has_value(), done);
    if (!done) {
      expect_nowhere("new");
      continue;
    }
    const std::string id = made.value()->id();
    expect_on_all("new", id, 7);
    doubt_once("removed/jobs/", false);
    EXPECT_EQ(remove("new", id, kLong).error().code(), Code::kUnavailable);
    expect_on_all("new", id, 7);
    doubt_once("removed/jobs/", true);
    const Result<> removed = remove("new", id, kLong);
    EXPECT_TRUE(removed.has_value()) << removed.error().message();
    EXPECT_TRUE(becomes([&] { return cluster_.store(2).find("new") == nullptr; }));
    expect_nowhere("new");
  }
}

/// What is not decided leaves nothing behind, whoever asked for it.
TEST_F(ClusterJobsTest, WhatIsRefusedLeavesNoDirectory) {
  cluster_.refuses = [](const std::string&,
                        const MetaTransaction& transaction) -> std::optional<Error> {
    if (!decides(transaction, "jobs/new")) return std::nullopt;
    return make_error(Code::kUnavailable, "the metadata are away");
  };
  for (const milliseconds patience : {kLong, milliseconds(0)}) {
    EXPECT_EQ(make("new", 7, patience).error().code(), Code::kUnavailable);
    expect_nowhere("new");
  }
}

TEST_F(ClusterJobsTest, NothingIsRemovedForWhoWaitsNoMore) {
  const std::string id = make("job", 7, kLong).value()->id();
  expect_on_all("job", id, 7);
  silent_when_asked("job");
  expect_again([&] { return remove("job", id); }, "rmdir");
  answer();
  std::this_thread::sleep_for(milliseconds(200));
  expect_on_all("job", id, 7);
  // It goes on as before.
  write(0, LayoutSpec());
  commit(0);
  EXPECT_EQ(remove("job", id, kLong).error().code(), Code::kBusy);
  ASSERT_TRUE(cluster_.job(0, "job")->remove_checkpoint("base").has_value());
  const Result<> removed = remove("job", id, kLong);
  EXPECT_TRUE(removed.has_value()) << removed.error().message();
  expect_nowhere("job");
}

TEST_F(ClusterJobsTest, TheSameRemovalAgainIsToldWhatWasDecidedMeanwhile) {
  const std::string id = make("job", 7, kLong).value()->id();
  expect_on_all("job", id, 7);
  silent_when_decided("removed/jobs/");
  expect_again([&] { return remove("job", id); }, "rmdir");
  answer();
  ASSERT_TRUE(becomes([&] { return cluster_.store(2).find("job") == nullptr; }));
  EXPECT_TRUE(remove("job", id, kLong).has_value());
  expect_nowhere("job");
  EXPECT_EQ(remove("job", id, kLong).error().code(), Code::kNotFound);
  EXPECT_TRUE(make("job", 8, kLong).has_value());
}

/// Though it cannot be heard yet what was decided about another.
TEST_F(ClusterJobsTest, OneIsMadeWhileAnotherIsFollowed) {
  const std::string slow = make("slow", 7, kLong).value()->id();
  expect_on_all("slow", slow, 7);
  silent_when_asked("slow");
  auto saved = std::async(std::launch::async, [job = cluster_.job(1, "slow")] {
    return job->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})").has_value();
  });
  std::this_thread::sleep_for(milliseconds(100));  // w0 hears that there is something
  const auto made = make("job", 7);
  answer();
  EXPECT_TRUE(saved.get());
  ASSERT_TRUE(made.has_value()) << made.error().message();
  expect_on_all("job", made.value()->id(), 7);
}

TEST_F(ClusterJobsTest, AStoreIsClosedWhileSomethingGoesOn) {
  const std::string id = make("job", 7, kLong).value()->id();
  expect_on_all("job", id, 7);
  silent_when_asked("new");
  expect_again([&] { return make("new", 7); }, "mkdir");
  expect_again([&] { return remove("job", id); }, "rmdir");
  answer();
  const Clock::time_point begun = Clock::now();
  cluster_.stop(0);
  EXPECT_LT(Clock::now() - begun, std::chrono::seconds(5));
  cluster_.start(0);
  expect_nowhere("new");
  expect_on_all("job", id, 7);
}

/// job0 to job4, each with a checkpoint "base".
void make_five_jobs(LocalCluster& cluster, const Sample& sample) {
  for (unsigned i = 0; i < 5; ++i) {
    const JobRef job = cluster.store(0).create_job(fmt::format("job{}", i)).value();
    write_ranks(sample, LayoutSpec(), std::filesystem::path(job->files_dir()) / "incoming/base");
    ASSERT_TRUE(job->commit("base", "base").has_value());
  }
}

/// Or each decision about one of thousands of jobs would be thousands of questions of each node.
TEST(ClusterFollowerTest, OfADecisionAboutAJobNobodyReadsTheOthersAnew) {
  const Sample sample = llama_sample();
  LocalCluster cluster(2);
  make_five_jobs(cluster, sample);
  cluster.wait_settled();
  std::mutex mutex;
  std::map<std::string, int> listed;
  const auto listing = cluster.lists.during([&](const std::string&, std::string_view prefix) {
    std::lock_guard lock(mutex);
    ++listed[std::string(prefix)];
  });
  ASSERT_TRUE(cluster.job(0, "job0")->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})").has_value());
  EXPECT_TRUE(becomes([&] {
    const std::string target = cluster.job(1, "job0")->current_target().value_or("");
    return target.ends_with("tp2-pp1-dp1");
  }));
  cluster.lists = nullptr;
  EXPECT_GT(listed["jobs/job0/"], 0);
  EXPECT_GT(listed["jobs/ since"], 0);
  for (unsigned i = 1; i < 5; ++i) EXPECT_EQ(listed.count(fmt::format("jobs/job{}/", i)), 0u) << i;
  // Of who comes and goes all hear.
  cluster.stop(1);
  EXPECT_TRUE(becomes([&] { return cluster.job(0, "job3")->find_checkpoint("base") != nullptr; }));
  cluster.start(1);
  cluster.wait_settled();
  for (unsigned i = 0; i < 5; ++i)
    expect_model(*cluster.job(1, fmt::format("job{}", i))->find_checkpoint("base"), sample);
}

/// `keep` removes one with each commit.
TEST(ClusterFollowerTest, OfACheckpointThatGoesNobodyReadsAllThatIsAgreed) {
  const Sample sample = llama_sample();
  LocalCluster cluster(2);
  make_five_jobs(cluster, sample);
  cluster.wait_settled();
  std::mutex mutex;
  int listed = 0;
  const auto listing = cluster.lists.during([&](const std::string&, std::string_view prefix) {
    std::lock_guard lock(mutex);
    char thread[16] = {};
    ::pthread_getname_np(::pthread_self(), thread, sizeof thread);
    if (prefix == "jobs/" && thread == std::string("ptcfs-follow")) ++listed;
  });
  for (const char* name : {"second", "third"}) {
    const JobRef job = cluster.job(0, "job0");
    write_ranks(sample, LayoutSpec(), std::filesystem::path(job->files_dir()) / "incoming" / name);
    ASSERT_TRUE(job->commit(name, name).has_value());
    cluster.wait_settled();
  }
  ASSERT_TRUE(cluster.job(0, "job0")->remove_checkpoint("base").has_value());
  EXPECT_TRUE(becomes([&] { return cluster.job(1, "job0")->find_checkpoint("base") == nullptr; }));
  // Both say that it is carried out, and with the next change it is forgotten.
  ASSERT_TRUE(cluster.job(0, "job1")->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})").has_value());
  EXPECT_TRUE(becomes([&] { return cluster.meta().list("removed/").value().empty(); }));
  cluster.lists = nullptr;
  EXPECT_EQ(listed, 0);
}

/// Or one that dies would hold up all that is decided about thousands of jobs.
TEST(ClusterFollowerTest, OfANodeThatDiesNoJobIsAskedAnew) {
  const Sample sample = llama_sample();
  LocalCluster cluster(3);
  make_five_jobs(cluster, sample);
  for (unsigned i = 0; i < 5; ++i)
    ASSERT_TRUE(cluster.job(0, fmt::format("job{}", i))
                    ->save_layout(R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w0:0", "w2:0"]})"));
  cluster.wait_settled();
  const auto is_whole = [&](unsigned node, unsigned job) {
    const CheckpointRef base =
        cluster.job(node, fmt::format("job{}", job))->find_checkpoint("base");
    const auto stored = base->stored();
    return std::all_of(stored->images.begin(), stored->images.end(),
                       [](const StoredImage& image) { return image.image != nullptr; });
  };
  for (unsigned i = 0; i < 5; ++i) EXPECT_TRUE(becomes([&] { return is_whole(1, i); })) << i;
  std::mutex mutex;
  std::vector<std::string> listed;
  const auto listing = cluster.lists.during([&](const std::string& node, std::string_view prefix) {
    const std::lock_guard lock(mutex);
    char thread[16] = {};
    ::pthread_getname_np(::pthread_self(), thread, sizeof thread);
    if (node == "w1" && thread == std::string("ptcfs-follow")) listed.emplace_back(prefix);
  });
  cluster.stop(2);
  for (unsigned i = 0; i < 5; ++i) EXPECT_TRUE(becomes([&] { return !is_whole(1, i); })) << i;
  cluster.start(2);
  for (unsigned i = 0; i < 5; ++i) EXPECT_TRUE(becomes([&] { return is_whole(1, i); })) << i;
  cluster.wait_settled();
  {
    std::lock_guard lock(mutex);
    for (unsigned i = 0; i < 5; ++i)
      EXPECT_THAT(listed, Not(Contains(fmt::format("jobs/job{}/", i))));
  }
  for (unsigned i = 0; i < 5; ++i)
    expect_model(*cluster.job(1, fmt::format("job{}", i))->find_checkpoint("base"), sample);
}

}  // namespace
}  // namespace ptc::testing
