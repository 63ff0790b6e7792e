#include "fs/tree/node_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace ptc {
namespace {

std::atomic<int> alive{0};

struct Thing : Node {
  explicit Thing(std::string key) : Node(std::move(key)) { ++alive; }
  ~Thing() override { --alive; }
  FsResult<struct stat> attributes() override { return Errno{EIO}; }
};

TEST(NodeTable, OneKeyIsOneNode) {
  NodeTable table;
  NodeRef first = table.intern(std::make_shared<Thing>("k"));
  EXPECT_EQ(table.intern(std::make_shared<Thing>("k")), first);
  EXPECT_EQ(table.find("k"), first);
  first.reset();
  EXPECT_EQ(table.find("k"), nullptr);
  EXPECT_EQ(table.size(), 0u);
}

TEST(NodeTable, TheKernelKeepsWhatItKnows) {
  NodeTable table;
  NodeRef node = table.intern(std::make_shared<Thing>("k"));
  Node* raw = node.get();
  table.remember(node);
  table.remember(node);
  node.reset();
  EXPECT_EQ(table.find("k").get(), raw);
  table.forget(raw, 1);
  EXPECT_TRUE(table.known_to_kernel(*raw));
  table.forget(raw, 1);
  EXPECT_EQ(table.find("k"), nullptr);
}

TEST(NodeTable, ManyThreads) {
  {
    NodeTable table;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&table] {
        for (int i = 0; i < 5000; ++i) {
          std::string key = std::to_string(i % 7);
          NodeRef node = table.intern(std::make_shared<Thing>(key));
          ASSERT_EQ(node->key(), key);
          table.remember(node);
          table.forget(node.get(), 1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(table.size(), 0u);
  }
  EXPECT_EQ(alive, 0);
}

}  // namespace
}  // namespace ptc
