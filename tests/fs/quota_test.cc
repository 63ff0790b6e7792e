// What is counted of a job and its users, whatever becomes of the job.
#include "fs/tree/quota.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "tests/fs/lone_tree.h"
#include "tests/store/small_stack.h"

namespace ptc {
namespace {

constexpr uid_t kAnn = 1, kBob = 2;

class QuotasTest : public testing::Test {
 protected:
  QuotasTest() { quotas_.set_limits({.bytes = 100}, {}); }

  /// How much more Ann may have.
  int64_t left() {
    int64_t most = 0;
    for (int64_t more = 256; more > 0; more /= 2)
      if (fits(most + more)) most += more;
    return most;
  }
  bool fits(int64_t bytes) {
    if (!quotas_.reserve(probe_, kAnn, {bytes, 0})) return false;
    quotas_.add(probe_, kAnn, {-bytes, 0});
    return true;
  }
  Quotas::Seen seen() const { return {.user = kAnn, .amount = {file_bytes_, 1}, .named = named_}; }
  void know(const Quotas::Account& account, bool by_kernel) {
    quotas_.know_file(
        account, this, [this] { return seen(); }, by_kernel);
  }

  Quotas quotas_;
  const Quotas::Account probe_ = quotas_.account("probe");
  int64_t file_bytes_ = 60;
  bool named_ = true;
};

TEST_F(QuotasTest, WhatIsOpenCountsAfterItsJobUntilItIsClosed) {
  const Quotas::Account job = quotas_.account("job");
  know(job, false);
  ASSERT_TRUE(quotas_.reserve(job, kAnn, {60, 1}));
  ASSERT_TRUE(quotas_.reserve(job, kAnn, {20, 1}));  // another file
  EXPECT_EQ(left(), 20);
  named_ = false;
  const auto gone = quotas_.detach("job");
  ASSERT_EQ(gone, job);
  quotas_.settle(gone);
  EXPECT_EQ(left(), 40);
  ASSERT_TRUE(quotas_.reserve(quotas_.account("job"), kAnn, {10, 0}));  // one of the same name
  EXPECT_EQ(left(), 30);
  file_bytes_ = 0;  // emptied through the descriptor
  quotas_.add(job, kAnn, {-60, 0});
  EXPECT_EQ(left(), 90);
  quotas_.forget_file(job, this);
  EXPECT_EQ(left(), 90);
}

/// Of one job on a file system that does not answer, say: in all others the same goes on.
TEST_F(QuotasTest, NobodyWaitsWhileAFileOfAnotherIsLookedAt) {
  const Quotas::Account job = quotas_.account("job");
  std::promise<void> answered;
  std::atomic<int> looks = 0;
  const auto slow = [&] {
    if (++looks == 2) answered.get_future().wait();
    return seen();
  };
  quotas_.know_file(job, this, slow, /*by_kernel=*/true);
  std::future<FsResult<>> asked = std::async(std::launch::async, [&] {
    return quotas_.reserve(job, kAnn, {1, 0});
  });
  while (looks < 2) std::this_thread::yield();
  std::future<void> other = std::async(std::launch::async, [&] {
    quotas_.add(probe_, kBob, {1, 0});
    EXPECT_TRUE(quotas_.limits("probe"));
  });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  answered.set_value();
  EXPECT_TRUE(asked.get());
  quotas_.forget_file(job, this);
}

TEST_F(QuotasTest, NothingGoesThatIsNotThere) {
  const Quotas::Account job = quotas_.account("job");
  quotas_.add(job, kAnn, {-1000, -5});
  quotas_.add(job, kBob, {50, 0});
  quotas_.add(job, kBob, {-51, 0});
  EXPECT_EQ(left(), 100);
  quotas_.settle(quotas_.detach("job"));
  quotas_.add(job, kAnn, {-1000, -5});
  EXPECT_EQ(left(), 100);
}

TEST_F(QuotasTest, WhatCannotBeCountedIsTooMuch) {
  const Quotas::Account job = quotas_.account("job");
  quotas_.set_job_limit("job", QuotaLimit{.bytes = 80});
  ASSERT_TRUE(quotas_.reserve(job, kAnn, {60, 1}));
  EXPECT_FALSE(quotas_.reserve(job, kAnn, {INT64_MAX, 0}));
  EXPECT_FALSE(quotas_.reserve(job, 0, {INT64_MAX - 40, 0}));
  EXPECT_EQ(left(), 40);
  quotas_.set_job_limit("job", QuotaLimit{.files = 10});
  EXPECT_FALSE(quotas_.reserve(job, 0, {INT64_MAX, 0}));
  EXPECT_EQ(left(), 40);
}

/// Which takes as long as it has files.
TEST_F(QuotasTest, AJobIsCountedAnewWhereALimitOrAnotherOwnerComesAlone) {
  Quotas quotas;
  const auto is_due = [&](std::optional<QuotaLimit> limit, uid_t owner) {
    quotas.set_job_limit("job", limit, owner);
    const bool due = quotas.is_due("job");
    quotas.recount("job", [] { return Quotas::Counted(); });
    EXPECT_FALSE(quotas.is_due("job"));
    return due;
  };
  EXPECT_FALSE(is_due(std::nullopt, kAnn));
  EXPECT_TRUE(is_due(QuotaLimit{.bytes = 80}, kAnn));
  EXPECT_FALSE(is_due(QuotaLimit{.bytes = 80}, kAnn));
  EXPECT_FALSE(is_due(QuotaLimit{.files = 10}, kAnn));
  EXPECT_TRUE(is_due(QuotaLimit{.files = 10}, kBob));
  EXPECT_FALSE(is_due(std::nullopt, kBob));
  EXPECT_TRUE(is_due(QuotaLimit{.files = 10}, kBob));
}

TEST_F(QuotasTest, WhatTheKernelWritesByItselfIsLookedAt) {
  const Quotas::Account job = quotas_.account("job");
  know(job, true);
  quotas_.recount("job", [] { return Quotas::Counted{{{kAnn, {60, 1}}}, {}}; });
  EXPECT_EQ(left(), 40);
  file_bytes_ = 95;
  EXPECT_EQ(left(), 5);
  named_ = false;
  quotas_.note_nameless(job, this, kAnn);
  file_bytes_ = 90;
  EXPECT_EQ(left(), 10);
  quotas_.forget_file(job, this);
  EXPECT_EQ(left(), 100);
}

TEST_F(QuotasTest, AnImageCountsWhileItIsRead) {
  auto image = std::make_shared<int>();
  const auto count = [&] { return Quotas::Counted{{}, {{kAnn, 70, image}}}; };
  quotas_.recount("job", count);
  EXPECT_EQ(left(), 30);
  auto reader = image;
  quotas_.recount("job", [] { return Quotas::Counted(); });  // its checkpoint is removed
  EXPECT_EQ(left(), 30);
  quotas_.settle(quotas_.detach("job"));
  EXPECT_EQ(left(), 30);
  image.reset();
  reader.reset();
  EXPECT_EQ(left(), 100);
}

/// That of a file the kernel tells of by and by, and nobody of an image.
TEST_F(QuotasTest, AWriteWaitsForWhatWasRemovedAMomentAgo) {
  using namespace std::chrono_literals;
  using Steady = std::chrono::steady_clock;
  const Quotas::Account job = quotas_.account("job");
  const auto waits = [&](uid_t user, int64_t bytes) {
    if (!quotas_.reserve_in_a_moment(probe_, user, {bytes, 0})) return false;
    quotas_.add(probe_, user, {-bytes, 0});
    return true;
  };
  const auto reserve_while = [&](const std::function<void()>& goes) {
    const std::jthread other([&] {
      std::this_thread::sleep_for(10ms);
      goes();
    });
    return waits(kAnn, 60);
  };
  EXPECT_TRUE(quotas_.reserve(job, kAnn, {60, 1}));
  know(job, false);
  EXPECT_FALSE(reserve_while([] {}));
  named_ = false;
  quotas_.note_nameless(job, this, kAnn);
  EXPECT_FALSE(fits(60)) << "nobody else waits";
  EXPECT_TRUE(reserve_while([&] { quotas_.forget_file(job, this); }));
  auto image = std::make_shared<int>();
  quotas_.recount("job", [&] { return Quotas::Counted{{}, {{kAnn, 60, image}}}; });
  quotas_.recount("job", [] { return Quotas::Counted(); });
  EXPECT_TRUE(reserve_while([&] { image.reset(); }));

  // Not for another one's, nor for what stays in use.
  EXPECT_TRUE(quotas_.reserve(probe_, kBob, {90, 1}));
  know(job, false);
  EXPECT_TRUE(quotas_.reserve(job, kAnn, {60, 1}));
  auto before = Steady::now();
  for (int i = 0; i < 50; ++i) {
    quotas_.note_nameless(job, this, kAnn);
    EXPECT_FALSE(waits(kBob, 60));
  }
  EXPECT_LT(Steady::now() - before, 3s);
  EXPECT_FALSE(waits(kAnn, 60));
  before = Steady::now();
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(waits(kAnn, 60));
  EXPECT_LT(Steady::now() - before, 10s);
}

/// What a draft of a text takes is in a number that is looked at when its job is counted anew.
TEST(JobTexts, CountWhateverIsCountedAnewMeanwhile) {
  LoneTree lone;
  Tree& tree = lone.tree;
  tree.quotas().set_limits({}, {.bytes = 1 << 20});
  ASSERT_TRUE(lone.store->create_job("job").has_value());
  JobViewRef view = tree.job("job").value();
  const auto used = [&] { return tree.quotas().space_of(view->account())->used.bytes; };
  std::unique_ptr<Handle> draft = view->layout().open({}, O_RDWR, view).value();
  const std::string text(12288, ' ');
  const int64_t before = used();

  // Whichever of these is looked at last: the texts were already, but for one case in 200.
  constexpr int kFiles = 199;
  int looked_at = 0;
  std::future<bool> written;
  const auto look = [&] {
    if (++looked_at == kFiles) {
      written = std::async(std::launch::async, [&] {
        return draft->write(std::as_bytes(std::span(text)), 0).has_value();
      });
      written.wait_for(std::chrono::milliseconds(500));  // unless it waits for the count
    }
    return Quotas::Seen{};
  };
  std::array<char, kFiles> files{};
  for (char& file : files) tree.quotas().know_file(view->account(), &file, look, false);
  tree.recount(view->job());
  ASSERT_TRUE(written.valid());
  EXPECT_TRUE(written.get());
  EXPECT_EQ(used() - before, 12288 - 4096);
  for (char& file : files) tree.quotas().forget_file(view->account(), &file);
  draft.reset();
  EXPECT_EQ(used(), before);
}

TEST(JobFiles, CountHoweverDeeplyTheyAreNested) {
  LoneTree lone;
  Tree& tree = lone.tree;
  tree.quotas().set_limits({}, {.bytes = int64_t{1} << 40});
  const JobRef job = lone.store->create_job("job").value();
  const JobViewRef view = tree.job("job").value();
  tree.recount(*job);
  const auto used = [&] { return tree.quotas().space_of(view->account())->used; };
  const int64_t before = used().files;
  UniqueFd here =
      open_file(AT_FDCWD, job->files_dir() + "/incoming", O_RDONLY | O_DIRECTORY).value();
  for (int i = 0; i < kNested; ++i) {
    ASSERT_EQ(::mkdirat(here.get(), "d", 0700), 0);
    here = open_file(here.get(), "d", O_RDONLY | O_DIRECTORY).value();
  }
  const std::string text(1 << 20, 'x');
  const UniqueFd file = open_file(here.get(), "f", O_WRONLY | O_CREAT | O_EXCL).value();
  ASSERT_TRUE(write_exactly(file.get(), std::as_bytes(std::span(text)), 0).has_value());
  const int64_t bytes = used().bytes;
  on_small_stack([&] { tree.recount(*job); });
  EXPECT_EQ(used().files - before, kNested + 1);
  EXPECT_GE(used().bytes - bytes, 1 << 20);
  // Nor does its removal end the daemon.
  on_small_stack([&] { EXPECT_TRUE(lone.store->remove_job("job", /*force=*/true).has_value()); });
  EXPECT_NE(::access(lone.dir.file("store/jobs/job").c_str(), F_OK), 0);
}

/// Nor is what was known of it kept, whether or not anybody looks for it again.
TEST(Tree, ARemovedJobIsHeldByNobody) {
  LoneTree lone;
  const std::weak_ptr<Job> job = lone.store->create_job("job").value();
  ASSERT_NE(lone.tree.job("job").value(), nullptr);
  ASSERT_TRUE(lone.store->remove_job("job", /*force=*/false).has_value());
  for (int i = 0; i < 1000 && !job.expired(); ++i)  // its threads may still be at something
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(job.expired());
}

}  // namespace
}  // namespace ptc
