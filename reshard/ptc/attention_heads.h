// How many heads the attention of one layer has: what config.json says, held against the tensors.
//
// Of H query heads and K key-value heads, with d elements in a head of queries and keys and e in
// one of values, weights have
//
//     queries [H·d, …], with a gate of the output [2·H·d, …]     keys [K·d, …]     values [K·e, …]
//     output  […, H·e]                                           fused [(H + 2·K)·d, …]
//
// So K = H·values/output. Config.json has one K, or two; which layers have which of them, and
// whether it is null, each model type says otherwise. The tensors say it in one way.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reshard/ptc/rule_set.h"

namespace ptc {

/// Of one layer's attention: how long its weights are on the axis that runs along the heads, and
/// the tensors' names, for messages. 0: it is not there, or not known.
struct AttentionExtents {
  uint64_t queries = 0, keys = 0, values = 0, output = 0, fused = 0;
  std::string_view queries_name, keys_name, values_name, output_name;
  /// Among how many tp ranks all of them are cut already; 1: they are whole.
  uint32_t ranks = 1;
};

struct AttentionHeads {
  uint64_t heads = 0, kv_heads = 0;
  friend auto operator<=>(const AttentionHeads&, const AttentionHeads&) = default;
};

/// The numbers of heads that a model's facts give. Threads: one.
class AttentionFacts {
 public:
  explicit AttentionFacts(const RuleSet::Facts& facts);

  struct Found {
    std::optional<AttentionHeads> heads;  // nullopt: the facts alone say it; kv_heads 0: they do
    /// Why no cut of this layer by heads is right, for people; empty: nothing is wrong.
    std::string problem;
  };
  Found heads_of(const AttentionExtents& extents) const;

  /// Why nothing can be said of a layer of which no weights are known, as beside adapters that were
  /// saved alone: empty where all layers have as many query heads, or key-value heads, too.
  std::string unknown(bool key_values) const;

 private:
  std::vector<uint64_t> query_heads(const AttentionExtents& extents) const;
  bool fits(uint64_t heads, const AttentionExtents& extents) const;
  bool is_head_size(uint64_t elements) const;
  std::optional<uint64_t> kv_heads(uint64_t heads, const AttentionExtents& extents) const;
  Found one_on_each_rank(uint64_t heads, const AttentionExtents& extents) const;
  Found contradicted(uint64_t kv_heads, const AttentionExtents& extents) const;

  uint64_t heads_ = 0, kv_heads_ = 0;     // 0: not said
  std::vector<uint64_t> other_heads_;     // of some layers, which have others
  std::vector<uint64_t> other_kv_heads_;  // of some layers, which have others
  std::vector<uint64_t> head_sizes_;      // empty: not said
};

}  // namespace ptc
