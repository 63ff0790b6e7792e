// A tree of nodes over a store of one node, without a mount.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <memory>

#include "fs/tree/tree.h"
#include "tests/store/temp_dir.h"

namespace ptc {

/// What is taken of the tree goes before it.
struct LoneTree {
  LoneTree() {
    EXPECT_TRUE(make_directory(AT_FDCWD, dir.file("store")).has_value());
    store = JobStore::open({.directory = dir.file("store"), .node = "n0", .copy_threads = 1}, &tree)
                .value();
    EXPECT_TRUE(tree.attach(store.get(), dir.file("store/root")).has_value());
  }
  ~LoneTree() { tree.detach(); }

  const TempDir dir;
  Tree tree;
  std::unique_ptr<JobStore> store;
};

}  // namespace ptc
