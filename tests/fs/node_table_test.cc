#include "fs/tree/node_table.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "tests/support/job_fixture.h"

namespace ptc {
namespace {

std::atomic<int> alive{0};

struct Thing : Node {
  explicit Thing(std::string key) : Node(std::move(key)) { ++alive; }
  ~Thing() override { --alive; }
  FsResult<struct stat> attributes() override { return Errno{EIO}; }
};

Thing& parent() {
  static NodeTable table;
  static const NodeRef root = table.intern(std::make_shared<Thing>("parent"));
  table.remember_root(root);
  return static_cast<Thing&>(*root);
}

/// What a table says that the kernel knows.
struct Told {
  std::string key, name;
  uint64_t parent = 0, lookups = 0;
  bool operator==(const Told&) const = default;
};
std::map<uint64_t, Told> told_by(const NodeTable& table) {
  std::map<uint64_t, Told> all;
  for (size_t part = 0; part < NodeTable::kParts; ++part)
    table.each_known(part, [&](const KnownNode& known) {
      all[known.id] = {known.node.key(), std::string(known.name), known.parent, known.lookups};
    });
  return all;
}

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
  const uint64_t id = table.remember(node, parent(), "a");
  EXPECT_EQ(table.remember(node, parent(), "a"), id);
  node.reset();
  EXPECT_EQ(table.find("k").get(), raw);
  EXPECT_EQ(table.at(id).get(), raw);
  table.forget(id, 1);
  EXPECT_EQ(table.at(id).get(), raw);
  EXPECT_EQ(raw->id(), id);
  table.forget(id, 1);
  EXPECT_EQ(table.find("k"), nullptr);
}

TEST(NodeTable, AnIdIsNeverGivenTwice) {
  NodeTable table;
  const NodeRef node = table.intern(std::make_shared<Thing>("k"));
  std::set<uint64_t> ids;
  for (int i = 0; i < 1000; ++i) {
    const uint64_t id = table.remember(node, parent(), "a");
    EXPECT_GT(id, NodeTable::kRootId);
    EXPECT_TRUE(ids.insert(id).second) << id;
    table.forget(id, 1);
    EXPECT_EQ(node->id(), 0u);
    EXPECT_EQ(table.at(id), nullptr);
  }
}

TEST(NodeTable, NumbersOfNothingAreOfNothing) {
  NodeTable table;
  const NodeRef node = table.intern(std::make_shared<Thing>("k"));
  const uint64_t id = table.remember(node, parent(), "a");
  for (uint64_t wrong : {uint64_t{0}, uint64_t{1}, id + 1, id + NodeTable::kParts,
                         reinterpret_cast<uint64_t>(node.get()), UINT64_MAX}) {
    EXPECT_EQ(table.at(wrong), nullptr) << wrong;
    table.forget(wrong, 1);
  }
  EXPECT_EQ(table.at(id), node);
  table.forget(id, UINT64_MAX);  // more than it was told of
  EXPECT_EQ(table.at(id), nullptr);
  table.forget(id, 1);
  const uint64_t next = table.remember(node, parent(), "a");
  table.forget(id, 1);
  EXPECT_EQ(table.at(next), node);
}

TEST(NodeTable, WhatTheKernelWasToldInVainIsNotCounted) {
  NodeTable table;
  const NodeRef known = table.intern(std::make_shared<Thing>("known"));
  const NodeRef fresh = table.intern(std::make_shared<Thing>("fresh"));
  const uint64_t id = table.remember(known, parent(), "known");
  auto tell = [&](bool throws, bool delivered) {
    ToldNodes told(table);
    EXPECT_EQ(told.remember(known, parent(), "known"), id);
    told.remember(fresh, parent(), "fresh");
    if (throws) throw std::bad_alloc();
    if (delivered) told.delivered();
  };
  EXPECT_THROW(tell(true, true), std::bad_alloc);
  EXPECT_EQ(told_by(table)[id].lookups, 1u);
  EXPECT_EQ(fresh->id(), 0u);
  tell(false, false);
  EXPECT_EQ(told_by(table)[id].lookups, 1u);
  EXPECT_EQ(fresh->id(), 0u);
  tell(false, true);
  EXPECT_EQ(told_by(table)[id].lookups, 2u);
  EXPECT_EQ(told_by(table)[fresh->id()].lookups, 1u);
}

TEST(NodeTable, TheRootHasItsNumberForEver) {
  NodeTable table;
  const NodeRef root = table.intern(std::make_shared<Thing>("root"));
  table.remember_root(root);
  table.forget(NodeTable::kRootId, 5);
  EXPECT_EQ(table.remember(root, *root, "loop"), NodeTable::kRootId);
  EXPECT_EQ(table.at(NodeTable::kRootId), root);
  table.forget_all();
  EXPECT_EQ(table.at(NodeTable::kRootId), nullptr);
}

TEST(NodeTable, TheLastNameThatTheKernelWasToldIsKept) {
  NodeTable table;
  const NodeRef directory = table.intern(std::make_shared<Thing>("d"));
  const NodeRef node = table.intern(std::make_shared<Thing>("k"));
  table.moved(*node, *directory, "nobody knows it");
  EXPECT_TRUE(told_by(table).empty());
  const uint64_t of_directory = table.remember(directory, parent(), "dir");
  const uint64_t id = table.remember(node, *directory, "a");
  EXPECT_EQ(told_by(table)[id], (Told{"k", "a", of_directory, 1}));
  table.remember(node, *directory, "hard link");
  EXPECT_EQ(told_by(table)[id], (Told{"k", "hard link", of_directory, 2}));
  const NodeRef of_path = table.intern(std::make_shared<Thing>("a/path"));
  const uint64_t path = table.remember(of_path, *directory, "path");
  EXPECT_EQ(told_by(table)[path], (Told{"a/path", "path", of_directory, 1}));
  table.moved(*of_path, *directory, "elsewhere");
  EXPECT_EQ(told_by(table)[path].name, "elsewhere");
  table.moved(*node, parent(), "moved");
  EXPECT_EQ(told_by(table)[id], (Told{"k", "moved", NodeTable::kRootId, 2}));
  EXPECT_EQ(told_by(table)[of_directory], (Told{"d", "dir", NodeTable::kRootId, 1}));
}

TEST(NodeTable, AnotherNodeWithTheKeyHasAnIdOfItsOwn) {
  NodeTable table;
  NodeRef old = table.intern(std::make_shared<Thing>("k"));
  const uint64_t old_id = table.remember(old, parent(), "a");
  table.displace(*old);
  const NodeRef fresh = table.intern(std::make_shared<Thing>("k"));
  const uint64_t fresh_id = table.remember(fresh, parent(), "a");
  EXPECT_NE(fresh_id, old_id);
  EXPECT_EQ(table.at(old_id), old);
  EXPECT_EQ(table.at(fresh_id), fresh);
  table.forget(old_id, 1);
  old.reset();
  EXPECT_EQ(table.find("k"), fresh);
}

/// Beside a table that remembers everything.
TEST(NodeTable, AgreesWithAMap) {
  const uint64_t seed = testing::test_seed();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  auto below = [&](uint64_t end) { return random() % end; };
  {
    NodeTable table;
    std::map<uint64_t, Told> known;
    std::vector<uint64_t> given_ids;  // also those that are forgotten
    std::set<uint64_t> ever;
    for (int step = 0; step < 20000; ++step) {
      const std::string key = std::to_string(below(300)), name = std::to_string(below(3));
      switch (below(5)) {
        case 0:
        case 1: {
          const NodeRef node = table.intern(std::make_shared<Thing>(key));
          const bool is_new = node->id() == 0;
          const uint64_t id = table.remember(node, parent(), name);
          ASSERT_EQ(is_new, ever.insert(id).second) << id;
          if (is_new) given_ids.push_back(id);
          known[id] = {key, name, NodeTable::kRootId, known[id].lookups + 1};
          break;
        }
        case 2:
        case 3: {
          if (given_ids.empty()) break;
          const uint64_t id = given_ids[below(given_ids.size())], lookups = 1 + below(4);
          table.forget(id, lookups);
          if (known.contains(id) &&
              (known[id].lookups -= std::min(lookups, known[id].lookups)) == 0)
            known.erase(id);
          break;
        }
        default:
          if (const NodeRef node = table.find(key)) {
            table.moved(*node, parent(), name);
            known.at(node->id()).name = name;
          }
      }
      if (step % 500 != 0) continue;
      ASSERT_EQ(told_by(table), known);
      ASSERT_EQ(table.size(), known.size());
      for (const uint64_t id : given_ids) {
        const NodeRef node = table.at(id);
        ASSERT_EQ(node != nullptr, known.contains(id));
        if (node != nullptr) {
          ASSERT_EQ(node->key(), known[id].key);
        }
      }
    }
    table.forget_all();
    EXPECT_EQ(table.size(), 0u);
  }
}

TEST(NodeTable, ManyThreads) {
  (void)parent();  // is one for all tests
  const int before = alive;
  {
    NodeTable table;
    std::array<std::atomic<uint64_t>, 7> last{};  // ids that the keys had
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 5000; ++i) {
          const std::string key = std::to_string(i % 7);
          NodeRef node = table.intern(std::make_shared<Thing>(key));
          ASSERT_EQ(node->key(), key);
          const uint64_t id = table.remember(node, parent(), std::to_string(i % 3));
          last[i % 7] = id;
          ASSERT_EQ(table.at(id), node);
          node.reset();
          table.forget(id, 1);
        }
      });
    }
    // Numbers of which it doesn't know whether they still are any.
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 20000; ++i) {
          const NodeRef node = table.at(last[i % 7]);
          if (node != nullptr) {
            ASSERT_EQ(node->key(), std::to_string(i % 7));
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(table.size(), 0u);
  }
  EXPECT_EQ(alive, before);
}

}  // namespace
}  // namespace ptc
