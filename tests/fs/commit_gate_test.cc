// Who would write what is being committed waits for a moment; few at a time do.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "fs/tree/job_view.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

const auto kStays = std::make_shared<const GivesWay>([] { return false; });

int opens(CommitGate& gate, const std::string& key) {
  return gate.unless_sealed({key}, [] { return Errno{}; }).value;
}

TEST(CommitGate, WhoComesWhileItIsSealedWaitsForAMoment) {
  CommitGate gate;
  ASSERT_TRUE(gate.seal({"f"}, kStays));
  EXPECT_EQ(opens(gate, "other"), 0);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(opens(gate, "f"), EBUSY);
  EXPECT_GE(std::chrono::steady_clock::now() - began, 300ms);
  gate.unseal({"f"}, kStays);
  EXPECT_EQ(opens(gate, "f"), 0);
}

TEST(CommitGate, WhatGivesWayIsOpenedAtOnce) {
  CommitGate gate;
  CommitGate::Owner owner;
  owner = std::make_shared<const GivesWay>([&] {
    gate.unseal({"f"}, owner);
    return true;
  });
  ASSERT_TRUE(gate.seal({"f"}, owner));
  EXPECT_EQ(opens(gate, "f"), 0);
}

TEST(CommitGate, OfManyFewWait) {
  constexpr int kMany = 24;
  CommitGate gate;
  ASSERT_TRUE(gate.seal({"f"}, kStays));
  std::atomic<int> at_once = 0;
  {
    std::barrier together(kMany);
    std::vector<std::jthread> threads;
    for (int i = 0; i < kMany; ++i)
      threads.emplace_back([&] {
        together.arrive_and_wait();
        const auto began = std::chrono::steady_clock::now();
        EXPECT_EQ(opens(gate, "f"), EBUSY);
        // Who waits does so for all of that time; so does who gets no processor, on a busy machine.
        if (std::chrono::steady_clock::now() - began < 300ms) ++at_once;
      });
  }
  EXPECT_GE(at_once, kMany / 4);
}

}  // namespace
}  // namespace ptc
