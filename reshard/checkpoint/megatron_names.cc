#include "reshard/checkpoint/megatron_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace ptc {
namespace {

constexpr std::string_view kRankDirectory = "mp_rank_", kIteration = "iter_";

/// "01" and "002": at least `digits` of them.
std::optional<uint32_t> number_of(std::string_view text, size_t digits) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool all = error == std::errc() && end == text.data() + text.size();
  if (!all || text.size() < digits || (text.size() > digits && text[0] == '0') ||
      number >= kMaxWorldSize)
    return std::nullopt;
  return number;
}

}  // namespace

bool is_megatron_iteration(std::string_view name) {
  return name == "release" ||
         (name.starts_with(kIteration) && name.size() > kIteration.size() &&
          name.find_first_not_of("0123456789", kIteration.size()) == name.npos);
}

std::string megatron_iteration_name(std::optional<uint64_t> iteration) {
  return iteration ? fmt::format("iter_{:07}", *iteration) : "release";
}

std::optional<uint64_t> megatron_iteration_of(std::string_view path) {
  const size_t at = path.rfind(kIteration);
  if (at == path.npos) return std::nullopt;
  const std::string_view digits = path.substr(at + kIteration.size());
  uint64_t iteration = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), iteration);
  return error == std::errc() ? std::optional(iteration) : std::nullopt;
}

std::string megatron_tracker_text(std::optional<uint64_t> iteration) {
  return iteration ? std::to_string(*iteration) : "release";
}

std::vector<uint32_t> megatron_rank_numbers(std::string_view name) {
  std::vector<uint32_t> numbers;
  if (!name.starts_with(kRankDirectory)) return numbers;
  name.remove_prefix(kRankDirectory.size());
  for (bool more = true; more;) {
    const size_t end = std::min(name.find('_'), name.size());
    const auto number = number_of(name.substr(0, end), numbers.empty() ? 2 : 3);
    if (!number || numbers.size() == 3) return {};
    numbers.push_back(*number);
    more = end < name.size();
    name.remove_prefix(more ? end + 1 : end);
  }
  return numbers;
}

std::optional<RankCoords> megatron_coords(const ParallelConfig& sizes,
                                          const std::vector<uint32_t>& numbers) {
  RankCoords coords;
  coords.tp = numbers[0];
  const size_t more = numbers.size() - 1, of_ep = sizes.ep > 1 ? 1 : 0;
  const bool says_pp = sizes.pp > 1 || more > of_ep;
  if (more != of_ep + (says_pp ? 1 : 0)) return std::nullopt;
  if (says_pp) coords.pp = numbers[1];
  if (of_ep > 0) coords.ep = numbers.back();
  const bool fits = coords.tp < sizes.tp && coords.pp < sizes.pp && coords.ep < sizes.ep;
  return fits ? std::optional(coords) : std::nullopt;
}

std::string megatron_rank_name(const ParallelConfig& sizes, const RankCoords& coords) {
  return fmt::format("{}{:02}{}{}", kRankDirectory, coords.tp,
                     sizes.pp > 1 ? fmt::format("_{:03}", coords.pp) : "",
                     sizes.ep > 1 ? fmt::format("_{:03}", coords.ep) : "");
}

}  // namespace ptc
