#include "fs/tree/node_table.h"

#include <algorithm>
#include <functional>
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
  if (last.get() == &node) shard.nodes.erase(found);
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
      return node->id();
    }
  }
  std::unique_ptr<const std::string> kept = name_to_keep(*node, name);
  ExclusiveLock lock(ids.mutex);
  if (node->id() == 0) {
    ids.nodes.insert(ids.given + 1, node.get());
    told.node = node;
    node->id_ = ++ids.given * kParts + node->part_;
  }
  told.lookups.fetch_add(1, std::memory_order_relaxed);
  told.parent = parent_id;
  told.name = std::move(kept);
  return node->id();
}

void NodeTable::moved(Node& node, const Node& parent, std::string_view name) {
  std::unique_ptr<const std::string> kept = name_to_keep(node, name);
  ExclusiveLock lock(ids_[node.part_].mutex);
  if (node.id() == 0 || node.id() == kRootId) return;
  node.told_.parent = parent.id();
  node.told_.name = std::move(kept);
}

void NodeTable::forget(uint64_t id, uint64_t lookups) {
  if (id == kRootId) return;
  Ids& ids = ids_[id % kParts];
  NodeRef last;  // destroyed after the lock
  ExclusiveLock lock(ids.mutex);
  Node* const node = ids.nodes.find(id / kParts);
  if (node == nullptr) return;
  auto& told = node->told_;
  const uint64_t before = told.lookups.load(std::memory_order_relaxed);
  told.lookups.store(before - std::min(lookups, before), std::memory_order_relaxed);
  if (lookups < before) return;
  node->id_ = 0;
  last = std::move(told.node);
  ids.nodes.erase(id / kParts);
}

NodeRef NodeTable::at(uint64_t id) const {
  const Ids& ids = ids_[id % kParts];
  SharedLock lock(ids.mutex);
  const Node* const node = ids.nodes.find(id / kParts);
  return node == nullptr ? nullptr : node->told_.node;
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
