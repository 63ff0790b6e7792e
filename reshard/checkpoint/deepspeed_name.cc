#include "reshard/checkpoint/deepspeed_name.h"

#include "reshard/checkpoint/name_parts.h"

namespace ptc {
namespace {

using DeepSpeedKind = DeepSpeedName::Kind;

/// `zero/<parameter>/<state>.pt` at the end of a path.
std::optional<DeepSpeedName> universal_name(std::string_view path) {
  constexpr std::string_view kZero = "zero", kEnding = ".pt";
  if (!path.ends_with(kEnding)) return std::nullopt;
  const size_t state = path.rfind('/');
  if (state == path.npos || state == 0) return std::nullopt;
  const size_t parameter = path.rfind('/', state - 1);
  if (parameter == path.npos) return std::nullopt;
  const std::string_view above = path.substr(0, parameter);
  if (above != kZero && !above.ends_with("/zero")) return std::nullopt;
  DeepSpeedName name{DeepSpeedKind::kUniversal, path.substr(0, above.size() - kZero.size())};
  name.parameter = path.substr(parameter + 1, state - parameter - 1);
  name.state = path.substr(state + 1, path.size() - state - 1 - kEnding.size());
  if (name.parameter.empty() || name.state.empty()) return std::nullopt;
  return name;
}

}  // namespace

std::optional<DeepSpeedName> deepspeed_name(std::string_view path) {
  constexpr std::string_view kModelEnding = "_model_states.pt", kZeroEnding = "_optim_states.pt";
  const size_t slash = path.rfind('/');
  const size_t begin = slash == path.npos ? 0 : slash + 1;
  DeepSpeedName name{DeepSpeedKind::kModel, path.substr(0, begin)};
  std::string_view rest = path.substr(begin);
  const bool of_model = rest.ends_with(kModelEnding);
  if (!of_model && !rest.ends_with(kZeroEnding)) return universal_name(path);
  rest.remove_suffix(of_model ? kModelEnding.size() : kZeroEnding.size());
  if (const size_t rank = rest.find("mp_rank_"); rank != rest.npos && rank > 0) {
    const std::string_view before = rest.substr(0, rank);
    if (before.find("expert_") != before.npos || before.starts_with("expp_rank_")) {
      name.kind = DeepSpeedKind::kExpert;
      return name;
    }
  }
  bool of_dp = false;
  if (!take_text(rest, "bf16_")) (void)take_text(rest, "fp16_");
  if (take_text(rest, "zero_pp_rank_")) {
    const auto dp = take_digits(rest);
    if (!dp || !take_text(rest, "_")) return std::nullopt;
    name.dp = *dp;
    of_dp = true;
  }
  if (!take_text(rest, "mp_rank_")) return std::nullopt;
  const auto mp = take_digits(rest);
  if (!mp || !rest.empty() || (!of_dp && !of_model)) return std::nullopt;
  name.mp = *mp;
  name.kind = !of_dp     ? DeepSpeedKind::kModel
              : of_model ? DeepSpeedKind::kZeroModel
                         : DeepSpeedKind::kZero;
  return name;
}

}  // namespace ptc
