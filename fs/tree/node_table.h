// Every live node, by key, and the kernel's hold on it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fs/tree/node.h"

namespace ptc {

/// One key has one Node while anybody holds it. The kernel's node id is the node's address (1 for
/// the root); remember() counts what the kernel was told of, forget() what it let go. A node the
/// kernel knows is kept alive here.
/// Threads: any. Must outlive its nodes.
class NodeTable {
 public:
  /// The live node of `key`, or null.
  NodeRef find(const std::string& key) const;
  /// `fresh`, or the node that already has its key.
  NodeRef intern(NodeRef fresh);

  /// Another node can have its key from now on; it lives as long as the kernel knows it.
  void displace(const Node& node);

  void remember(const NodeRef& node);
  void forget(Node* node, uint64_t lookups);
  bool known_to_kernel(const Node& node) const;
  /// The live nodes whose keys begin with `prefix`.
  std::vector<NodeRef> under(std::string_view prefix) const;

  /// Some of the nodes that the kernel knows: all, for `part` from 0 to kParts − 1.
  static constexpr size_t kParts = 64;
  std::vector<const Node*> known_to_kernel(size_t part) const;

  /// At the end of a mount: the kernel has let go of everything.
  void forget_all();
  size_t size() const;

 private:
  friend class Node;
  void erase_expired(const std::string& key);  // of a node that ends

  struct Shard {
    mutable std::mutex mutex;
    /// Keys are those of the nodes, which take theirs out when they end. Guarded by mutex.
    std::unordered_map<std::string_view, std::weak_ptr<Node>> nodes;
  };
  Shard& shard_of(std::string_view key) const;
  mutable std::array<Shard, kParts> shards_;
};

}  // namespace ptc
