#include "store/device/devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "expect_error.h"
#include "store/device/cuda_device.h"
#include "store/device/host_device.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Content = std::vector<std::byte>;

Content some_content(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  Content all(bytes);
  for (std::byte& one : all) one = static_cast<std::byte>(random());
  return all;
}

TEST(Devices, OfTheHostsMemory) {
  const auto devices = Devices::open("host:64M,32M").value();
  EXPECT_THAT(devices->memories(), ElementsAre(NodeMemory::cuda(0), NodeMemory::cuda(1)));
  const auto room = devices->room();
  ASSERT_EQ(room.size(), 2u);
  EXPECT_EQ(room[0].room.bytes, 64u << 20);
  EXPECT_EQ(room[1].room.bytes, 32u << 20);
  EXPECT_EQ(room[1].room.free, (32u << 20) - 4 * Staging::kBytes);
  EXPECT_EQ(devices->find(NodeMemory::cuda(1))->memory(), NodeMemory::cuda(1));
  EXPECT_EQ(devices->find(NodeMemory::cuda(2)), nullptr);
  EXPECT_EQ(devices->find(NodeMemory::host()), nullptr);
  EXPECT_TRUE(has_error(devices->at(NodeMemory::cuda(2)), Code::kInvalidArgument,
                        "cuda:2 is not here: this node has 2 devices"));
}

TEST(Devices, NoneAreWanted) { EXPECT_TRUE(Devices::open("off").value()->empty()); }

TEST(Devices, AutoTakesThoseThatThereAre) {
  const auto devices = Devices::open("auto");
  ASSERT_TRUE(is_ok(devices));
  EXPECT_EQ(devices.value()->size() + devices.value()->refused().size(),
            has_cuda_kernels() ? cuda_device_count() : 0);
}

TEST(Devices, OneThatIsNamedAndNotThereIsAnError) {
  const auto none = Devices::open(std::to_string(cuda_device_count()));
  EXPECT_TRUE(has_error(none, Code::kUnavailable, "GPU "));
  EXPECT_THAT(none.error().message(), HasSubstr("\"off\" does without GPUs"));
}

TEST(Devices, BadSpecsAreRefused) {
  for (const char* spec : {"", "on", "0,", ",0", "-1", "+1", "0 ,1", "1024", "99999999999",
                           "cuda:0", "AUTO", "0,auto"})
    EXPECT_TRUE(has_error(Devices::check(spec), Code::kInvalidArgument, "is none of")) << spec;
  EXPECT_TRUE(has_error(Devices::check("1,0,1"), Code::kInvalidArgument, "GPU 1 is named twice"));
  for (const char* spec : {"host:", "host:64M,", "host:x", "host:-1"})
    EXPECT_TRUE(has_error(Devices::check(spec), Code::kInvalidArgument, "size")) << spec;
  EXPECT_TRUE(has_error(Devices::check("host:64M,31M"), Code::kInvalidArgument,
                        "a device of 31.0 MiB is too small: 32.0 MiB or more"));
  for (const char* spec : {"auto", "off", "0", "1,0", "host:1G", "host:64M,64M"})
    EXPECT_TRUE(is_ok(Devices::check(spec))) << spec;
}

TEST(Devices, BytesGoThereAndBackByLanes) {
  const auto devices = Devices::open("host:64M").value();
  const Content bytes = some_content((9 << 20) + 123, 1);
  const DeviceMemory memory =
      devices->find(NodeMemory::cuda(0))->allocate(bytes.size() + 100).value();
  ASSERT_TRUE(is_ok(devices->zero(memory.begin(), memory.bytes())));
  ASSERT_TRUE(is_ok(devices->write(memory.begin() + 7, bytes)));
  Content back(memory.bytes());
  StridedCopy copy;
  copy.run_bytes = memory.bytes();
  const ConstMemoryPointer begin(memory.begin().memory(), memory.begin().address());
  ASSERT_TRUE(is_ok(devices->read(begin, copy, 0, memory.bytes(), back.data())));
  Content expected(memory.bytes());
  std::copy(bytes.begin(), bytes.end(), expected.begin() + 7);
  EXPECT_TRUE(back == expected);

  // Every third byte, from the middle of the string on.
  StridedCopy thirds;
  thirds.run_bytes = 1;
  thirds.level_count = 1;
  thirds.levels[0] = {2'000'000, 3, 5};
  Content some(1'000'000);
  ASSERT_TRUE(is_ok(devices->read(begin, thirds, 10, 1'000'010, some.data())));
  for (size_t i = 0; i < some.size(); ++i) ASSERT_EQ(some[i], expected[3 * (10 + i)]) << i;
}

TEST(Devices, LanesAreSharedAndBounded) {
  const auto devices = Devices::open("host:32M").value();
  const Content bytes = some_content(1 << 20, 1);
  const DeviceMemory memory = devices->find(NodeMemory::cuda(0))->allocate(8 << 20).value();
  std::vector<std::jthread> threads;
  for (uint64_t i = 0; i < 8; ++i)
    threads.emplace_back(
        [&, i] { EXPECT_TRUE(is_ok(devices->write(memory.begin() + (i << 20), bytes))); });
  threads.clear();
  // Whether lanes were made or not.
  EXPECT_EQ(devices->room()[0].room.free, (32u << 20) - (8u << 20) - 4 * Staging::kBytes);
}

TEST(Devices, ALaneThatFailedIsNotUsedAgain) {
  const auto devices = Devices::open("host:32M").value();
  const Content bytes = some_content(1000, 1);
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(has_error(devices->write(MemoryPointer(NodeMemory::cuda(0), 1), bytes),
                          Code::kInvalidArgument, "cuda:0 has nothing at"));
  const DeviceMemory memory = devices->find(NodeMemory::cuda(0))->allocate(1000).value();
  EXPECT_TRUE(is_ok(devices->write(memory.begin(), bytes)));
  EXPECT_TRUE(has_error(devices->zero(MemoryPointer(NodeMemory::cuda(9), 1), 1),
                        Code::kInvalidArgument, "cuda:9 is not here"));
}

TEST(Rectangles, OfAWindowAreItsRuns) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 3000; ++round) {
    SCOPED_TRACE(round);
    StridedCopy copy;
    copy.source_offset = random() % 20;
    copy.target_offset = random() % 20;
    copy.run_bytes = 1 + random() % 5;
    copy.level_count = static_cast<uint32_t>(random() % 4);
    uint64_t from = copy.run_bytes, to = copy.run_bytes;
    for (uint32_t level = copy.level_count; level-- > 0;) {
      const uint64_t count = 1 + random() % 4;
      copy.levels[level] = {count, from + random() % 3, to + random() % 3};
      from = copy.levels[level].source_stride * (count - 1) + from;
      to = copy.levels[level].target_stride * (count - 1) + to;
    }
    const uint64_t begin = random() % (copy.target_end() + 3);
    const uint64_t end = begin + random() % (copy.target_end() + 5);
    struct Byte {
      uint64_t source, target;
      bool operator==(const Byte&) const = default;
    };
    std::vector<Byte> expected, found;
    const auto add_to = [](std::vector<Byte>& list) {
      return [&list](uint64_t source, uint64_t target, uint64_t bytes) {
        for (uint64_t i = 0; i < bytes; ++i) list.push_back({source + i, target + i});
      };
    };
    for_each_run(copy, begin, end, add_to(expected));
    size_t rectangles = 0;
    for_each_rectangle(copy, begin, end, [&](const StridedCopy& rectangle) {
      ++rectangles;
      for_each_run(rectangle, add_to(found));
    });
    EXPECT_TRUE(found == expected);
    EXPECT_LE(rectangles, 2 * copy.level_count + 1);
  }
}

}  // namespace
}  // namespace ptc
