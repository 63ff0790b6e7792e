// How a link of NCCL ends. Driver and library are tables of functions, and these are ours: what
// NCCL does when is then the test's to say.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "expect_error.h"
#include "store/device/nccl_link.h"
#include "store/rpc/device_links.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

std::atomic<bool> nccl_lets_go = false;
std::atomic<int> nccl_aborts = 0;

const CudaDriver& quiet_driver() {
  static const CudaDriver driver = [] {
    CudaDriver made{};
    made.cuDeviceGet = [](CudaDriver::Device*, int) { return 0; };
    made.cuDevicePrimaryCtxRetain = [](CudaDriver::Context* context, CudaDriver::Device) {
      *context = context;
      return 0;
    };
    made.cuDevicePrimaryCtxRelease = [](CudaDriver::Device) { return 0; };
    made.cuCtxSetCurrent = [](CudaDriver::Context) { return 0; };
    made.cuStreamCreate = [](CudaDriver::Stream* stream, unsigned) {
      *stream = stream;
      return 0;
    };
    made.cuStreamDestroy = [](CudaDriver::Stream) { return 0; };
    return made;
  }();
  return driver;
}

/// Whose work ends, where it was given up, when the test says so.
const NcclLibrary& slow_nccl() {
  static const NcclLibrary library = [] {
    NcclLibrary made{};
    made.name = "slow 1";
    made.ncclGetUniqueId = [](NcclLibrary::UniqueId* id) {
      *id = {};
      return NcclLibrary::kSuccess;
    };
    made.ncclCommInitRankConfig = [](NcclLibrary::Communicator* communicator, int,
                                     NcclLibrary::UniqueId, int, NcclLibrary::Config*) {
      *communicator = communicator;
      return NcclLibrary::kSuccess;
    };
    made.ncclCommGetAsyncError = [](NcclLibrary::Communicator, NcclLibrary::Result* state) {
      *state = NcclLibrary::kSuccess;
      return NcclLibrary::kSuccess;
    };
    made.ncclCommAbort = [](NcclLibrary::Communicator) {
      ++nccl_aborts;
      while (!nccl_lets_go) std::this_thread::sleep_for(1ms);
      --nccl_aborts;
      return NcclLibrary::kSuccess;
    };
    return made;
  }();
  return library;
}

class NcclEnds : public testing::Test {
 protected:
  static constexpr uint64_t kStaging = 2 << 20;
  void SetUp() override { nccl_lets_go = false; }
  void TearDown() override {
    nccl_lets_go = true;
    while (nccl_aborts > 0) std::this_thread::sleep_for(1ms);
  }
  std::unique_ptr<DeviceLinks> links_that_end_within(std::chrono::milliseconds longest) {
    return std::make_unique<DeviceLinks>(
        devices_,
        [longest]() -> Result<std::unique_ptr<DeviceLinkMaker>> {
          return make_nccl_links(quiet_driver(), slow_nccl(), longest);
        },
        DeviceLinksOptions{.chunk_bytes = kStaging / 2});
  }
  static DeviceLink::Deadline soon() { return std::chrono::steady_clock::now() + 10s; }
  DeviceLinks::Held connected(DeviceLinks& links) {
    const NodeMemory first = NodeMemory::cuda(0);
    auto link = links.ask("n1", first, first, soon(), {}).value();
    EXPECT_TRUE(is_ok(links.make(*link)));
    EXPECT_TRUE(is_ok(link->link->connect(soon())));
    return link;
  }
  uint64_t used() const {
    const Device::Room room = devices_->find(NodeMemory::cuda(0))->room().value();
    return room.bytes - room.free;
  }

  const std::shared_ptr<const Devices> devices_ = Devices::open("host:64M").value();
};

TEST_F(NcclEnds, StagingIsThereUntilNcclHasLetGoOfIt) {
  auto links = links_that_end_within(60s);
  {
    const auto link = connected(*links);
    EXPECT_EQ(used(), kStaging);
  }
  for (const auto until = soon(); nccl_aborts == 0 && std::chrono::steady_clock::now() < until;)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(nccl_aborts, 1);
  EXPECT_EQ(links->asked(), 0u);
  EXPECT_EQ(used(), kStaging);  // a kernel of NCCL's may be at it
  // And the devices are there as long.
  auto ended = std::async(std::launch::async, [&] { links.reset(); });
  EXPECT_EQ(ended.wait_for(100ms), std::future_status::timeout);
  nccl_lets_go = true;
  ended.get();
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(nccl_aborts, 0);
}

TEST_F(NcclEnds, OneThatWasNeverConnectedHoldsNothing) {
  auto links = links_that_end_within(60s);
  const NodeMemory first = NodeMemory::cuda(0);
  {
    auto link = links->ask("n1", first, first, soon(), {}).value();
    ASSERT_TRUE(is_ok(links->make(*link)));
    EXPECT_EQ(used(), kStaging);
  }
  EXPECT_EQ(used(), 0u);
}

TEST_F(NcclEnds, OneThatDoesNotEndIsNotWaitedForLong) {
  auto links = links_that_end_within(200ms);
  (void)connected(*links);
  const auto before = std::chrono::steady_clock::now();
  links.reset();
  EXPECT_GE(std::chrono::steady_clock::now() - before, 190ms);
  EXPECT_LT(std::chrono::steady_clock::now() - before, 20s);
  nccl_lets_go = true;
  while (nccl_aborts > 0) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(used(), kStaging);  // nobody gives back what a device had that may be gone
}

}  // namespace
}  // namespace ptc
