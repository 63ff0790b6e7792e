// What every DeviceLink does; a kind of links registers itself:
//
//   INSTANTIATE_TEST_SUITE_P(Host, LinkConformance, ::testing::Values(LinkKind{"host", &make}));
//
// The ends are in threads of this process, and where one is to die, in another process: this
// program, run again.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.h"
#include "store/device/device_link.h"

namespace ptc {

/// Two devices, which may be the same one, and what makes links between them.
struct LinkEnds {
  std::unique_ptr<Device> asks, answers;
  std::unique_ptr<DeviceLinkMaker> maker, maker_of_other;
};

struct LinkKind {
  const char* name;
  /// Empty: there is none here; `why` says so.
  LinkEnds (*make)(std::string& why);
  friend void PrintTo(const LinkKind& kind, std::ostream* out) { *out << kind.name; }
};

inline std::vector<std::byte> device_bytes(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> all(bytes);
  for (std::byte& one : all) one = static_cast<std::byte>(random());
  return all;
}
inline ConstMemoryPointer as_const_memory(MemoryPointer pointer) {
  return {pointer.memory(), pointer.address()};
}
inline DeviceMemory put_on_device(Device& device, const std::vector<std::byte>& bytes) {
  DeviceMemory memory = device.allocate(bytes.size()).value();
  const auto stream = device.stream().value();
  EXPECT_TRUE(is_ok(stream->copy(memory.begin(), in_host_memory(bytes.data()), bytes.size())));
  EXPECT_TRUE(is_ok(stream->wait()));
  return memory;
}
inline std::vector<std::byte> take_from_device(Device& device, MemoryPointer from, uint64_t count) {
  std::vector<std::byte> bytes(count);
  const auto stream = device.stream().value();
  EXPECT_TRUE(is_ok(stream->copy(in_host_memory(bytes.data()), as_const_memory(from), count)));
  EXPECT_TRUE(is_ok(stream->wait()));
  return bytes;
}

class LinkConformance : public ::testing::TestWithParam<LinkKind> {
 protected:
  using End = DeviceLinkMaker::End;
  using Clock = std::chrono::steady_clock;
  struct Pair {
    std::unique_ptr<DeviceLink> asks, answers;
  };

  void SetUp() override {
    std::string why;
    ends_ = GetParam().make(why);
    if (ends_.asks == nullptr) GTEST_SKIP() << why;
    seed_ = ::testing::UnitTest::GetInstance()->random_seed();
    random_.seed(seed_);
  }
  void TearDown() override {
    if (HasFailure()) std::printf("--gtest_random_seed=%d\n", seed_);
  }
  static Clock::time_point in(int64_t ms) { return Clock::now() + std::chrono::milliseconds(ms); }
  static constexpr int64_t kLong = 60'000;

  Pair unconnected() {
    const std::string id = ends_.maker->make_id().value();
    EXPECT_LE(id.size(), DeviceLinkMaker::kMostIdBytes);
    Pair pair;
    pair.asks = ends_.maker->make(*ends_.asks, id, End::kAsks).value();
    pair.answers = ends_.maker_of_other->make(*ends_.answers, id, End::kAnswers).value();
    return pair;
  }
  Pair connected() {
    Pair pair = unconnected();
    std::thread other([&] { EXPECT_TRUE(is_ok(pair.answers->connect(in(kLong)))); });
    EXPECT_TRUE(is_ok(pair.asks->connect(in(kLong))));
    other.join();
    return pair;
  }
  /// Sends bytes of all sizes from the one to the other and compares them; some at a time.
  void exchange(Pair& pair, uint64_t seed, bool back) {
    std::mt19937_64 random(seed);
    Device& from = back ? *ends_.asks : *ends_.answers;
    Device& to = back ? *ends_.answers : *ends_.asks;
    DeviceLink& sends = back ? *pair.asks : *pair.answers;
    DeviceLink& receives = back ? *pair.answers : *pair.asks;
    std::vector<uint64_t> sizes;
    uint64_t all = 0;
    for (uint64_t i = 1 + random() % 8; i > 0; --i) {
      sizes.push_back(random() % 5 == 0 ? random() % (5 << 20) : random() % 5000);
      all += sizes.back();
    }
    const auto content = device_bytes(all + 16, random()), before = device_bytes(all + 32, 7);
    const DeviceMemory source = put_on_device(from, content), target = put_on_device(to, before);
    std::thread other([&] {
      uint64_t at = 0;
      for (const uint64_t size : sizes) {
        EXPECT_TRUE(is_ok(sends.send(as_const_memory(source.begin() + at), size)));
        at += size;
      }
      EXPECT_TRUE(is_ok(sends.wait(in(kLong))));
    });
    uint64_t at = 3;
    for (const uint64_t size : sizes) {
      EXPECT_TRUE(is_ok(receives.receive(target.begin() + at, size)));
      at += size;
    }
    EXPECT_TRUE(is_ok(receives.wait(in(kLong))));
    other.join();
    auto expected = before;
    std::copy_n(content.begin(), all, expected.begin() + 3);
    EXPECT_TRUE(take_from_device(to, target.begin(), expected.size()) == expected);
  }

  LinkEnds ends_;
  std::mt19937_64 random_;
  int seed_ = 0;
};

TEST_P(LinkConformance, BytesArriveInTheirOrder) {
  EXPECT_FALSE(ends_.maker->name().empty());
  Pair pair = connected();
  for (int round = 0; round < 20 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    exchange(pair, random_(), round % 3 == 0);
  }
}

TEST_P(LinkConformance, NothingToSendIsNoError) {
  Pair pair = connected();
  const DeviceMemory memory = ends_.asks->allocate(8).value();
  EXPECT_TRUE(is_ok(pair.asks->wait(in(kLong))));
  EXPECT_TRUE(is_ok(pair.asks->receive(memory.begin(), 0)));
  EXPECT_TRUE(is_ok(pair.asks->wait(in(kLong))));
}

TEST_P(LinkConformance, LinksAreUsedAtTheSameTime) {
  std::vector<Pair> pairs(4);
  for (Pair& pair : pairs) pair = connected();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < pairs.size(); ++i)
    threads.emplace_back([&, i, seed = random_()] {
      for (uint64_t round = 0; round < 5; ++round) exchange(pairs[i], seed + round, i % 2 == 0);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(LinkConformance, AWaitEndsWithItsDeadline) {
  Pair pair = connected();
  const DeviceMemory memory = ends_.asks->allocate(100).value();
  ASSERT_TRUE(is_ok(pair.asks->receive(memory.begin(), 100)));
  const auto before = Clock::now();
  EXPECT_TRUE(has_error(pair.asks->wait(in(200)), Code::kUnavailable, "says nothing"));
  EXPECT_GE(Clock::now() - before, std::chrono::milliseconds(190));
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(20));
  // And the link is good for nothing more.
  EXPECT_TRUE(has_error(pair.asks->receive(memory.begin(), 1), Code::kUnavailable));
  EXPECT_TRUE(has_error(pair.asks->wait(in(kLong)), Code::kUnavailable));
}

TEST_P(LinkConformance, AnAbortEndsAWaitOfAnotherThread) {
  Pair pair = connected();
  const DeviceMemory memory = ends_.asks->allocate(100).value();
  ASSERT_TRUE(is_ok(pair.asks->receive(memory.begin(), 100)));
  auto waits = std::async(std::launch::async, [&] { return pair.asks->wait(in(kLong)); });
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  pair.asks->abort();
  EXPECT_TRUE(has_error(waits.get(), Code::kCancelled, "given up"));
  EXPECT_TRUE(has_error(pair.asks->wait(in(kLong)), Code::kCancelled));
  pair.asks->abort();
}

TEST_P(LinkConformance, AnAbortEndsTheMaking) {
  Pair pair = unconnected();
  auto waits = std::async(std::launch::async, [&] { return pair.asks->connect(in(kLong)); });
  EXPECT_EQ(waits.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  pair.asks->abort();
  EXPECT_TRUE(has_error(waits.get(), Code::kCancelled, "given up"));
}

TEST_P(LinkConformance, WhereTheOtherEndDoesNotComeTheDeadlineEndsIt) {
  Pair pair = unconnected();
  EXPECT_TRUE(has_error(pair.asks->connect(in(200)), Code::kUnavailable));
  EXPECT_TRUE(has_error(pair.asks->wait(in(kLong)), Code::kUnavailable));
}

TEST_P(LinkConformance, AnEndThatGoesIsNotWaitedForLong) {
  Pair pair = connected();
  const DeviceMemory memory = ends_.asks->allocate(100).value();
  pair.answers.reset();
  ASSERT_TRUE(is_ok(pair.asks->receive(memory.begin(), 100)));
  const auto before = Clock::now();
  EXPECT_TRUE(has_error(pair.asks->wait(in(5'000)), Code::kUnavailable));
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(20));
}

TEST_P(LinkConformance, WhatIsInAnotherMemoryIsRefusedAndTheLinkStays) {
  Pair pair = connected();
  const std::vector<std::byte> bytes(10);
  EXPECT_TRUE(
      has_error(pair.asks->send(in_host_memory(bytes.data()), 10), Code::kInvalidArgument, "host"));
  const MemoryPointer elsewhere(NodeMemory::cuda(ends_.asks->memory().device() + 1), 4096);
  EXPECT_TRUE(has_error(pair.asks->receive(elsewhere, 10), Code::kInvalidArgument,
                        elsewhere.memory().to_string()));
  exchange(pair, 3, false);
}

TEST_P(LinkConformance, AnIdOfAStrangerIsRefused) {
  for (const size_t size : {0, 1, 20, 128, 1000})
    for (const End end : {End::kAsks, End::kAnswers}) {
      auto made = ends_.maker->make(*ends_.asks, std::string(size, '\x5a'), end);
      if (made.has_error()) continue;
      EXPECT_TRUE(made.value()->connect(in(300)).has_error()) << size;
    }
}

/// Not a test of its own: the end in another process, which sends what is asked for and stays.
TEST_P(LinkConformance, DISABLED_Peer) {
  const std::string hex = std::getenv("PTC_LINK_ID");
  std::string id;
  for (size_t i = 0; i < hex.size(); i += 2)
    id.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  const auto link = ends_.maker->make(*ends_.answers, id, End::kAnswers).value();
  ASSERT_TRUE(is_ok(link->connect(in(kLong))));
  const DeviceMemory memory = put_on_device(*ends_.answers, device_bytes(3 << 20, 11));
  ASSERT_TRUE(is_ok(link->send(as_const_memory(memory.begin()), 3 << 20)));
  ASSERT_TRUE(is_ok(link->wait(in(kLong))));
  ::sleep(60);
}

TEST_P(LinkConformance, AProcessThatIsKilledIsNotWaitedForLong) {
  const std::string id = ends_.maker->make_id().value();
  std::string hex = "PTC_LINK_ID=";
  for (const char c : id) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  const std::string test =
      ::testing::UnitTest::GetInstance()->current_test_info()->test_suite_name();
  const std::string filter = "--gtest_filter=" + test + ".DISABLED_Peer/*";
  const pid_t child = ::fork();
  if (child == 0) {
    ::putenv(hex.data());
    ::execl("/proc/self/exe", "link_test", filter.c_str(), "--gtest_also_run_disabled_tests",
            "--gtest_brief=1", nullptr);
    ::_exit(127);
  }
  ASSERT_GT(child, 0);
  const auto link = ends_.maker->make(*ends_.asks, id, End::kAsks).value();
  const DeviceMemory memory = ends_.asks->allocate(3 << 20).value();
  const Result<> met = link->connect(in(kLong));
  EXPECT_TRUE(is_ok(met));
  if (met) {
    EXPECT_TRUE(is_ok(link->receive(memory.begin(), 3 << 20)));
    EXPECT_TRUE(is_ok(link->wait(in(kLong))));
    EXPECT_TRUE(take_from_device(*ends_.asks, memory.begin(), 3 << 20) ==
                device_bytes(3 << 20, 11));
    EXPECT_TRUE(is_ok(link->receive(memory.begin(), 100)));
  }
  EXPECT_EQ(::kill(child, SIGKILL), 0);
  int status = 0;
  ::waitpid(child, &status, 0);
  const auto before = Clock::now();
  EXPECT_TRUE(has_error(link->wait(in(5'000)), Code::kUnavailable));
  EXPECT_LT(Clock::now() - before, std::chrono::seconds(20));
}

}  // namespace ptc
