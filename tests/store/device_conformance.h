// What every Device does; an implementation registers itself:
//
//   INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance,
//                            ::testing::Values(DeviceMaker{"host", &make_host_device}));
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "expect_error.h"
#include "store/device/device.h"
#include "store/tensor/box.h"

namespace ptc {

struct DeviceMaker {
  const char* name;
  /// nullptr: there is none here; `why` says so.
  std::unique_ptr<Device> (*make)(std::string& why);
  friend void PrintTo(const DeviceMaker& maker, std::ostream* out) { *out << maker.name; }
};

class DeviceConformance : public ::testing::TestWithParam<DeviceMaker> {
 protected:
  void SetUp() override {
    std::string why;
    device_ = GetParam().make(why);
    if (device_ == nullptr) GTEST_SKIP() << why;
    random_.seed(::testing::UnitTest::GetInstance()->random_seed());
  }
  void TearDown() override {
    if (HasFailure())
      std::printf("--gtest_random_seed=%d\n", ::testing::UnitTest::GetInstance()->random_seed());
  }

  static std::vector<std::byte> filled(size_t bytes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::byte> all(bytes);
    for (std::byte& one : all) one = static_cast<std::byte>(random());
    return all;
  }
  static ConstMemoryPointer in(const DeviceMemory& memory, uint64_t offset = 0) {
    return {memory.begin().memory(), memory.begin().address() + offset};
  }
  DeviceMemory allocated(uint64_t bytes) { return device_->allocate(bytes).value(); }
  std::unique_ptr<DeviceStream> stream() { return device_->stream().value(); }
  DeviceMemory on_device(const std::vector<std::byte>& bytes) {
    DeviceMemory memory = allocated(bytes.size());
    const auto queue = stream();
    EXPECT_TRUE(is_ok(queue->copy(memory.begin(), in_host_memory(bytes.data()), bytes.size())));
    EXPECT_TRUE(is_ok(queue->wait()));
    return memory;
  }
  std::vector<std::byte> back(const DeviceMemory& memory) {
    std::vector<std::byte> bytes(memory.bytes());
    const auto queue = stream();
    EXPECT_TRUE(is_ok(queue->copy(in_host_memory(bytes.data()), in(memory), bytes.size())));
    EXPECT_TRUE(is_ok(queue->wait()));
    return bytes;
  }
  uint64_t below(uint64_t end) { return random_() % end; }

  /// A box of an array at some place in a buffer, to a box of another; `element` bytes each.
  struct Case {
    StridedCopy copy;
    uint64_t source_bytes, target_bytes;
  };
  Case some_copy(uint64_t most) {
    const uint64_t element = uint64_t{1} << below(5);
    const size_t axes = below(4) + 1;
    Shape source, target;
    Dims source_index, target_index, extent;
    for (size_t axis = 0; axis < axes; ++axis) {
      extent.push_back(1 + below(most));
      const auto place = [&](Shape& shape, Dims& index) {
        const bool whole = below(2) == 0;
        index.push_back(whole ? 0 : below(5));
        shape.push_back(index[axis] + extent[axis] + (whole ? 0 : below(5)));
      };
      place(source, source_index);
      place(target, target_index);
    }
    const uint64_t from = below(3) == 0 ? below(64) : below(4) * 16,
                   to = below(3) == 0 ? below(64) : below(4) * 16;
    const auto copy = make_strided_copy({from, source}, source_index, {to, target}, target_index,
                                        extent, static_cast<uint32_t>(8 * element))
                          .value();
    return {copy, from + num_elements(source).value() * element + below(9),
            to + num_elements(target).value() * element + below(9)};
  }

  std::unique_ptr<Device> device_;
  std::mt19937_64 random_;
};

TEST_P(DeviceConformance, BytesGoThereAndBack) {
  EXPECT_FALSE(device_->memory().is_host());
  EXPECT_FALSE(device_->name().empty());
  const auto bytes = filled(100'003, 1);
  const DeviceMemory memory = on_device(bytes);
  EXPECT_TRUE(back(memory) == bytes);
  DeviceMemory other = allocated(bytes.size());
  const auto queue = stream();
  EXPECT_TRUE(is_ok(queue->copy(other.begin() + 3, in(memory), bytes.size() - 3)));
  EXPECT_TRUE(is_ok(queue->wait()));
  const auto moved = back(other);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end() - 3, moved.begin() + 3));
  EXPECT_TRUE(is_ok(queue->copy(other.begin(), in(memory), 0)));
}

TEST_P(DeviceConformance, ZerosAreWhereTheyShallBe) {
  auto bytes = filled(100'003, 1);
  const DeviceMemory memory = on_device(bytes);
  const auto queue = stream();
  EXPECT_TRUE(is_ok(queue->zero(memory.begin() + 5, 70'001)));
  EXPECT_TRUE(is_ok(queue->zero(memory.begin(), 0)));
  EXPECT_TRUE(is_ok(queue->wait()));
  std::fill_n(bytes.begin() + 5, 70'001, std::byte{0});
  EXPECT_TRUE(back(memory) == bytes);
  EXPECT_TRUE(has_error(queue->zero(in_host_memory(bytes.data()), 8), Code::kInvalidArgument, ""));
}

TEST_P(DeviceConformance, WorkIsDoneInItsOrder) {
  const auto first = filled(50'000, 1), second = filled(50'000, 2);
  DeviceMemory memory = allocated(50'000);
  std::vector<std::byte> before(50'000), after(50'000);
  const auto queue = stream();
  EXPECT_TRUE(is_ok(queue->copy(memory.begin(), in_host_memory(first.data()), 50'000)));
  EXPECT_TRUE(is_ok(queue->copy(in_host_memory(before.data()), in(memory), 50'000)));
  EXPECT_TRUE(is_ok(queue->copy(memory.begin(), in_host_memory(second.data()), 50'000)));
  EXPECT_TRUE(is_ok(queue->copy(in_host_memory(after.data()), in(memory), 50'000)));
  EXPECT_TRUE(is_ok(queue->wait()));
  EXPECT_TRUE(before == first);
  EXPECT_TRUE(after == second);
}

TEST_P(DeviceConformance, CutsAreThoseOfTheHost) {
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    // Many tensors in one launch, small ones and some of several tiles, each with memory of its
    // own in one allocation.
    std::vector<Case> cases;
    uint64_t source_bytes = 0, target_bytes = 0;
    std::vector<uint64_t> sources, targets;
    for (uint64_t i = below(30) + 1; i > 0; --i) {
      cases.push_back(some_copy(i == 1 && round % 4 == 0 ? 70 : 9));
      sources.push_back(source_bytes);
      targets.push_back(target_bytes);
      source_bytes += cases.back().source_bytes;
      target_bytes += cases.back().target_bytes;
    }
    const auto content = filled(source_bytes, random_()), poison = filled(target_bytes, random_());
    const DeviceMemory source = on_device(content), target = on_device(poison);
    std::vector<DeviceCopy> copies;
    std::vector<std::byte> expected = poison;
    for (size_t i = 0; i < cases.size(); ++i) {
      copies.push_back({in(source, sources[i]), target.begin() + targets[i], cases[i].copy});
      run_strided_copy(cases[i].copy, content.data() + sources[i], 0, UINT64_MAX,
                       expected.data() + targets[i]);
    }
    const auto queue = stream();
    ASSERT_TRUE(is_ok(queue->copy_strided(copies)));
    ASSERT_TRUE(is_ok(queue->wait()));
    ASSERT_TRUE(back(target) == expected);  // and nothing beside them is written
  }
}

TEST_P(DeviceConformance, SumsAreThoseOfTheHost) {
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const auto content = filled(1 + below(round % 4 == 0 ? 400'000 : 9'000), random_());
    const DeviceMemory memory = on_device(content);
    std::vector<DeviceRun> runs;
    std::vector<Checksum> sums(3), expected(3);
    sums[2] = expected[2] = {{5, 6}};  // is added to
    for (uint64_t i = below(20) + 1; i > 0; --i) {
      const uint64_t begin = below(content.size()), count = below(content.size() - begin + 1);
      const uint64_t offset = below(3) == 0 ? below(1 << 20) : begin % 16 + 16 * below(1 << 16);
      runs.push_back({in(memory, begin), count, offset, static_cast<uint32_t>(below(3))});
      expected[runs.back().sum] +=
          checksum_of_run(std::span(content).subspan(begin, count), offset);
    }
    const auto queue = stream();
    ASSERT_TRUE(is_ok(queue->add_checksums(runs, sums)));
    ASSERT_TRUE(is_ok(queue->wait()));
    ASSERT_EQ(sums, expected);
  }
}

TEST_P(DeviceConformance, AChecksumDoesNotDependOnTheCut) {
  const auto content = filled(64 * 96 * 4, 3);
  const DeviceMemory whole = on_device(content);
  const Shape shape{64, 96};
  std::vector<Checksum> sums(2);
  std::vector<DeviceRun> runs{{in(whole), content.size(), 0, 0}};
  // Two halves of all rows, cut on the device, and summed there.
  DeviceMemory halves = allocated(content.size());
  std::vector<DeviceCopy> copies;
  for (const uint64_t half : {0, 1}) {
    copies.push_back(
        {in(whole), halves.begin() + half * content.size() / 2,
         make_strided_copy({0, shape}, {0, 48 * half}, {0, Shape{64, 48}}, {0, 0}, {64, 48}, 32)
             .value()});
    for (uint64_t row = 0; row < 64; ++row)
      runs.push_back({in(halves, half * content.size() / 2 + row * 48 * 4), 48 * 4,
                      (row * 96 + half * 48) * 4, 1});
  }
  const auto queue = stream();
  ASSERT_TRUE(is_ok(queue->copy_strided(copies)));
  ASSERT_TRUE(is_ok(queue->add_checksums(runs, sums)));
  ASSERT_TRUE(is_ok(queue->wait()));
  EXPECT_EQ(sums[0], checksum_of_run(content, 0));
  EXPECT_EQ(sums[1], sums[0]);
}

TEST_P(DeviceConformance, HostMemoryIsRegisteredOnce) {
  std::vector<std::byte> bytes = filled(1 << 20, 4);
  const auto registered = device_->register_host(bytes);
  ASSERT_TRUE(is_ok(registered));
  EXPECT_TRUE(has_error(device_->register_host(std::span(bytes).subspan(4096, 10)), Code::kBusy,
                        "registered"));
  DeviceMemory memory = allocated(bytes.size());
  const auto queue = stream();
  ASSERT_TRUE(is_ok(
      queue->copy(memory.begin(), in_host_memory(std::as_const(bytes).data()), bytes.size())));
  ASSERT_TRUE(is_ok(queue->wait()));
  EXPECT_TRUE(back(memory) == bytes);
  { RegisteredMemory gone = std::move(const_cast<RegisteredMemory&>(registered.value())); }
  EXPECT_TRUE(is_ok(device_->register_host(bytes)));
}

TEST_P(DeviceConformance, MemoryIsGivenBack) {
  const uint64_t free = device_->room().value().free;
  constexpr uint64_t kBytes = 64 << 20;
  for (int i = 0; i < 10; ++i) {
    const DeviceMemory memory = allocated(kBytes);
    EXPECT_LE(device_->room().value().free, free - kBytes / 2);
  }
  EXPECT_GE(device_->room().value().free, free - kBytes);
  EXPECT_TRUE(has_error(device_->allocate(device_->room().value().bytes + 1), Code::kNoSpace,
                        device_->memory().to_string()));
}

TEST_P(DeviceConformance, WhatIsInAnotherMemoryIsRefused) {
  const auto bytes = filled(64, 5);
  const DeviceMemory memory = on_device(bytes);
  const auto queue = stream();
  const MemoryPointer elsewhere{NodeMemory::cuda(device_->memory().device() + 1),
                                memory.begin().address()};
  StridedCopy copy;
  copy.run_bytes = 16;
  const std::vector<DeviceCopy> copies{{in(memory), memory.begin() + 32, copy},
                                       {in(memory), elsewhere, copy}};
  EXPECT_TRUE(has_error(queue->copy_strided(copies), Code::kInvalidArgument, "copy 1"));
  std::vector<Checksum> sums(1);
  const std::vector<DeviceRun> run{{in_host_memory(bytes.data()), 4, 0, 0}};
  EXPECT_TRUE(has_error(queue->add_checksums(run, sums), Code::kInvalidArgument, "run 0"));
  const std::vector<DeviceRun> no_sum{{in(memory), 4, 0, 1}};
  EXPECT_TRUE(has_error(queue->add_checksums(no_sum, sums), Code::kInvalidArgument, "no sum 1"));
  EXPECT_TRUE(is_ok(queue->wait()));
  EXPECT_EQ(sums[0], Checksum());
  EXPECT_TRUE(back(memory) == bytes);
}

}  // namespace ptc
