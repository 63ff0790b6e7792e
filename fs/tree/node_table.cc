#include "fs/tree/node_table.h"

#include <fcntl.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

/// A map that was large once gives its buckets back.
template <class Map>
void shrink(Map& map) {
  constexpr size_t kSmall = 1024;
  if (map.bucket_count() > kSmall && map.size() * 8 < map.bucket_count()) map.rehash(0);
}

/// A name that many nodes need not keep: it is behind the last '/' of the key.
std::string_view end_of_key(const Node& node) {
  const std::string_view key = node.key();
  return key.substr(key.rfind('/') + 1);
}
std::string_view kept_name(const Node& node, const std::unique_ptr<const std::string>& name) {
  return name == nullptr ? end_of_key(node) : *name;
}
std::unique_ptr<const std::string> name_to_keep(const Node& node, std::string_view name) {
  return name == end_of_key(node) ? nullptr : std::make_unique<const std::string>(name);
}

}  // namespace

Node* NodesByNumber::find(uint64_t number) const {
  const auto found = pieces_.find(number / kPiece);
  return found == pieces_.end() ? nullptr : found->second.nodes[number % kPiece];
}

void NodesByNumber::insert(uint64_t number, Node* node) {
  Piece& piece = pieces_[number / kPiece];
  piece.nodes[number % kPiece] = node;
  ++piece.count;
}

void NodesByNumber::erase(uint64_t number) {
  const auto found = pieces_.find(number / kPiece);
  found->second.nodes[number % kPiece] = nullptr;
  if (--found->second.count > 0) return;
  pieces_.erase(found);
  shrink(pieces_);
}

NodeTable::Shard& NodeTable::shard_of(std::string_view key) const {
  return shards_[std::hash<std::string_view>()(key) % kParts];
}

NodeRef NodeTable::find(const std::string& key) const {
  Shard& shard = shard_of(key);
  MutexLock lock(shard.mutex);
  auto found = shard.nodes.find(key);
  return found == shard.nodes.end() ? nullptr : found->second.lock();
}

NodeRef NodeTable::intern(NodeRef fresh) {
  Shard& shard = shard_of(fresh->key());
  NodeRef existing;
  {
    MutexLock lock(shard.mutex);
    auto [slot, added] = shard.nodes.try_emplace(fresh->key(), fresh);
    if (!added) existing = slot->second.lock();
    if (existing == nullptr) {
      if (!added) {  // the key is that of a node which is just ending
        shard.nodes.erase(slot);
        shard.nodes.emplace(fresh->key(), fresh);
      }
      fresh->table_ = this;
      fresh->part_ = static_cast<uint8_t>(&shard - shards_.data());
      return fresh;
    }
  }
  return existing;
}

void NodeTable::erase_expired(const Node& node) {
  Shard& shard = shards_[node.part_];
  MutexLock lock(shard.mutex);
  auto found = shard.nodes.find(node.key());
  // A new node may already have taken the key.
  if (found != shard.nodes.end() && found->second.expired()) shard.nodes.erase(found);
  shrink(shard.nodes);
}

void NodeTable::displace(const Node& node) {
  Shard& shard = shards_[node.part_];
  NodeRef last;  // destroyed after the lock
  MutexLock lock(shard.mutex);
  const auto found = shard.nodes.find(node.key());
  if (found == shard.nodes.end()) return;
  last = found->second.lock();
  if (last.get() != &node) return;
  shard.nodes.erase(found);
  if (state_ == nullptr) return;
  ExclusiveLock of_ids(ids_[node.part_].mutex);
  if (node.told_.kept != 0) state_->node(node.told_.kept).flags |= KeptNode::kDisplaced;
}

void NodeTable::remember_root(const NodeRef& root) {
  Ids& ids = ids_[kRootId % kParts];
  ExclusiveLock lock(ids.mutex);
  ids.nodes.insert(kRootId / kParts, root.get());
  root->told_.node = root;
  root->id_ = kRootId;
}

uint64_t NodeTable::remember(const NodeRef& node, const Node& parent, std::string_view name) {
  if (node->id() == kRootId) return kRootId;
  Ids& ids = ids_[node->part_];
  auto& told = node->told_;
  const uint64_t parent_id = parent.id();
  if (node->id() != 0) {  // as a rule nothing has changed then but the count
    SharedLock lock(ids.mutex);
    if (node->id() != 0 && told.parent == parent_id && kept_name(*node, told.name) == name) {
      told.lookups.fetch_add(1, std::memory_order_relaxed);
      if (told.kept != 0) state_->node(told.kept).lookups.fetch_add(1, std::memory_order_relaxed);
      return node->id();
    }
  }
  std::unique_ptr<const std::string> kept = name_to_keep(*node, name);
  const uint64_t identity = state_ != nullptr ? identity_of(*node) : 0;
  ExclusiveLock lock(ids.mutex);
  if (node->id() == 0 && state_ != nullptr) adopt_left(ids, node, identity);
  const bool is_new = node->id() == 0;
  if (is_new) {
    ids.nodes.insert(ids.given + 1, node.get());
    told.node = node;
    ++ids.given;
  }
  const uint64_t lookups = told.lookups.fetch_add(1, std::memory_order_relaxed) + 1;
  const bool moves = is_new || told.parent != parent_id || kept_name(*node, told.name) != name;
  told.parent = parent_id;
  told.name = std::move(kept);
  if (state_ != nullptr) {
    if (is_new) {
      state_->header().nodes_given[node->part_].store(ids.given);
      told.kept = state_->take_node(node->part_);
    }
    if (told.kept != 0) {
      KeptNode& written = state_->node(told.kept);
      written.lookups.store(lookups, std::memory_order_relaxed);
      if (moves) {
        written.parent = parent_id;
        state_->set_name(node->part_, written, name);
      }
      if (is_new) {
        written.identity = identity;
        written.flags = node->caches_attributes() ? 0 : KeptNode::kUncached;
        written.id.store(ids.given * kParts + node->part_, std::memory_order_release);
      }
    }
  }
  if (is_new) node->id_ = ids.given * kParts + node->part_;
  return node->id();
}

void NodeTable::moved(Node& node, const Node& parent, std::string_view name) {
  std::unique_ptr<const std::string> kept = name_to_keep(node, name);
  ExclusiveLock lock(ids_[node.part_].mutex);
  if (node.id() == 0 || node.id() == kRootId) return;
  node.told_.parent = parent.id();
  node.told_.name = std::move(kept);
  if (node.told_.kept == 0) return;
  KeptNode& written = state_->node(node.told_.kept);
  written.parent = node.told_.parent;
  state_->set_name(node.part_, written, name);
}

void NodeTable::forget(uint64_t id, uint64_t lookups) {
  if (id == kRootId) return;
  Ids& ids = ids_[id % kParts];
  NodeRef last;  // destroyed after the lock
  ExclusiveLock lock(ids.mutex);
  Node* const node = ids.nodes.find(id / kParts);
  if (node == nullptr) {
    const auto left = ids.left.find(id);
    if (left == ids.left.end()) return;
    KeptNode& written = state_->node(left->second);
    const uint64_t had = written.lookups.load(std::memory_order_relaxed);
    written.lookups.store(had - std::min(lookups, had), std::memory_order_relaxed);
    if (lookups < had) return;
    state_->give_back_node(id % kParts, left->second);
    drop_left(ids, id);
    return;
  }
  auto& told = node->told_;
  const uint64_t before = told.lookups.load(std::memory_order_relaxed);
  told.lookups.store(before - std::min(lookups, before), std::memory_order_relaxed);
  if (told.kept != 0)
    state_->node(told.kept).lookups.store(before - std::min(lookups, before),
                                          std::memory_order_relaxed);
  if (lookups < before) return;
  node->id_ = 0;
  last = std::move(told.node);
  ids.nodes.erase(id / kParts);
  if (told.kept != 0) state_->give_back_node(id % kParts, std::exchange(told.kept, 0));
}

NodeRef NodeTable::at(uint64_t id) const { return at(id, 0); }

NodeRef NodeTable::at(uint64_t id, int depth) const {
  const Ids& ids = ids_[id % kParts];
  {
    SharedLock lock(ids.mutex);
    if (const Node* const node = ids.nodes.find(id / kParts)) return node->told_.node;
  }
  return left_.load(std::memory_order_relaxed) == 0 ? nullptr : look_for(id, depth);
}

void NodeTable::each_known(size_t part, const std::function<void(const KnownNode&)>& visit) const {
  SharedLock lock(ids_[part].mutex);
  ids_[part].nodes.each([&](uint64_t number, const Node& node) {
    const auto& told = node.told_;
    visit({number * kParts + part, node, told.lookups.load(std::memory_order_relaxed), told.parent,
           kept_name(node, told.name)});
  });
}

std::vector<NodeRef> NodeTable::under(std::string_view prefix) const {
  std::vector<NodeRef> found;
  for (Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    // Kept until the lock is gone, all of them: the last reference of a node takes the lock again.
    for (const auto& [key, slot] : shard.nodes)
      if (key.starts_with(prefix))
        if (NodeRef node = slot.lock()) found.push_back(std::move(node));
  }
  return found;
}

void NodeTable::keep_in(LiveState& state, std::function<void(uint64_t, Node&)> found) {
  state_ = &state;
  found_ = std::move(found);
  for (size_t part = 0; part < kParts; ++part) {
    ExclusiveLock lock(ids_[part].mutex);
    ids_[part].given = state.header().nodes_given[part].load();
  }
  state.each_node([this](LiveState::Place place, const KeptNode& node) {
    const uint64_t id = node.id.load();
    Ids& ids = ids_[id % kParts];
    ExclusiveLock lock(ids.mutex);
    ids.given = std::max(ids.given, id / kParts);
    if (!ids.left.emplace(id, place).second) return;
    if ((node.flags & KeptNode::kDisplaced) == 0) ids.left_by_identity.emplace(node.identity, id);
    left_.fetch_add(1, std::memory_order_relaxed);
  });
}

uint64_t NodeTable::identity_of(const Node& node) const {
  return state_->identity(node.key(), node.stamp());
}

void NodeTable::drop_left(Ids& ids, uint64_t id) {
  const auto left = ids.left.find(id);
  if (left == ids.left.end()) return;
  const auto by_identity = ids.left_by_identity.find(state_->node(left->second).identity);
  if (by_identity != ids.left_by_identity.end() && by_identity->second == id)
    ids.left_by_identity.erase(by_identity);
  ids.left.erase(left);
  left_.fetch_sub(1, std::memory_order_relaxed);
}

void NodeTable::adopt(Ids& ids, uint64_t id, const NodeRef& node) {
  const LiveState::Place place = ids.left.find(id)->second;
  const KeptNode& written = state_->node(place);
  auto& told = node->told_;
  told.lookups = written.lookups.load();
  told.parent = written.parent;
  told.name = name_to_keep(*node, state_->name_of(written));
  told.kept = place;
  told.node = node;
  drop_left(ids, id);
  if (found_) found_(id, *node);
  // What the kernel has of its bytes was read before.
  node->note_opened();
  ids.nodes.insert(id / kParts, node.get());
  node->id_ = id;
}

void NodeTable::adopt_left(Ids& ids, const NodeRef& node, uint64_t identity) {
  const auto found = ids.left_by_identity.find(identity);
  if (found != ids.left_by_identity.end()) adopt(ids, found->second, node);
}

void NodeTable::find_again(const NodeRef& node) {
  if (state_ == nullptr || left_.load() == 0 || node->table_ != this) return;
  const uint64_t identity = identity_of(*node);
  Ids& ids = ids_[node->part_];
  ExclusiveLock lock(ids.mutex);
  if (node->id() == 0) adopt_left(ids, node, identity);
}

NodeRef NodeTable::look_for(uint64_t id, int depth) const {
  constexpr int kDeepest = 4096;  // names longer than PATH_MAX can be made, step by step
  Ids& ids = ids_[id % kParts];
  uint64_t parent_id = 0, identity = 0;
  std::string name;
  {
    SharedLock lock(ids.mutex);
    if (const Node* const node = ids.nodes.find(id / kParts)) return node->told_.node;
    const auto left = ids.left.find(id);
    if (left == ids.left.end() || depth > kDeepest) return nullptr;
    const KeptNode& written = state_->node(left->second);
    if ((written.flags & KeptNode::kDisplaced) != 0) return nullptr;
    parent_id = written.parent;
    identity = written.identity;
    name = state_->name_of(written);
  }
  const NodeRef parent = name.empty() ? nullptr : at(parent_id, depth + 1);
  if (parent == nullptr) return nullptr;
  const auto found = parent->lookup(name);
  if (!found || found.value()->table_ != this) return nullptr;
  const NodeRef& node = found.value();
  if (node->part_ != id % kParts || identity_of(*node) != identity) return nullptr;
  ExclusiveLock lock(ids.mutex);
  if (node->id() == 0 && ids.left.contains(id)) const_cast<NodeTable*>(this)->adopt(ids, id, node);
  return node->id() == id ? node : nullptr;
}

std::optional<Created> NodeTable::create_again(uint64_t id, const Caller& caller, mode_t mode,
                                               int flags) {
  uint64_t parent_id = 0;
  std::string name;
  {
    const Ids& ids = ids_[id % kParts];
    SharedLock lock(ids.mutex);
    const auto left = ids.left.find(id);
    if (left == ids.left.end()) return std::nullopt;
    parent_id = state_->node(left->second).parent;
    name = state_->name_of(state_->node(left->second));
  }
  const NodeRef parent = name.empty() ? nullptr : at(parent_id);
  if (parent == nullptr) return std::nullopt;
  auto created = parent->create(caller, name, mode, flags & ~(O_CREAT | O_EXCL | O_TRUNC));
  if (!created) return std::nullopt;
  find_again(created.value().node);
  if (created.value().node->id() == id) return std::move(created).value();
  created.value().opened.handle->discard();
  return std::nullopt;
}

std::vector<uint64_t> NodeTable::not_found_yet() const {
  std::vector<uint64_t> found;
  for (const Ids& ids : ids_) {
    SharedLock lock(ids.mutex);
    for (const auto& [id, place] : ids.left) found.push_back(id);
  }
  return found;
}

std::vector<uint64_t> NodeTable::cached_and_not_found_yet() const {
  std::vector<uint64_t> found;
  for (const Ids& ids : ids_) {
    SharedLock lock(ids.mutex);
    for (const auto& [id, place] : ids.left)
      if ((state_->node(place).flags & KeptNode::kUncached) == 0) found.push_back(id);
  }
  return found;
}

void NodeTable::forget_all() {
  for (Ids& ids : ids_) {
    std::vector<NodeRef> last;  // destroyed after the lock
    ExclusiveLock lock(ids.mutex);
    ids.nodes.each([&](uint64_t, Node& node) {
      node.told_.lookups = 0;
      node.id_ = 0;
      last.push_back(std::move(node.told_.node));
    });
    ids.nodes = {};
  }
}

size_t NodeTable::size() const {
  size_t total = 0;
  for (const Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    total += shard.nodes.size();
  }
  return total;
}

}  // namespace ptc
