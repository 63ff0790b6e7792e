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
  const size_t within =
      path.size() < 2 ? 0 : path[0].key.size() + 1 + enclosing_bytes(path.subspan(1));
  within_.push_back(static_cast<uint32_t>(std::min(within, whole.size())));
  look_for_inside(path);
}

void TorchNames::look_for_inside(std::span<const TorchStep> path) {
  if (path.empty()) return;
  const bool known = is_among(kEnclosing, path[0]) || is_among(kOptimizer, path[0]);
  at_the_top_ = at_the_top_ || (known && path.size() > 1);
  const auto add = [&](std::set<std::string, std::less<>>& keys) {
    if (keys.size() < 2) keys.insert(path[0].key);
  };
  if (!known && path.size() > 2 && path[0].kind == TorchStep::Kind::kKey &&
      is_among(kEnclosing, path[1]))
    add(above_model_);
  if (std::any_of(path.begin(), path.end(), [](const TorchStep& step) {
        return step.kind == TorchStep::Kind::kKey && step.key.find('.') != step.key.npos;
      }))
    add(with_dots_);
}

std::string TorchNames::inside() const {
  if (at_the_top_ || above_model_.size() != 1) return "";
  const std::string& key = *above_model_.begin();
  const bool all = with_dots_.empty() || (with_dots_.size() == 1 && with_dots_.contains(key));
  return all ? key : "";
}

std::vector<std::string_view> TorchNames::finish(const std::optional<TorchNaming>& as,
                                                 TorchNaming* naming, bool before_inside) && {
  TorchNaming found;
  found.of_model =
      std::find(of_optimizer_.begin(), of_optimizer_.end(), false) != of_optimizer_.end();
  if (!before_inside) found.inside = inside();
  if (as && found.inside != as->inside) found.inside.clear();
  for (size_t i = 0; i < names_.size() && !found.inside.empty(); ++i)
    if (const std::string_view whole = whole_[i]; whole.size() > found.inside.size() &&
                                                  whole.starts_with(found.inside) &&
                                                  whole[found.inside.size()] == '.')
      names_[i] = whole.substr(within_[i]);
  const auto all_begin_with = [&](std::string_view wrapper) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (!of_optimizer_[i] &&
          (names_[i].size() <= wrapper.size() || !names_[i].starts_with(wrapper)))
        return false;
    return true;
  };
  const auto leave_out = [&](std::string_view wrapper) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (!of_optimizer_[i]) names_[i].remove_prefix(wrapper.size());
    found.wrappers += wrapper;
  };
  if (as) {
    if (all_begin_with(as->wrappers)) leave_out(as->wrappers);
  } else {
    for (bool again = found.of_model; again;) {
      again = false;
      for (const std::string_view wrapper : kWrappers) {
        if (!all_begin_with(wrapper)) continue;
        leave_out(wrapper);
        again = true;
      }
    }
  }
  std::unordered_set<std::string_view> seen;
  const bool unique = std::all_of(names_.begin(), names_.end(), [&](std::string_view name) {
    return !name.empty() && seen.insert(name).second;
  });
  found.whole = !unique || (as && as->whole);
  if (found.whole) found.inside.clear();
  if (naming != nullptr) *naming = found;
  return found.whole ? std::move(whole_) : std::move(names_);
}

TorchNaming in_common(const TorchNaming& a, const TorchNaming& b) {
  TorchNaming both{
      a.whole || b.whole, {}, a.of_model || b.of_model, a.inside == b.inside ? a.inside : ""};
  if (!a.of_model || !b.of_model) {
    both.wrappers = a.of_model ? a.wrappers : b.wrappers;
    return both;
  }
  // No two wrappers begin alike.
  const auto end =
      std::mismatch(a.wrappers.begin(), a.wrappers.end(), b.wrappers.begin(), b.wrappers.end());
  both.wrappers.assign(a.wrappers.begin(), end.first);
  return both;
}

std::string without_numbers(std::string_view name) {
  std::string kind;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) kind += c;
    else if (kind.empty() || kind.back() != '#') kind += '#';
  }
  return kind;
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
