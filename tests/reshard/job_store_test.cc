// A store's jobs as its listener hears of them: made, sealed, removed.
#include "reshard/node/job_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "tests/support/job_fixture.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;

/// Who hears of it counts by names: a job that comes meanwhile would be taken for the one that has
/// gone.
TEST(JobStoreTest, NoJobIsMadeWhileTheListenerIsToldOfJobs) {
  struct Listener : JobListener {
    std::function<void()> told;
    void names_changed() override {}
    void checkpoint_changed(const std::string&, const std::string&) override {}
    void jobs_changed() override { told(); }
  } listener;
  TempDir dir;
  auto store =
      JobStore::open({.directory = dir.path(), .node = "n0", .copy_threads = 2}, &listener).value();
  std::future<bool> made;
  bool meanwhile = true;
  listener.told = [&] {
    made = std::async(std::launch::async, [&] { return store->create_job("job").has_value(); });
    meanwhile = made.wait_for(std::chrono::milliseconds(500)) == std::future_status::ready;
  };
  store->tell_jobs_changed();
  EXPECT_FALSE(meanwhile);
  EXPECT_TRUE(made.get());
}

/// Whoever writes through a mount may do so between the look into a job and its removal.
TEST(JobStoreTest, AJobIsSealedAndLookedAtAgainBeforeItIsRemoved) {
  struct Listener : JobListener {
    struct Sealed : Seal {
      explicit Sealed(std::function<void()> opened) : opened_(std::move(opened)) {}
      ~Sealed() override { opened_(); }
      void committed() override {}
      std::function<void()> opened_;
    };
    std::function<void()> sealed, opened;
    void names_changed() override {}
    void checkpoint_changed(const std::string&, const std::string&) override {}
    Result<std::unique_ptr<Seal>> seal_job(const std::string& job) override {
      EXPECT_EQ(job, "job");
      sealed();
      return std::unique_ptr<Seal>(std::make_unique<Sealed>(opened));
    }
  } listener;
  const TempDir dir;
  auto store =
      JobStore::open({.directory = dir.path(), .node = "n0", .copy_threads = 2}, &listener).value();
  const JobRef job = store->create_job("job").value();
  const fs::path file = job->files_dir() + "/incoming/base/rank/0/notes.txt";
  bool there = false;
  listener.sealed = [&] { write_file(file, "just before"); };
  listener.opened = [&] { there = fs::exists(dir.path() / "jobs/job"); };
  const Result<> removed = store->remove_job("job", false);
  ASSERT_TRUE(removed.has_error());
  EXPECT_EQ(removed.error().code(), Code::kBusy);
  EXPECT_TRUE(there);
  EXPECT_EQ(read_file(file), "just before");
  // Nor is it half gone.
  fs::remove_all(job->files_dir() + "/incoming/base");
  write_ranks(llama_sample(), LayoutSpec(), job->files_dir() + "/incoming/base");
  EXPECT_TRUE(job->commit("base", "base").has_value());
  EXPECT_TRUE(job->remove_checkpoint("base").has_value());
  listener.sealed = [] {};
  ASSERT_TRUE(store->remove_job("job", false).has_value());
  EXPECT_FALSE(there) << "sealed until its directory was gone";
}

}  // namespace
}  // namespace ptc::testing
