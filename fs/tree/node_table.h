// Every live node by its key, and those that the kernel knows by their numbers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fs/tree/live_state.h"
#include "fs/tree/node.h"
#include "store/base/mutex.h"

namespace ptc {

/// What the kernel was told of a node. All of it, and the node's key, can be written down, and is
/// here before the kernel hears of it: whoever comes after this process finds the node by the name
/// in its parent, and sees by the key whether it is still that one.
struct KnownNode {
  uint64_t id;
  const Node& node;
  uint64_t lookups;  // that the kernel has not forgotten
  /// Where the kernel was last told of it. The name may be gone since, and the parent forgotten.
  uint64_t parent;  // its id; 0: the root's
  std::string_view name;
};

/// Nodes by numbers that are given in order, in pieces of so many that follow each other: what the
/// kernel is told of at once lies together. A piece goes with its last node. Threads: one.
class NodesByNumber {
 public:
  Node* find(uint64_t number) const;  // null: there is none
  void insert(uint64_t number, Node* node);
  void erase(uint64_t number);  // of one that is there
  template <class Visit>
  void each(Visit visit) const {
    for (const auto& [which, piece] : pieces_)
      for (size_t i = 0; i < kPiece; ++i)
        if (piece.nodes[i] != nullptr) visit(which * kPiece + i, *piece.nodes[i]);
  }

 private:
  static constexpr size_t kPiece = 32;
  struct Piece {
    std::array<Node*, kPiece> nodes{};
    size_t count = 0;  // of those that are not null
  };
  std::unordered_map<uint64_t, Piece> pieces_;  // by number / kPiece
};

/// One key has one Node while anybody holds it. What the kernel knows has an id, which is a number
/// and stands for one node for ever: none is given twice in the table's life. remember() counts
/// what the kernel was told of, forget() what it let go. A node that it knows is kept alive here.
/// Threads: any. Those who look for ids hold a lock of a 64th of them together; only who tells the
/// kernel of a new node, or forgets one, holds it alone, for a moment. Must outlive its nodes.
class NodeTable {
 public:
  static constexpr uint64_t kRootId = 1;

  NodeTable() = default;
  ~NodeTable() { forget_all(); }
  NodeTable(const NodeTable&) = delete;
  NodeTable& operator=(const NodeTable&) = delete;

  /// The live node of `key`, or null.
  NodeRef find(const std::string& key) const;
  /// `fresh`, or the node that already has its key.
  NodeRef intern(NodeRef fresh);

  /// Another node can have its key from now on; it lives as long as the kernel knows it.
  void displace(const Node& node);

  /// The root has its number from the start, and keeps it.
  void remember_root(const NodeRef& root);
  /// The kernel is about to be told that `name` in `parent` is this node: its id.
  uint64_t remember(const NodeRef& node, const Node& parent, std::string_view name);
  /// The kernel knows it by another name, if it knows it.
  void moved(Node& node, const Node& parent, std::string_view name);
  /// Ids that stand for nothing are passed over.
  void forget(uint64_t id, uint64_t lookups);
  /// The node with this id; null if it never had one, or was forgotten.
  NodeRef at(uint64_t id) const;
  /// The live nodes whose keys begin with `prefix`.
  std::vector<NodeRef> under(std::string_view prefix) const;

  /// Some of the nodes that the kernel knows: all, for `part` from 0 to kParts − 1. `visit` is
  /// called with a lock of the table held: it calls nothing of it.
  static constexpr size_t kParts = 64;
  void each_known(size_t part, const std::function<void(const KnownNode&)>& visit) const;

  /// What the kernel is told is written there, before it is told. Where an earlier process did so
  /// for the same mount, what it told of stands for the same: a node has the id by which the kernel
  /// knows it, and is looked for when it is first asked for. `found` is called, with a lock of the
  /// table held, before anybody else has the node. Before all else, the root included.
  void keep_in(LiveState& state, std::function<void(uint64_t id, Node&)> found);
  /// LiveState::identity() of a node.
  uint64_t identity_of(const Node& node) const;
  /// What the kernel knows of the earlier process, and nobody has looked for yet.
  std::vector<uint64_t> not_found_yet() const;
  /// Those of which it may have attributes.
  std::vector<uint64_t> cached_and_not_found_yet() const;
  /// Makes a file that the kernel knows of an earlier process, and that was not there yet for
  /// others.
  std::optional<Created> create_again(uint64_t id, const Caller& caller, mode_t mode, int flags);
  /// It is the node that the kernel may know by another name: it has its id from now on.
  void find_again(const NodeRef& node);
  /// Whether there is anything that the kernel knows of the earlier process, and nobody here yet.
  bool has_left() const { return left_.load(std::memory_order_relaxed) != 0; }

  /// At the end of a mount: the kernel has let go of everything.
  void forget_all();
  size_t size() const;

 private:
  friend class Node;
  void erase_expired(const Node& node);  // which ends

  struct Shard {
    mutable Mutex mutex;
    /// Keys are those of the nodes, which take theirs out when they end.
    std::unordered_map<std::string_view, std::weak_ptr<Node>> nodes PTC_GUARDED_BY(mutex);
  };
  /// An id is a number times kParts, plus the part, which is the one that the node's key is in.
  /// (The root's is 1 wherever its key is.)
  struct alignas(64) Ids {
    mutable SharedMutex mutex;
    NodesByNumber nodes PTC_GUARDED_BY(mutex);
    uint64_t given PTC_GUARDED_BY(mutex) = 0;  // numbers, from 1 on
    /// Of an earlier process, until the node is found: by id, and by LiveState::identity().
    std::unordered_map<uint64_t, LiveState::Place> left PTC_GUARDED_BY(mutex);
    std::unordered_map<uint64_t, uint64_t> left_by_identity PTC_GUARDED_BY(mutex);
  };
  /// With the lock of `ids` held alone: gives the node this id, that an earlier process gave it.
  void adopt(Ids& ids, uint64_t id, const NodeRef& node) PTC_REQUIRES(ids.mutex);
  void adopt_left(Ids& ids, const NodeRef& node, uint64_t identity) PTC_REQUIRES(ids.mutex);
  void drop_left(Ids& ids, uint64_t id) PTC_REQUIRES(ids.mutex);
  NodeRef look_for(uint64_t id, int depth) const;
  NodeRef at(uint64_t id, int depth) const;
  Shard& shard_of(std::string_view key) const;
  mutable std::array<Shard, kParts> shards_;
  mutable std::array<Ids, kParts> ids_;
  LiveState* state_ = nullptr;  // null: nothing is written down
  std::function<void(uint64_t, Node&)> found_;
  mutable std::atomic<uint64_t> left_{0};  // of all parts
};

/// What a reply tells the kernel of is counted before it is sent, and taken back when it was not
/// delivered, for whatever reason. Threads: one. The table outlives it.
class ToldNodes {
 public:
  explicit ToldNodes(NodeTable& table) : table_(table) {}
  ~ToldNodes() {
    for (const uint64_t id : ids_) table_.forget(id, 1);
  }
  ToldNodes(const ToldNodes&) = delete;
  ToldNodes& operator=(const ToldNodes&) = delete;

  /// NodeTable::remember().
  uint64_t remember(const NodeRef& node, const Node& parent, std::string_view name) {
    uint64_t& id = ids_.emplace_back(0);  // which stands for nothing, if this throws
    return id = table_.remember(node, parent, name);
  }
  void delivered() { ids_.clear(); }

 private:
  NodeTable& table_;
  std::vector<uint64_t> ids_;
};

}  // namespace ptc
