#include "reshard/ptc/parallel_config.h"

#include <numeric>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::array<std::string_view, 5> kDimNames = {"tp", "cp", "ep", "dp", "pp"};

Error bad_order(std::string_view text) {
  return invalid_argument(
      "order {} must name tp, cp, ep, dp and pp once each, fastest first, as in "
      "'tp-cp-ep-dp-pp'",
      quoted(text));
}

/// With etp, where the order is always Megatron's: which of the ranks of a stage has these; of
/// those that have the same, the first.
std::optional<uint32_t> place_with(const ParallelConfig& sizes, uint32_t tp, uint32_t etp,
                                   uint32_t ep) {
  const uint32_t of_experts = sizes.etp * sizes.ep;
  for (uint32_t place = etp + sizes.etp * ep; place < sizes.different_ranks(); place += of_experts)
    if (place % sizes.tp == tp) return place;
  return std::nullopt;
}

}  // namespace

uint32_t ParallelConfig::different_ranks() const {
  return etp == 0 ? tp * ep : std::lcm(tp, etp * ep);
}

Result<RankOrder> RankOrder::parse(std::string_view text) {
  RankOrder order;
  std::array<bool, 5> seen{};
  std::string_view rest = text;
  for (size_t i = 0; i < order.fastest_first_.size(); ++i) {
    const size_t dash = rest.find('-');
    if ((dash == std::string_view::npos) != (i + 1 == order.fastest_first_.size())) {
      return bad_order(text);
    }
    const std::string_view word = rest.substr(0, dash);
    rest = dash == std::string_view::npos ? std::string_view() : rest.substr(dash + 1);
    std::optional<size_t> dim;
    for (size_t d = 0; d < kDimNames.size(); ++d) {
      if (kDimNames[d] == word) dim = d;
    }
    if (!dim || seen[*dim]) return bad_order(text);
    seen[*dim] = true;
    order.fastest_first_[i] = static_cast<Dim>(*dim);
  }
  return order;
}

uint32_t& RankOrder::of(RankCoords& coords, Dim dim) {
  switch (dim) {
    case Dim::kTp:
      return coords.tp;
    case Dim::kCp:
      return coords.cp;
    case Dim::kEp:
      return coords.ep;
    case Dim::kDp:
      return coords.dp;
    case Dim::kPp:
      break;
  }
  return coords.pp;
}

uint32_t RankOrder::size_of(const ParallelConfig& sizes, Dim dim) {
  switch (dim) {
    case Dim::kTp:
      return sizes.tp;
    case Dim::kCp:
      return sizes.cp;
    case Dim::kEp:
      return sizes.ep;
    case Dim::kDp:
      return sizes.dp;
    case Dim::kPp:
      break;
  }
  return sizes.pp;
}

RankCoords RankOrder::coords(const ParallelConfig& sizes, uint64_t global_rank) const {
  RankCoords result;
  if (sizes.etp != 0) {
    const uint64_t of_stage = sizes.world_size() / sizes.pp;
    const auto place = static_cast<uint32_t>(global_rank % of_stage);
    const uint32_t replica = place / sizes.different_ranks();
    return {.tp = place % sizes.tp,
            .pp = static_cast<uint32_t>(global_rank / of_stage),
            .dp = replica / sizes.cp,
            .ep = place / sizes.etp % sizes.ep,
            .cp = replica % sizes.cp,
            .etp = place % sizes.etp};
  }
  for (Dim dim : fastest_first_) {
    const uint32_t size = size_of(sizes, dim);
    of(result, dim) = static_cast<uint32_t>(global_rank % size);
    global_rank /= size;
  }
  return result;
}

std::optional<uint64_t> RankOrder::rank_at(const ParallelConfig& sizes,
                                           const RankCoords& coords) const {
  if (coords.tp >= sizes.tp || coords.pp >= sizes.pp || coords.dp >= sizes.dp ||
      coords.ep >= sizes.ep || coords.cp >= sizes.cp)
    return std::nullopt;
  if (sizes.etp == 0) return global_rank(sizes, coords);
  const auto place =
      coords.etp < sizes.etp ? place_with(sizes, coords.tp, coords.etp, coords.ep) : std::nullopt;
  if (!place) return std::nullopt;
  const uint64_t of_stage = sizes.world_size() / sizes.pp;
  const uint64_t replica = coords.cp + uint64_t{sizes.cp} * coords.dp;
  const uint64_t in_stage = *place + replica * sizes.different_ranks();
  if (in_stage >= of_stage) return std::nullopt;
  return in_stage + of_stage * coords.pp;
}

uint64_t RankOrder::global_rank(const ParallelConfig& sizes, const RankCoords& coords) const {
  if (sizes.etp != 0) return rank_at(sizes, coords).value_or(0);
  RankCoords copy = coords;
  uint64_t rank = 0;
  uint64_t stride = 1;
  for (Dim dim : fastest_first_) {
    rank += of(copy, dim) * stride;
    stride *= size_of(sizes, dim);
  }
  return rank;
}

bool RankOrder::is_before(std::string_view first, std::string_view second) const {
  const auto place = [&](std::string_view name) {
    size_t at = 0;
    while (at < fastest_first_.size() && kDimNames[static_cast<size_t>(fastest_first_[at])] != name)
      ++at;
    return at;
  };
  return place(first) < place(second);
}

std::string RankOrder::to_string() const {
  std::string text;
  for (Dim dim : fastest_first_) {
    if (!text.empty()) text += '-';
    text += kDimNames[static_cast<size_t>(dim)];
  }
  return text;
}

}  // namespace ptc
