#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "store/base/resident.h"
#include "tcp_world.h"
#include "transport_conformance.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(Tcp, TransportConformance,
                         testing::Values(TransportBackend{
                             "tcp", [] { return std::make_unique<TcpWorld>(); }}));
INSTANTIATE_TEST_SUITE_P(TcpAndDevices, TransportConformance,
                         testing::Values(TransportBackend{
                             "tcp_and_devices", [] {
                               return std::make_unique<TcpWorld>(
                                   4, PeersOptions(), [](const std::string&) { return PeerAuth{}; },
                                   "host:256M,256M");
                             }}));

/// n1 has one thread for the network, and says "here" when it is asked.
class OneThread : public testing::Test {
 protected:
  static constexpr const char* kName = "test-net";

  OneThread() {
    PeerServerOptions options = world_.server_options(1);
    options.io = IoThreads::start(1, kName).value();
    world_.server(1) = PeerServer::start(options).value();
    world_.server(1)->handle(
        "where", [](std::string_view, const std::string&) { return Result<std::string>("here"); });
    world_.peers().set("n1", world_.server(1)->address());
  }
  /// Page faults of that thread for which a disk was read; −1: it is not found.
  static int64_t waits_for_disk() {
    int64_t found = -1;
    DIR* const tasks = ::opendir("/proc/self/task");
    while (const dirent* task = ::readdir(tasks)) {
      std::ifstream file(fmt::format("/proc/self/task/{}/stat", task->d_name));
      std::string text(std::istreambuf_iterator<char>(file), {});
      if (text.find(fmt::format("({})", kName)) == std::string::npos) continue;
      std::istringstream fields(text.substr(text.rfind(')') + 1));
      std::string field;
      for (int i = 0; i < 9; ++i) fields >> field;
      fields >> found;
    }
    ::closedir(tasks);
    return found;
  }
  /// One byte in `stride`.
  static StridedCopy some_of(uint64_t bytes, uint64_t stride) {
    StridedCopy copy;
    copy.run_bytes = 1;
    copy.level_count = 1;
    copy.levels[0] = {bytes / stride, stride, 1};
    return copy;
  }

  TcpWorld world_{2};
};

/// Who takes bytes faster than they are collected is never waited for.
TEST_F(OneThread, OthersAreAnsweredWhileOneFetches) {
  constexpr uint64_t kBytes = 64 << 20, kStride = 4096, kTimes = 1500;
  constexpr uint64_t kEach = kBytes / kStride;
  const ImageRef image = world_.seen(1, world_.publish(1, Bytes(kBytes, std::byte{7})));
  Bytes target(kEach * kTimes);
  std::vector<FetchItem> items;
  for (uint64_t i = 0; i < kTimes; ++i)
    items.push_back({image.get(), some_of(kBytes, kStride), 0, kEach,
                     in_host_memory(target.data() + i * kEach)});
  EXPECT_EQ(world_.peers().call("n1", "where", "", 30s).value(), "here");
  std::atomic<bool> fetched = false;
  std::thread fetching([&] {
    EXPECT_TRUE(is_ok(world_.transport().fetch(items, {})));
    fetched = true;
  });
  while (world_.numbers(1).bytes_received < (1 << 20)) std::this_thread::sleep_for(1ms);
  int answers = 0;
  for (; !fetched; ++answers)
    EXPECT_EQ(world_.peers().call("n1", "where", "", 30s).value(), "here");
  EXPECT_GE(answers, 3);
  fetching.join();
  EXPECT_EQ(std::count(target.begin(), target.end(), std::byte{7}),
            static_cast<ptrdiff_t>(target.size()));
}

TEST_F(OneThread, WhatLiesOnADiskIsReadByOthers) {
  constexpr uint64_t kBytes = 64 << 20, kStride = 2 << 20;
  std::mt19937_64 random(7);
  const Bytes bytes = random_bytes(kBytes, random);
  const ImageRef image = world_.publish(1, bytes);
  EXPECT_TRUE(is_ok(world_.store(1).sync()));
  {
    const FileInUse file = image->use_file().value();
    ASSERT_EQ(::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED), 0);
    void* const mapped = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file.fd(), 0);
    const bool stayed = is_in_memory({static_cast<const std::byte*>(mapped), kBytes});
    ::munmap(mapped, kBytes);
    if (stayed) GTEST_SKIP() << "its pages stay in memory";
  }
  const ImageRef seen = world_.seen(1, image);
  Bytes some(kBytes / kStride), all(kBytes);
  const int64_t before = waits_for_disk();
  EXPECT_GE(before, 0);
  std::vector<FetchItem> items;
  for (uint64_t i = some.size(); i-- > 0;) {  // backwards: nothing is read ahead
    StridedCopy one = whole_copy(1);
    one.source_offset = i * kStride;
    items.push_back({seen.get(), one, 0, 1, in_host_memory(some.data() + i)});
  }
  items.push_back({seen.get(), whole_copy(kBytes), 0, kBytes, in_host_memory(all.data())});
  EXPECT_TRUE(is_ok(world_.transport().fetch(items, {})));
  EXPECT_LT(waits_for_disk() - before, 4) << "a page may go again meanwhile";
  EXPECT_EQ(all, bytes);
  for (size_t i = 0; i < some.size(); ++i) EXPECT_EQ(some[i], bytes[i * kStride]);
}

}  // namespace
}  // namespace ptc
