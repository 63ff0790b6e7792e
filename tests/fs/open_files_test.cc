#include "fs/tree/open_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

namespace ptc {
namespace {

std::atomic<int> handles_alive{0};

struct CountedHandle : Handle {
  CountedHandle() { ++handles_alive; }
  ~CountedHandle() override { --handles_alive; }
};

OpenFile counted_file(uint64_t node) {
  return {std::make_shared<CountedHandle>(), node, O_RDWR, IoMode::kCached, 7};
}

TEST(OpenFiles, ANumberIsOfOneOpenForEver) {
  OpenFiles files;
  const uint64_t first = files.add(counted_file(1));
  const OpenFile taken = files.take(first);
  EXPECT_NE(taken.handle, nullptr);
  EXPECT_EQ(files.at(first), nullptr);
  EXPECT_EQ(files.take(first).handle, nullptr);
  const uint64_t second = files.add(counted_file(1));
  EXPECT_NE(second, first);
  for (uint64_t wrong : {uint64_t{0}, second + 1, second + 64,
                         reinterpret_cast<uint64_t>(taken.handle.get()), UINT64_MAX}) {
    EXPECT_EQ(files.at(wrong), nullptr) << wrong;
    EXPECT_EQ(files.take(wrong).handle, nullptr) << wrong;
  }
  EXPECT_EQ(files.take(second).node, 1u);
}

TEST(OpenFiles, WhoReadsKeepsWhatIsClosedMeanwhile) {
  const int before = handles_alive;
  OpenFiles files;
  const uint64_t number = files.add(counted_file(1));
  std::shared_ptr<Handle> reader = files.at(number);
  files.take(number);
  EXPECT_EQ(handles_alive, before + 1);
  reader.reset();
  EXPECT_EQ(handles_alive, before);
}

TEST(OpenFiles, SaysHowEachWasOpened) {
  OpenFiles files;
  std::map<uint64_t, uint64_t> nodes, said;
  for (uint64_t node = 0; node < 200; ++node) nodes[files.add(counted_file(node))] = node;
  files.each([&](uint64_t number, const OpenFile& file) {
    said[number] = file.node;
    EXPECT_EQ(file.flags, O_RDWR);
    EXPECT_EQ(file.mode, IoMode::kCached);
    EXPECT_EQ(file.backing_id, 7);
  });
  EXPECT_EQ(said, nodes);
  for (const auto& [number, node] : nodes) EXPECT_EQ(files.take(number).node, node);
}

/// A mount's end is no close: it would save what somebody has not finished.
TEST(OpenFiles, ClosesNothingAtTheEnd) {
  const int before = handles_alive;
  std::shared_ptr<Handle> held;
  {
    OpenFiles files;
    held = files.at(files.add(counted_file(1)));
  }
  EXPECT_GT(held.use_count(), 1);
  EXPECT_EQ(handles_alive, before + 1);
}

TEST(OpenFiles, ManyThreads) {
  const int before = handles_alive;
  OpenFiles files;
  std::atomic<uint64_t> last{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        const uint64_t number = files.add(counted_file(1));
        last = number;
        ASSERT_NE(files.at(number), nullptr);
        ASSERT_NE(files.take(number).handle, nullptr);
      }
    });
  }
  threads.emplace_back([&] {  // that may be closed
    for (int i = 0; i < 20000; ++i) (void)files.at(last);
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(handles_alive, before);
}

}  // namespace
}  // namespace ptc
