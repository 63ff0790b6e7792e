// Checkpoints that were removed while files of them are open on other nodes: when their images go,
// and what it costs to find that out where there are many nodes.
#include "reshard/job/removed_checkpoints.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <mutex>
#include <set>

#include "store/base/json.h"
#include "store/base/step_pool.h"
#include "store/base/wall_time.h"
#include "tests/support/becomes.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using testing::becomes;

/// Twenty nodes, n00 among them: some read a checkpoint, some are away.
class Twenty final : public Cluster {
 public:
  Twenty() {
    for (int i = 0; i < 20; ++i) names_.push_back(fmt::format("n{:02}", i));
  }
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override {
    std::lock_guard lock(mutex_);
    std::vector<std::string> alive = names_;
    std::erase_if(alive, [&](const std::string& name) { return away_.contains(name); });
    return alive;
  }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    std::lock_guard lock(mutex_);
    ++asked_[row.method];
    if (away_.contains(node) || (row.method == PeerMethod::kWithout && nobody_asks_all_))
      return make_error(Code::kUnavailable, "{} does not answer", node);
    if (row.method == PeerMethod::kUses) return std::string(reads_.contains(node) ? "yes" : "no");
    json::array without;
    for (const std::string& name : names_)
      if (name != node && !away_.contains(name) && !reads_.contains(name))
        without.emplace_back(name);
    return json::serialize(without);
  }
  std::optional<MetaTransaction::Compare> fence() const override { return std::nullopt; }
  MetaTransaction::Compare fence_of(const std::string&) const override { return {"", 0}; }
  std::shared_ptr<const MetaLease> lease() const override { return nullptr; }

  std::vector<Seen> seen() const override {
    std::lock_guard lock(mutex_);
    std::vector<Seen> seen;
    for (const std::string& name : names_) {
      const bool there = !away_.contains(name);
      seen.push_back({name, there, there ? 0 : away_since_ns_});
    }
    return seen;
  }

  void set_away(std::set<std::string> nodes, std::chrono::nanoseconds since = {}) {
    std::lock_guard lock(mutex_);
    away_ = std::move(nodes);
    away_since_ns_ = now_ns() - since.count();
  }
  void set_readers(std::set<std::string> nodes) {
    std::lock_guard lock(mutex_);
    reads_ = std::move(nodes);
  }
  void nobody_asks_all() {
    std::lock_guard lock(mutex_);
    nobody_asks_all_ = true;
  }
  int asked(PeerMethod method) {
    std::lock_guard lock(mutex_);
    return asked_[method];
  }
  std::set<std::string> some(int from, int until) const {
    return {names_.begin() + from, names_.begin() + until};
  }

 private:
  const std::string self_ = "n00";
  std::vector<std::string> names_;
  mutable std::mutex mutex_;
  std::set<std::string> away_, reads_;  // guarded, as is what follows
  int64_t away_since_ns_ = 0;
  bool nobody_asks_all_ = false;
  std::map<PeerMethod, int> asked_;
};

class RemovedCheckpointsTest : public ::testing::Test {
 protected:
  /// Whether the image of that checkpoint is kept.
  std::function<bool()> keep(RemovedCheckpoints& removed, const std::string& id) {
    auto image = std::make_shared<const Image>(ImageId{id}, MemoryPlace{"n01"}, 4);
    std::weak_ptr<const Image> kept = image;
    std::vector<ImageRef> images;
    images.push_back(std::move(image));
    removed.keep({"job", "1"}, id, std::move(images));
    return [kept] { return !kept.expired(); };
  }

  Twenty nodes_;
  StepPool pool_{2};
};

TEST_F(RemovedCheckpointsTest, OneOfManyAsksTheOthers) {
  RemovedCheckpoints removed(nodes_, pool_);
  int by_this_one = 0;
  for (int i = 0; i < 20; ++i) {
    const int uses = nodes_.asked(PeerMethod::kUses), without = nodes_.asked(PeerMethod::kWithout);
    const auto is_kept = keep(removed, fmt::format("{:04x}", i));
    EXPECT_TRUE(becomes([&] { return !is_kept(); }));
    if (nodes_.asked(PeerMethod::kWithout) == without) {
      ++by_this_one;
      EXPECT_EQ(nodes_.asked(PeerMethod::kUses) - uses, 19);
    } else {
      EXPECT_EQ(nodes_.asked(PeerMethod::kUses) - uses, 1) << "the one that asks the others";
    }
  }
  EXPECT_LT(by_this_one, 10) << "it is another for another checkpoint";
}

TEST_F(RemovedCheckpointsTest, ManyThatStayAwayKeepNothing) {
  RemovedCheckpoints removed(nodes_, pool_, 300ms);
  const auto is_kept = keep(removed, "cafe");
  nodes_.set_away(nodes_.some(8, 20));
  EXPECT_TRUE(becomes([&] { return !is_kept(); }));
}

TEST_F(RemovedCheckpointsTest, WhoIsAwayForAMomentReadsOn) {
  constexpr auto kGone = 2s;
  nodes_.set_readers(nodes_.some(5, 15));
  RemovedCheckpoints removed(nodes_, pool_, kGone);
  const auto is_kept = keep(removed, "cafe");
  std::this_thread::sleep_for(kGone + 500ms);  // it reads for longer than one may be away
  EXPECT_TRUE(is_kept());
  nodes_.set_away({"n07"});
  nodes_.set_readers({"n07"});
  std::this_thread::sleep_for(kGone / 4);
  nodes_.set_away({});
  std::this_thread::sleep_for(kGone + 500ms);
  EXPECT_TRUE(is_kept());
  nodes_.set_readers({});
  EXPECT_TRUE(becomes([&] { return !is_kept(); }));
}

TEST_F(RemovedCheckpointsTest, WhoIsAwayWhenItIsRemovedReadsOn) {
  constexpr auto kGone = 2s;
  nodes_.set_away({"n07"}, kGone / 4);
  RemovedCheckpoints removed(nodes_, pool_, kGone);
  const auto is_kept = keep(removed, "cafe");
  std::this_thread::sleep_for(kGone / 4);
  EXPECT_TRUE(is_kept());
  nodes_.set_readers({"n07"});
  nodes_.set_away({});
  std::this_thread::sleep_for(kGone + 500ms);
  EXPECT_TRUE(is_kept());
  nodes_.set_readers({});
  EXPECT_TRUE(becomes([&] { return !is_kept(); }));

  nodes_.set_away(nodes_.some(1, 20), kGone);
  EXPECT_FALSE(keep(removed, "beef")()) << "nobody is there who could have it open";
}

TEST_F(RemovedCheckpointsTest, WhoAsksAllIsSilentForAWhile) {
  nodes_.nobody_asks_all();
  RemovedCheckpoints removed(nodes_, pool_);
  std::vector<std::function<bool()>> kept;
  for (int i = 0; i < 3; ++i) kept.push_back(keep(removed, fmt::format("{:04x}", i)));
  std::this_thread::sleep_for(1s);
  EXPECT_LT(nodes_.asked(PeerMethod::kUses), 3 * 19) << "not each asks all at once";
}

TEST_F(RemovedCheckpointsTest, ManyReadersAreNotAskedAgainAndAgain) {
  nodes_.set_readers(nodes_.some(5, 15));
  RemovedCheckpoints removed(nodes_, pool_);
  std::vector<std::function<bool()>> kept;
  for (int i = 0; i < 10; ++i) kept.push_back(keep(removed, fmt::format("{:04x}", i)));
  std::this_thread::sleep_for(3s);
  // Of each ten, after 0, 100, 300, 700, 1500 ms and so on.
  EXPECT_LT(nodes_.asked(PeerMethod::kUses), 10 * (19 + 10 * 6));
  for (const auto& is_kept : kept) EXPECT_TRUE(is_kept());
}

}  // namespace
}  // namespace ptc
