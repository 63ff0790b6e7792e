// In which order a node takes what it needs of others.
#include "reshard/exec/remote_fetch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

using Names = std::vector<std::string>;

Names names(const char* prefix, size_t count) {
  Names all;
  for (size_t i = 0; i < count; ++i) all.push_back(fmt::format("{}{:03}", prefix, i));
  return all;
}

/// By place in the order: how often each sender has it, over all receivers.
std::vector<std::map<std::string, size_t>> places(const Names& receivers, const Names& senders) {
  std::vector<std::map<std::string, size_t>> all(senders.size());
  for (const std::string& self : receivers) {
    Names others = senders;
    std::erase(others, self);
    const std::vector<size_t> order =
        order_of_senders(self, others.size() < senders.size(), others);
    std::vector<size_t> each(others.size());
    std::iota(each.begin(), each.end(), size_t{0});
    EXPECT_THAT(order, UnorderedElementsAreArray(each));
    for (size_t place = 0; place < order.size(); ++place) ++all[place][others[order[place]]];
  }
  return all;
}

TEST(OrderOfSenders, WhereAllTakeFromAllEachIsTheKthOfOne) {
  for (const size_t nodes : {2, 3, 17, 64, 128}) {
    const Names all = names("w", nodes);
    const auto of_all = places(all, all);
    for (size_t place = 0; place + 1 < nodes; ++place) {
      ASSERT_EQ(of_all[place].size(), nodes);
      for (const auto& [sender, times] : of_all[place]) EXPECT_EQ(times, 1u) << sender;
    }
  }
  EXPECT_THAT(order_of_senders("w1", true, {}), IsEmpty());
  EXPECT_THAT(order_of_senders("w1", false, {}), IsEmpty());
  EXPECT_EQ(order_of_senders("w5", true, {"w1", "w3", "w6", "w7"}),
            (std::vector<size_t>{2, 3, 0, 1}));
}

/// Wherever their names lie; so of the first window of places each has its share, too.
TEST(OrderOfSenders, NewNodesTakeFromAllAboutEquallyToo) {
  constexpr size_t kSenders = 64, kReceivers = 512, kAtATime = 16;
  for (const char* prefix : {"a", "w", "w0", "z"}) {
    const auto of_all = places(names(prefix, kReceivers), names("w-", kSenders));
    for (size_t begin = 0; begin + kAtATime <= kSenders; begin += kAtATime) {
      std::map<std::string, size_t> together;
      for (size_t place = begin; place < begin + kAtATime; ++place) {
        EXPECT_GT(of_all[place].size(), kSenders / 2);
        for (const auto& [sender, times] : of_all[place]) {
          EXPECT_LT(times, 24u) << "8 each, by chance more or less: " << sender;
          together[sender] += times;
        }
      }
      for (const auto& [sender, times] : together) {
        EXPECT_GT(times, 128u * 2 / 3) << sender;
        EXPECT_LT(times, 128u * 3 / 2) << sender;
      }
    }
  }
}

/// Waits, when it is asked for something, until enough was.
class Gathering final : public Transport {
 public:
  using Enough = std::function<bool(const Names& asked)>;
  explicit Gathering(Enough enough) : enough_(std::move(enough)) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token, std::chrono::milliseconds) override {
    std::unique_lock lock(mutex_);
    asked_.push_back(items[0].source->node() + (is_window(items[0]) ? " window" : ""));
    // Its own being there is what the others wait for.
    if (!is_window(items[0]) || !only_others_wait)
      if (!changed_.wait_for(lock, 20s, [&] { return enough_(asked_); })) ++in_vain;
    changed_.notify_all();
    for (FetchItem& item : items) item.begin = item.end;
    return ok();
  }
  Names asked() {
    std::lock_guard lock(mutex_);
    return asked_;
  }
  static bool is_window(const FetchItem& item) { return item.end == kWindowBytes; }

  static constexpr uint64_t kWindowBytes = 100;
  bool only_others_wait = false;
  int in_vain = 0;

 private:
  const Enough enough_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Names asked_;
};

class NoRelays final : public Relays {
 public:
  uint32_t node_of(uint32_t target) const override { return target; }
  Result<ImageRef> wait_for(uint32_t target, uint64_t, std::stop_token) override {
    std::unique_lock lock(mutex_);
    waited.push_back(target);
    changed_.notify_all();
    changed_.wait_for(lock, 20s, [&] { return waited.size() >= at_a_time; });
    return Error(Code::kUnavailable, "not there");
  }
  void arrived(uint32_t, uint64_t window, const ImageId&) override {
    std::lock_guard lock(mutex_);
    windows.insert(window);
  }
  size_t at_a_time = 1;  // answers when so many were asked for
  std::vector<uint32_t> waited;
  std::set<uint64_t> windows;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// A receiver, w20, and what it takes of w0 … w39.
struct Receiver {
  static constexpr uint32_t kNodes = 40, kSelf = 20;

  explicit Receiver(Transport& transport)
      : fetch(transport, sources, bytes_done, [](std::span<const ImagePart>) {}) {
    sources.self = names("w", kNodes)[kSelf];
    for (const std::string& node : names("w", kNodes))
      sources.images.push_back(std::make_shared<const Image>(
          ImageId{"0123456789abcdef"}, MemoryPlace{node == sources.self ? "" : node}, 1 << 20));
    sources.alternative = [](uint32_t, uint32_t) { return nullptr; };
    sources.relays = &relays;
  }
  void add(uint32_t source, uint64_t bytes, std::optional<uint64_t> window = {},
           std::optional<uint32_t> relay = {}) {
    Transfer transfer;
    transfer.source_image = source;
    transfer.copy.run_bytes = bytes;
    if (window) {
      transfer.begin = *window;
      transfer.end = *window + bytes;
    }
    transfer.relay = relay;
    const FetchItem item{sources.images[source].get(), transfer.copy, 0, bytes};
    fetch.add(0, kSelf, transfer, item, ImageId{"0123456789abcdef"});
  }

  NoRelays relays;
  FetchSources sources;
  std::atomic<uint64_t> bytes_done = 0;
  RemoteFetch fetch;
};

/// Of each node there is something for both streams.
TEST(RemoteFetch, ItBeginsWithThoseBehindItself) {
  constexpr size_t kAtATime = 16;
  Names first;  // as they were asked while none had given anything
  Gathering transport([&](const Names& asked) {
    if (first.empty() && asked.size() == 2 * kAtATime) first = asked;
    return !first.empty();
  });
  Receiver receiver(transport);
  for (uint32_t node = 0; node < Receiver::kNodes; ++node)
    if (node != Receiver::kSelf)
      for (int times = 0; times < 2; ++times) receiver.add(node, 16 << 20);
  EXPECT_TRUE(is_ok(receiver.fetch.run({})));
  const Names all = names("w", Receiver::kNodes);
  Names behind;
  for (size_t i = 1; i <= kAtATime; ++i) behind.insert(behind.end(), 2, all[Receiver::kSelf + i]);
  EXPECT_THAT(first, UnorderedElementsAreArray(behind));
  EXPECT_EQ(transport.asked().size(), 2 * (all.size() - 1));
  EXPECT_EQ(transport.in_vain, 0);
}

/// Each of the rest comes when all windows were asked for.
TEST(RemoteFetch, WhatOthersWaitForComesFirstFromWhomeverItComes) {
  constexpr size_t kOthers = Receiver::kNodes - 1;
  Gathering transport([&](const Names& asked) {
    return std::count_if(asked.begin(), asked.end(),
                         [](const std::string& one) { return one.ends_with("window"); }) == kOthers;
  });
  transport.only_others_wait = true;
  Receiver receiver(transport);
  for (uint32_t node = 0; node < Receiver::kNodes; ++node) {
    if (node == Receiver::kSelf) continue;
    receiver.add(node, 1);
    receiver.add(node, Gathering::kWindowBytes, node);
  }
  EXPECT_TRUE(is_ok(receiver.fetch.run({})));
  EXPECT_EQ(transport.in_vain, 0);
  EXPECT_EQ(transport.asked().size(), 2 * kOthers);
  EXPECT_EQ(receiver.relays.windows.size(), kOthers);
}

TEST(RemoteFetch, WhatOthersPassOnIsWaitedForBehindItselfToo) {
  constexpr uint32_t kAtATime = 16;
  Gathering transport([](const Names&) { return true; });
  Receiver receiver(transport);
  receiver.relays.at_a_time = 2 * kAtATime;
  std::vector<uint32_t> behind;
  for (uint32_t i = 1; i < Receiver::kNodes; ++i) {
    const uint32_t node = (Receiver::kSelf + i) % Receiver::kNodes;
    for (const uint64_t window : {0, 100}) receiver.add(0, 100, window, node);
    if (i <= kAtATime) behind.insert(behind.end(), 2, node);
  }
  EXPECT_TRUE(is_ok(receiver.fetch.run({})));
  ASSERT_GE(receiver.relays.waited.size(), behind.size());
  receiver.relays.waited.resize(behind.size());
  EXPECT_THAT(receiver.relays.waited, UnorderedElementsAreArray(behind));
}

}  // namespace
}  // namespace ptc
