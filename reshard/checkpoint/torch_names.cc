#include "reshard/checkpoint/torch_names.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <unordered_set>
#include <utility>

namespace ptc {
namespace {

constexpr std::string_view kEnclosing[] = {"model", "module", "state_dict", "model_state_dict",
                                           "model_state"};
constexpr std::string_view kOptimizer[] = {
    "optim",          "optimizer", "optimizers", "optim_state_dict", "optimizer_state_dict",
    "optimizer_state"};
constexpr std::string_view kWrappers[] = {"module.", "_orig_mod."};

bool is_among(std::span<const std::string_view> list, const TorchStep& step) {
  return step.kind == TorchStep::Kind::kKey &&
         std::find(list.begin(), list.end(), step.key) != list.end();
}

/// How many bytes of the name are of steps that only enclose the model. The last step is a
/// parameter's own.
size_t enclosing_bytes(std::span<const TorchStep> path) {
  size_t steps = 0, bytes = 0;
  for (; steps + 1 < path.size() && is_among(kEnclosing, path[steps]); ++steps)
    bytes += path[steps].key.size() + 1;
  // {"state_dict": {"optimizer": …}}
  return steps < path.size() && is_among(kOptimizer, path[steps]) ? 0 : bytes;
}

}  // namespace

void TorchNames::add(std::string_view whole, std::span<const TorchStep> path) {
  whole_.push_back(whole);
  names_.push_back(whole.substr(std::min(enclosing_bytes(path), whole.size())));
  of_optimizer_.push_back(std::any_of(
      path.begin(), path.end(), [](const TorchStep& step) { return is_among(kOptimizer, step); }));
}

std::vector<std::string_view> TorchNames::finish() && {
  bool again = std::find(of_optimizer_.begin(), of_optimizer_.end(), false) != of_optimizer_.end();
  while (again) {
    again = false;
    for (const std::string_view wrapper : kWrappers) {
      bool all = true;
      for (size_t i = 0; i < names_.size() && all; ++i)
        all = of_optimizer_[i] ||
              (names_[i].size() > wrapper.size() && names_[i].starts_with(wrapper));
      if (!all) continue;
      for (size_t i = 0; i < names_.size(); ++i)
        if (!of_optimizer_[i]) names_[i].remove_prefix(wrapper.size());
      again = true;
    }
  }
  std::unordered_set<std::string_view> seen;
  const bool unique = std::all_of(names_.begin(), names_.end(), [&](std::string_view name) {
    return !name.empty() && seen.insert(name).second;
  });
  return unique ? std::move(names_) : std::move(whole_);
}

bool is_random_state(std::span<const TorchStep> path) {
  return std::any_of(path.begin(), path.end(), [](const TorchStep& step) {
    std::string key = step.key;
    std::transform(key.begin(), key.end(), key.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return step.kind == TorchStep::Kind::kKey && key.find("rng") != std::string::npos;
  });
}

}  // namespace ptc
