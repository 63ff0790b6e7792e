#include "device_conformance.h"
#include "store/device/cuda_device.h"
#include "store/device/host_device.h"
#include "store/device/launch.h"

namespace ptc {
namespace {

std::unique_ptr<Device> make_host_device(std::string&) { return std::make_unique<HostDevice>(); }
INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance,
                         ::testing::Values(DeviceMaker{"host", &make_host_device}));

std::unique_ptr<Device> make_cuda_device(std::string& why) {
  auto device = open_cuda_device(0);
  if (device.has_value()) return std::move(device).value();
  why = device.error().message();
  return nullptr;
}
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformance,
                         ::testing::Values(DeviceMaker{"cuda", &make_cuda_device}));

TEST(CudaDevice, WhatIsNotThereIsSaid) {
  const auto device = open_cuda_device(cuda_device_count());
  EXPECT_TRUE(has_error(device, Code::kUnavailable, ""));
  EXPECT_FALSE(device.error().message().empty());
}

TEST(CudaDevice, ManySmallImagesTakeLittle) {
  const auto device = open_cuda_device(0);
  if (device.has_error()) GTEST_SKIP() << device.error().message();
  Device& first = *device.value();
  std::vector<DeviceMemory> memory;
  memory.push_back(first.allocate(1).value());  // the context is there
  const uint64_t before = first.room().value().free;
  for (int i = 0; i < 300; ++i) memory.push_back(first.allocate(148).value());
  EXPECT_LT(before - first.room().value().free, 32u << 20);
}

using ::testing::ElementsAre;

TEST(HostDevice, AnAccessOutsideIsNamed) {
  HostDevice device;
  const DeviceMemory memory = device.allocate(100).value();
  const auto stream = device.stream().value();
  const std::vector<std::byte> bytes(200);
  EXPECT_TRUE(has_error(stream->copy(memory.begin() + 1, in_host_memory(bytes.data()), 100),
                        Code::kInvalidArgument, "bytes 1 to 101 are not in the 100"));
  EXPECT_TRUE(has_error(stream->copy(memory.begin() + 300, in_host_memory(bytes.data()), 1),
                        Code::kInvalidArgument, "are not in the 100"));
  StridedCopy copy;
  copy.run_bytes = 10;
  copy.levels[0] = {10, 11, 10};
  copy.level_count = 1;
  const DeviceMemory target = device.allocate(100).value();
  const DeviceCopy one{{memory.begin().memory(), memory.begin().address()}, target.begin(), copy};
  EXPECT_TRUE(has_error(stream->copy_strided(std::span(&one, 1)), Code::kInvalidArgument,
                        "bytes 0 to 109 are not in the 100"));
}

TEST(HostDevice, NothingIsDoneBeforeTheWait) {
  HostDevice device;
  const DeviceMemory memory = device.allocate(4).value();
  const std::vector<std::byte> bytes(4, std::byte{1});
  std::vector<std::byte> back(4);
  const auto stream = device.stream().value();
  ASSERT_TRUE(is_ok(stream->copy(memory.begin(), in_host_memory(bytes.data()), 4)));
  ASSERT_TRUE(is_ok(stream->copy(in_host_memory(back.data()),
                                 {memory.begin().memory(), memory.begin().address()}, 4)));
  EXPECT_EQ(back[0], std::byte{0});
  ASSERT_TRUE(is_ok(stream->wait()));
  EXPECT_EQ(back[0], std::byte{1});
}

TEST(HostDevice, NoMoreThanItHas) {
  HostDevice device({.number = 3, .memory_bytes = 1000, .registrable_bytes = 100});
  EXPECT_EQ(device.memory().to_string(), "cuda:3");
  const DeviceMemory memory = device.allocate(900).value();
  EXPECT_TRUE(has_error(device.allocate(101), Code::kNoSpace, "cuda:3 has 100"));
  std::vector<std::byte> bytes(101);
  EXPECT_TRUE(has_error(device.register_host(bytes), Code::kUnavailable, "at most"));
}

TEST(CopyLaunch, LanesAreAsWideAsAllAllows) {
  const auto lane = [](uint64_t source, uint64_t target, uint64_t run, uint64_t stride) {
    CopyLaunch launch;
    StridedCopy copy;
    copy.run_bytes = run;
    copy.levels[0] = {3, stride, run};
    copy.level_count = 1;
    launch.add(source, target, copy);
    return launch.tasks().at(0).lane_bytes;
  };
  EXPECT_EQ(lane(0, 0, 64, 128), 16);
  EXPECT_EQ(lane(8, 0, 64, 128), 8);
  EXPECT_EQ(lane(0, 4, 64, 128), 4);
  EXPECT_EQ(lane(0, 0, 6, 128), 2);
  EXPECT_EQ(lane(0, 0, 64, 129), 1);
}

TEST(CopyLaunch, WhatHasTooManyLanesIsSeveralTasks) {
  // 2⁴⁰ bytes in a run at an odd address; and rows of 16 bytes, 2³⁴ of them.
  for (const bool rows : {false, true}) {
    SCOPED_TRACE(rows);
    StridedCopy copy;
    copy.source_offset = rows ? 16 : 1;
    copy.run_bytes = rows ? 16 : uint64_t{1} << 40;
    if (rows) copy.levels[copy.level_count++] = {uint64_t{1} << 34, 48, 16};
    CopyLaunch launch;
    launch.add(0, 1 << 20, copy);
    uint64_t target = 1 << 20, tiles = 0, source = copy.source_offset;
    for (const kernels::CopyTask& task : launch.tasks()) {
      ASSERT_LE(task.lanes, kernels::kMostLanes);
      EXPECT_EQ(task.target, target);
      EXPECT_EQ(task.source, source);
      EXPECT_EQ(task.first_tile, tiles);
      target += uint64_t{task.lanes} * task.lane_bytes;
      source += uint64_t{task.lanes} * task.lane_bytes * (rows ? 3 : 1);
      tiles += task.lanes / kernels::kTileLanes;
    }
    EXPECT_EQ(target, (1 << 20) + copy.total_bytes());
    EXPECT_EQ(launch.tiles(), tiles);
  }
}

}  // namespace
}  // namespace ptc
