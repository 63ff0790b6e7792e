#include "fs/tree/node_table.h"

#include <functional>
#include <utility>
#include <vector>

namespace ptc {

NodeTable::Shard& NodeTable::shard_of(std::string_view key) const {
  return shards_[std::hash<std::string_view>()(key) % shards_.size()];
}

NodeRef NodeTable::find(const std::string& key) const {
  Shard& shard = shard_of(key);
  std::lock_guard lock(shard.mutex);
  auto found = shard.nodes.find(key);
  return found == shard.nodes.end() ? nullptr : found->second.lock();
}

NodeRef NodeTable::intern(NodeRef fresh) {
  Shard& shard = shard_of(fresh->key());
  NodeRef existing;
  {
    std::lock_guard lock(shard.mutex);
    auto [slot, added] = shard.nodes.try_emplace(fresh->key(), fresh);
    if (!added) existing = slot->second.lock();
    if (existing == nullptr) {
      if (!added) {  // the key is that of a node which is just ending
        shard.nodes.erase(slot);
        shard.nodes.emplace(fresh->key(), fresh);
      }
      fresh->table_ = this;
      return fresh;
    }
  }
  return existing;
}

void NodeTable::erase_expired(const std::string& key) {
  Shard& shard = shard_of(key);
  std::lock_guard lock(shard.mutex);
  auto found = shard.nodes.find(key);
  // A new node may already have taken the key.
  if (found != shard.nodes.end() && found->second.expired()) shard.nodes.erase(found);
  constexpr size_t kSmall = 1024;
  if (shard.nodes.bucket_count() > kSmall && shard.nodes.size() * 8 < shard.nodes.bucket_count())
    shard.nodes.rehash(0);
}

void NodeTable::displace(const Node& node) {
  Shard& shard = shard_of(node.key());
  NodeRef last;  // destroyed after the lock
  std::lock_guard lock(shard.mutex);
  const auto found = shard.nodes.find(node.key());
  if (found == shard.nodes.end()) return;
  last = found->second.lock();
  if (last.get() == &node) shard.nodes.erase(found);
}

void NodeTable::remember(const NodeRef& node) {
  Shard& shard = shard_of(node->key());
  std::lock_guard lock(shard.mutex);
  if (node->kernel_lookups_++ == 0) node->kernel_reference_ = node;
}

void NodeTable::forget(Node* node, uint64_t lookups) {
  NodeRef last;  // destroyed after the lock: its destructor takes it again
  Shard& shard = shard_of(node->key());
  std::lock_guard lock(shard.mutex);
  node->kernel_lookups_ -= std::min(lookups, node->kernel_lookups_);
  if (node->kernel_lookups_ == 0) last = std::move(node->kernel_reference_);
}

bool NodeTable::known_to_kernel(const Node& node) const {
  Shard& shard = shard_of(node.key());
  std::lock_guard lock(shard.mutex);
  return node.kernel_lookups_ > 0;
}

std::vector<const Node*> NodeTable::known_to_kernel(size_t part) const {
  Shard& shard = shards_[part];
  std::vector<NodeRef> held;  // let go without the lock, which the last reference of a node takes
  std::vector<const Node*> found;
  std::lock_guard lock(shard.mutex);
  for (const auto& [key, slot] : shard.nodes) {
    held.push_back(slot.lock());
    if (held.back() != nullptr && held.back()->kernel_lookups_ > 0)
      found.push_back(held.back().get());
  }
  return found;
}

std::vector<NodeRef> NodeTable::under(std::string_view prefix) const {
  std::vector<NodeRef> found;
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    // Kept until the lock is gone, all of them: the last reference of a node takes the lock again.
    for (const auto& [key, slot] : shard.nodes)
      if (key.starts_with(prefix))
        if (NodeRef node = slot.lock()) found.push_back(std::move(node));
  }
  return found;
}

void NodeTable::forget_all() {
  std::vector<NodeRef> last;
  for (Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    for (auto& [key, weak] : shard.nodes) {
      NodeRef node = weak.lock();
      if (node == nullptr) continue;
      node->kernel_lookups_ = 0;
      node->kernel_reference_.reset();
      last.push_back(std::move(node));
    }
  }
}

size_t NodeTable::size() const {
  size_t total = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard lock(shard.mutex);
    total += shard.nodes.size();
  }
  return total;
}

}  // namespace ptc
