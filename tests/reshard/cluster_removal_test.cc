// What is removed is what was meant, on all nodes, and nothing else; what cannot be removed now is
// tried again, and stands in nobody's way.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "reshard/cluster/tombstones.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST_F(ClusterTest, AJobRemovedOnOneNodeIsGoneEverywhere) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  ASSERT_NE(cluster_.job(2, "job"), nullptr);
  ASSERT_TRUE(cluster_.job(1, "job")->remove_checkpoint("base").has_value());
  write_file(incoming(2) + "/rank/0/notes.txt", "not to be lost");
  Result<> refused = cluster_.store(0).remove_job("job", false);
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("on node w2"));
  ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  EXPECT_EQ(cluster_.store(2).find("job"), nullptr);
}

/// A checkpoint goes because somebody removed it, never because nothing names it.
TEST_F(ClusterTest, ACheckpointThatNobodyRemovedStaysWhereItIsNamedNoMore) {
  put_on_w1_and_w2();
  const std::string key = "jobs/job/checkpoints/base",
                    id = cluster_.job(1, "job")->find_checkpoint("base")->manifest().id;
  const MetaEntry entry = cluster_.meta().get(key).value().value();
  MetaTransaction lost;
  lost.deletes = {key};
  ASSERT_TRUE(cluster_.meta().commit(lost).has_value());
  for (const unsigned node : {1u, 2u}) {
    EXPECT_TRUE(becomes([&] { return cluster_.store(node).distrusted().has_value(); })) << node;
    EXPECT_TRUE(fs::exists(cluster_.directory(node) + "/jobs/job/checkpoints/" + id)) << node;
    const CheckpointRef base = cluster_.job(node, "job")->find_checkpoint("base");
    ASSERT_NE(base, nullptr) << node;
    expect_model(*base, sample_);
  }
  MetaTransaction back;
  back.puts = {{key, entry.value}};
  ASSERT_TRUE(cluster_.meta().commit(back).has_value());
  EXPECT_TRUE(becomes([&] { return cluster_.job(1, "job")->sync().has_value(); }));
  cluster_.wait_settled();
  for (const unsigned node : {0u, 1u, 2u})
    expect_model(*cluster_.job(node, "job")->find_checkpoint("base"), sample_);
}

/// Without force a job goes in which nobody has a file: one that is written between the look and
/// the decision, or on a node that was not asked, is not lost.
TEST_F(ClusterTest, WhatIsWrittenWhileAJobIsRemovedIsKept) {
  const JobRef job = cluster_.store(0).create_job("job").value();
  const std::string id = job->id();
  for (unsigned node : {1u, 2u}) ASSERT_NE(cluster_.job(node, "job"), nullptr);
  cluster_.wait_settled();
  const std::string away = incoming(2) + "/notes.txt";
  cluster_.stop(2);
  write_file(away, "written on a node that is away");
  const std::string written = incoming(1) + "/rank/0/notes.txt";
  std::atomic<bool> once = true;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
        for (const auto& [key, value] : transaction.puts)
          if (key.starts_with("removed/jobs/") && once.exchange(false))
            write_file(written, "just now");
        return std::nullopt;
      });
  const Result<> removed = cluster_.store(0).remove_job("job", false);
  ASSERT_TRUE(removed.has_value()) << removed.error().message();
  cluster_.refuses = nullptr;
  EXPECT_FALSE(once);
  cluster_.start(2);
  const std::string kept = "kept/job-" + id;
  const auto file_in = [&](unsigned node, const std::string& path) {
    return cluster_.directory(node) + "/" + kept + "/files/incoming/base/" + path;
  };
  EXPECT_EQ(cluster_.store(1).find("job"), nullptr);
  ASSERT_TRUE(std::filesystem::exists(file_in(1, "rank/0/notes.txt")));
  EXPECT_EQ(read_file(file_in(1, "rank/0/notes.txt")), "just now");
  EXPECT_THAT(cluster_.store(1).kept(), ::testing::Contains(kept));
  ASSERT_TRUE(std::filesystem::exists(file_in(2, "notes.txt")));
  EXPECT_EQ(read_file(file_in(2, "notes.txt")), "written on a node that is away");
  EXPECT_FALSE(std::filesystem::exists(cluster_.directory(0) + "/" + kept));
  for (unsigned node : {0u, 1u, 2u})
    EXPECT_FALSE(std::filesystem::exists(cluster_.directory(node) + "/jobs/job")) << node;
  cluster_.stop(1);
  cluster_.start(1);
  EXPECT_THAT(cluster_.store(1).kept(), ::testing::Contains(kept)) << "until somebody removes it";
  std::filesystem::remove_all(cluster_.directory(1) + "/" + kept);
  EXPECT_THAT(cluster_.store(1).kept(), ::testing::IsEmpty());
  // A new one of its name has nothing of it.
  ASSERT_TRUE(cluster_.store(1).create_job("job").has_value());
  EXPECT_TRUE(cluster_.store(2).remove_job("job", false).has_value());
}

/// What removes a job asks all nodes whether it is empty, and one of them may not answer for long.
TEST_F(ClusterTest, AnotherJobIsMadeAndRemovedWhileOneWaitsForAnAnswer) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  ASSERT_NE(cluster_.job(2, "job"), nullptr);
  std::promise<void> asked, answer;
  std::atomic<bool> first = true;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (node == "w2" && method == "job/holds" && first.exchange(false)) {
      asked.set_value();
      answer.get_future().wait();
    }
    return false;
  });
  std::jthread removes(
      [&] { EXPECT_TRUE(cluster_.store(0).remove_job("job", false).has_value()); });
  asked.get_future().wait();
  EXPECT_TRUE(cluster_.store(0).create_job("other").has_value());
  EXPECT_TRUE(cluster_.store(0).remove_job("other", false).has_value());
  EXPECT_NE(cluster_.store(0).find("job"), nullptr);
  answer.set_value();
  removes.join();
  EXPECT_EQ(cluster_.store(0).find("job"), nullptr);
  cluster_.loses = nullptr;
}

/// A mkdir or an rmdir has the mount's root locked meanwhile; ptc rm has not.
TEST_F(ClusterTest, WhoHasLittlePatienceWaitsForNoOtherNodeForLong) {
  using std::chrono::milliseconds;
  constexpr auto kPatience = milliseconds(1700);
  std::mutex mutex;
  std::map<std::string, milliseconds, std::less<>> longest;
  const auto waiting = cluster_.waits.during([&](std::string_view method, milliseconds time) {
    std::lock_guard lock(mutex);
    milliseconds& known = longest[std::string(method)];
    known = std::max(known, time);
  });
  for (const bool patient : {false, true}) {
    SCOPED_TRACE(patient);
    longest.clear();
    const milliseconds patience = patient ? milliseconds(0) : kPatience;
    ASSERT_TRUE(cluster_.store(0).create_job("job", {}, patience).has_value());
    ASSERT_NE(cluster_.job(2, "job"), nullptr);
    ASSERT_TRUE(cluster_.store(0).remove_job("job", false, {}, patience).has_value());
    std::lock_guard lock(mutex);
    ASSERT_TRUE(longest.contains("job/changed") && longest.contains("job/holds"));
    EXPECT_EQ(longest["job/holds"] > kPatience, patient);
    EXPECT_EQ(longest["job/changed"] > kPatience, patient);
  }
  cluster_.waits = nullptr;
}

/// Its name and an id are longer than a file's name may be.
TEST_F(ClusterTest, WhatIsWrittenBelowALongNameIsKeptToo) {
  const std::string name = std::string(249, 'n') + "\u00e9\u00e9";
  ASSERT_TRUE(cluster_.store(0).create_job(name).has_value());
  ASSERT_NE(cluster_.job(2, name), nullptr);
  const std::string written = cluster_.job(2, name)->files_dir() + "/incoming/base/notes.txt";
  cluster_.stop(2);
  write_file(written, "written on a node that is away");
  ASSERT_TRUE(cluster_.store(0).remove_job(name, false).has_value());
  cluster_.start(2);
  EXPECT_EQ(cluster_.store(2).find(name), nullptr);
  const std::vector<std::string> kept = cluster_.store(2).kept();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(cluster_.directory(2) + "/" + kept[0] +
                                      "/files/incoming/base/notes.txt"))
      << kept[0];
  EXPECT_TRUE(cluster_.store(0).create_job(name).has_value());
}

/// While the node that removes makes sure that it has heard of all, another removes the same, and
/// commits another under its name.
TEST_F(ClusterTest, ARemovalTakesNoNewerOneOfItsName) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  for (unsigned node : {1u, 2u}) ASSERT_NE(cluster_.job(node, "job"), nullptr);
  const std::string before = cluster_.job(0, "job")->find_checkpoint("base")->manifest().id;
  write(1, LayoutSpec());
  std::atomic<bool> once = true;
  const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
    if (method == "job/changed" && once.exchange(false)) {
      EXPECT_TRUE(cluster_.job(1, "job")->remove_checkpoint("base").has_value());
      commit(1);
    }
    return false;
  });
  const Result<> removed = cluster_.job(0, "job")->remove_checkpoint("base");
  EXPECT_FALSE(once);
  ASSERT_TRUE(removed.has_error());
  EXPECT_EQ(removed.error().code(), Code::kNotFound);
  EXPECT_THAT(removed.error().message(), HasSubstr("is another by now"));
  const Result<> pinned = cluster_.job(0, "job")->pin_checkpoint("base", true, before);
  ASSERT_TRUE(pinned.has_error());
  EXPECT_EQ(pinned.error().code(), Code::kNotFound);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
  EXPECT_NE(cluster_.job(0, "job")->find_checkpoint("base")->manifest().id, before);
}

TEST_F(ClusterTest, ARemovalTakesNoNewerJobOfItsName) {
  const std::string before = cluster_.store(0).create_job("job").value()->id();
  ASSERT_TRUE(cluster_.store(0).remove_job("job", false, before).has_value());
  ASSERT_TRUE(cluster_.store(1).create_job("job").has_value());
  for (bool force : {false, true}) {
    const Result<> removed = cluster_.store(0).remove_job("job", force, before);
    ASSERT_TRUE(removed.has_error());
    EXPECT_EQ(removed.error().code(), Code::kNotFound);
    EXPECT_THAT(removed.error().message(), HasSubstr("is another by now"));
  }
  for (unsigned node : {0u, 1u, 2u}) EXPECT_NE(cluster_.job(node, "job"), nullptr);
}

/// False: this file system has nothing of the kind, or one may not.
bool set_immutable(const std::string& path, bool immutable) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY));
  int flags = 0;
  if (ioctl(fd.get(), FS_IOC_GETFLAGS, &flags) != 0) return false;
  flags = immutable ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
  return ioctl(fd.get(), FS_IOC_SETFLAGS, &flags) == 0;
}

/// A node that starts has listed the job, and finds it gone when it loads it: nothing of it stays.
TEST_F(ClusterTest, AJobThatIsRemovedWhileANodeStartsIsGoneThere) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  ASSERT_NE(cluster_.job(2, "job"), nullptr);
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 2})");
  cluster_.wait_settled();
  ASSERT_FALSE(cluster_.store(2).images().list().value().empty());
  cluster_.stop(2);
  std::atomic<bool> once = true;
  const auto listing = cluster_.lists.during([&](const std::string& node, std::string_view prefix) {
    if (node != "w2" || prefix != "jobs/job/" || !once.exchange(false)) return;
    ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  });
  cluster_.start(2);
  cluster_.lists = nullptr;
  EXPECT_FALSE(once);
  cluster_.wait_settled();
  EXPECT_FALSE(fs::exists(cluster_.directory(2) + "/jobs/job"));
  EXPECT_THAT(cluster_.store(2).images().list().value(), ::testing::IsEmpty());
  EXPECT_THAT(cluster_.store(2).kept(), ::testing::IsEmpty());
}

/// A node hears of the job once it has started, and gets the files of its checkpoint meanwhile.
TEST_F(ClusterTest, AJobThatIsRemovedWhileANodeHearsOfItIsGoneThere) {
  cluster_.stop(2);
  std::atomic<int> listed = 0;
  std::atomic<bool> made = false, asked = false, deaf = false;
  const auto listing = cluster_.lists.during([&](const std::string& node, std::string_view prefix) {
    if (node != "w2") return;
    if (prefix == "jobs/") ++listed;  // to see whether its store fits, and then to load them
    if (prefix != kTombstones || listed != 2 || made.exchange(true)) return;
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
  });
  const auto breaking = cluster_.breaks.during([&](const std::string& asking, const std::string&,
                                                   std::string_view method, const std::string&) {
    if (asking == "w2" && method == "job/file" && !asked.exchange(true)) {
      deaf = true;  // or it would load the job first, when it is told
      EXPECT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
      deaf = false;
    }
    return false;
  });
  const auto losing = cluster_.loses.during(
      [&](const std::string& node, std::string_view) { return deaf && node == "w2"; });
  cluster_.start(2);
  EXPECT_TRUE(becomes([&] { return asked && cluster_.store(0).find("job") == nullptr; }));
  EXPECT_TRUE(becomes([&] { return !fs::exists(cluster_.directory(2) + "/jobs/job"); }));
  cluster_.lists = nullptr;
  cluster_.breaks = nullptr;
  cluster_.loses = nullptr;
  EXPECT_EQ(cluster_.store(2).find("job"), nullptr);
  cluster_.stop(2);
  cluster_.start(2);
  EXPECT_THAT(cluster_.store(2).kept(), ::testing::IsEmpty());
}

/// On the node that decides, on one that hears of it.
TEST_F(ClusterTest, ADirectoryThatCannotBeRemovedIsTriedAgain) {
  const std::string id = cluster_.store(0).create_job("job").value()->id();
  ASSERT_NE(cluster_.job(1, "job"), nullptr);
  std::vector<UniqueFd> files;  // whatever name they get meanwhile
  for (unsigned node : {0u, 1u}) {
    const std::string path = incoming(node) + "/notes.txt";
    write_file(path, "to stay");
    if (!set_immutable(path, true)) GTEST_SKIP() << "no file can be made immutable here";
    files.emplace_back(open(path.c_str(), O_RDONLY));
  }
  const auto dir = [&](unsigned node) { return cluster_.directory(node) + "/jobs/job"; };
  const Result<> removed = cluster_.store(0).remove_job("job", true);
  EXPECT_TRUE(removed.has_value()) << removed.error().message();  // it is gone, for everybody
  for (unsigned node : {0u, 1u, 2u}) EXPECT_EQ(cluster_.store(node).find("job"), nullptr);
  EXPECT_TRUE(fs::exists(dir(0)) && fs::exists(dir(1)));
  // Nothing else waits for it, and nobody says that it is carried out.
  ASSERT_TRUE(cluster_.store(2).create_job("other").has_value());
  for (unsigned node : {0u, 1u}) ASSERT_NE(cluster_.job(node, "other"), nullptr);
  EXPECT_TRUE(cluster_.meta().get(removed_job_key(id)).value().has_value());
  for (const UniqueFd& file : files) {
    int flags = 0;
    ASSERT_EQ(ioctl(file.get(), FS_IOC_SETFLAGS, &flags), 0);
  }
  files.clear();
  ASSERT_TRUE(cluster_.store(2).create_job("third").has_value());  // of which they hear
  for (unsigned node : {0u, 1u}) {
    for (int i = 0; i < 1000 && fs::exists(dir(node)); ++i) usleep(20'000);
    EXPECT_FALSE(fs::exists(dir(node))) << node;
  }
}

}  // namespace
}  // namespace ptc::testing
