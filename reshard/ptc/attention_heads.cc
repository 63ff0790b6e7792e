#include "reshard/ptc/attention_heads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace ptc {
namespace {

bool contains(const std::vector<uint64_t>& all, uint64_t one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

}  // namespace

AttentionFacts::AttentionFacts(const RuleSet::Facts& facts) {
  const auto number = [&](std::string_view name) -> uint64_t {
    const auto found = facts.numbers.find(name);
    return found == facts.numbers.end() ? 0 : std::min<uint64_t>(found->second, UINT32_MAX);
  };
  heads_ = number("heads");
  kv_heads_ = number("kv_heads");
  if (const uint64_t other = number("layer_heads"); other > 0 && other != heads_)
    other_heads_.push_back(other);
  if (const uint64_t other = number("layer_kv_heads"); other > 0 && other != kv_heads_)
    other_kv_heads_.push_back(other);
  for (const char* name : {"head_dim", "value_head_dim", "layer_head_dim", "layer_value_head_dim"})
    if (const uint64_t size = number(name); size > 0 && !contains(head_sizes_, size))
      head_sizes_.push_back(size);
}

bool AttentionFacts::is_head_size(uint64_t elements) const {
  return contains(head_sizes_, elements);
}

/// Whether the weights may be of so many query heads, on this rank.
bool AttentionFacts::fits(uint64_t heads, const AttentionExtents& extents) const {
  if (extents.queries == 0 && extents.output == 0) return true;
  const auto are = [&](uint64_t extent, uint64_t count) {
    if (extent == 0 || extent % count != 0) return false;
    return head_sizes_.empty() || is_head_size(extent / count);
  };
  return are(extents.queries, heads) || are(extents.output, heads) ||
         (extents.output == 0 && are(extents.queries, 2 * heads));
}

/// … that the layer may have on each rank, of those that are known.
std::vector<uint64_t> AttentionFacts::query_heads(const AttentionExtents& extents) const {
  std::vector<uint64_t> candidates{heads_};
  candidates.insert(candidates.end(), other_heads_.begin(), other_heads_.end());
  std::vector<uint64_t> fitting;
  for (const uint64_t heads : candidates)
    if (heads % extents.ranks == 0 && fits(heads / extents.ranks, extents))
      fitting.push_back(heads / extents.ranks);
  return fitting;
}

std::string AttentionFacts::unknown(bool key_values) const {
  const std::vector<uint64_t>& others = key_values ? other_kv_heads_ : other_heads_;
  if (others.empty()) return {};
  return fmt::format("some layers have {} {} heads, and nothing says which do",
                     fmt::join(others, " or "), key_values ? "key-value" : "attention");
}

/// How many the layer has by its shapes, on each rank; nullopt: they do not say it.
std::optional<uint64_t> AttentionFacts::kv_heads(uint64_t heads,
                                                 const AttentionExtents& extents) const {
  const auto ratio = [](uint64_t count, uint64_t of) -> std::optional<uint64_t> {
    if (of == 0 || count == 0 || count % of != 0) return std::nullopt;
    return count / of;
  };
  if (extents.values > 0 && extents.output > 0)
    return ratio(heads * extents.values, extents.output);
  if (extents.keys > 0 && extents.queries > 0) {
    const auto plain = ratio(heads * extents.keys, extents.queries);
    // Nothing says whether half of the queries' rows are a gate.
    const bool gated = extents.output > 0 ? extents.queries == 2 * extents.output
                                          : kv_heads_ > 0 && plain != kv_heads_ / extents.ranks &&
                                                ratio(2 * heads * extents.keys, extents.queries) ==
                                                    kv_heads_ / extents.ranks;
    return gated ? ratio(2 * heads * extents.keys, extents.queries) : plain;
  }
  if (extents.fused > 0 && extents.output > 0) {
    const auto size = ratio(extents.output, heads);
    const auto all = size ? ratio(extents.fused, *size) : std::nullopt;
    if (all && *all > heads) return ratio(*all - heads, 2);
  }
  return std::nullopt;
}

AttentionFacts::Found AttentionFacts::contradicted(uint64_t kv_heads,
                                                   const AttentionExtents& extents) const {
  const bool keys = extents.keys > 0;
  const std::string_view name = keys ? extents.keys_name : extents.values_name;
  const std::string of = name.empty() ? "its shape" : fmt::format("the shape of {}", name);
  return {std::nullopt, fmt::format("config.json says {} key-value heads, and by {} there are {}",
                                    kv_heads_, of, kv_heads)};
}

/// With as many tp ranks as key-value heads or more, neighbours hold the same head: a rank's shapes
/// do not tell how many do.
AttentionFacts::Found AttentionFacts::one_on_each_rank(uint64_t heads,
                                                       const AttentionExtents& extents) const {
  std::vector<uint64_t> possible;
  if (kv_heads_ > 0 && extents.ranks % kv_heads_ == 0) possible.push_back(kv_heads_);
  for (const uint64_t other : other_kv_heads_)
    if (extents.ranks % other == 0 && !contains(possible, other)) possible.push_back(other);
  if (kv_heads_ == 0 && !other_kv_heads_.empty()) return {std::nullopt, unknown(true)};
  if (possible.size() == 1) return {AttentionHeads{heads * extents.ranks, possible.front()}, ""};
  if (possible.empty() && kv_heads_ == 0) return {};
  if (possible.empty()) return contradicted(extents.ranks, extents);
  return {
      std::nullopt,
      fmt::format("with tp = {} each rank has one key-value head, and nothing says which of its "
                  "layers have {} of them",
                  extents.ranks, fmt::join(possible, " and which "))};
}

AttentionFacts::Found AttentionFacts::heads_of(const AttentionExtents& extents) const {
  if (heads_ == 0) return {};
  const std::vector<uint64_t> fitting = query_heads(extents);
  if (extents.keys == 0 && extents.values == 0 && extents.fused == 0) {
    // Latent and linear attention have heads of their own kinds.
    if (other_heads_.empty() || head_sizes_.empty() || fitting.size() != 1) return {};
    return {AttentionHeads{fitting.front() * extents.ranks, 0}, ""};
  }
  const bool queries = extents.queries > 0;
  const std::string_view name = queries ? extents.queries_name : extents.output_name;
  if (fitting.empty()) {
    if (heads_ % extents.ranks != 0) return {};  // said where it is cut
    return {
        std::nullopt,
        fmt::format(
            "config.json says {} attention heads{}, and {} has {} {}{}", heads_,
            head_sizes_.empty() ? ""
                                : fmt::format(" of {} elements", fmt::join(head_sizes_, " or ")),
            name, queries ? extents.queries : extents.output, queries ? "rows" : "columns",
            extents.ranks > 1 ? fmt::format(" on each of {} tp ranks", extents.ranks) : "")};
  }
  if (fitting.size() > 1)
    return {std::nullopt,
            fmt::format("some layers have {} attention heads and others {}, and {} may be of "
                        "either: config.json does not say how many elements a head has "
                        "(\"head_dim\")",
                        heads_, fmt::join(other_heads_, " or "),
                        name.empty() ? "its attention" : name)};
  const uint64_t heads = fitting.front();
  const auto local = kv_heads(heads, extents);
  if (!local) {
    if (other_kv_heads_.empty()) return {AttentionHeads{heads * extents.ranks, kv_heads_}, ""};
    return {std::nullopt, unknown(true)};
  }
  if (extents.ranks > 1 && *local == 1) return one_on_each_rank(heads, extents);
  const uint64_t found = *local * extents.ranks;
  const auto of_known_size = [&](uint64_t extent) {
    return extent > 0 && extent % *local == 0 && is_head_size(extent / *local);
  };
  if (kv_heads_ > 0 && found != kv_heads_ && !contains(other_kv_heads_, found) &&
      !of_known_size(extents.keys) && !of_known_size(extents.values))
    return contradicted(found, extents);
  return {AttentionHeads{heads * extents.ranks, found}, ""};
}

}  // namespace ptc
