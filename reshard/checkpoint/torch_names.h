// What the tensors of a nested state are called in a checkpoint.
//
// A name is the path of torch_path.h, keys and indices joined by dots, with these exceptions:
//   * A dict that only encloses the model is left out: `model`, `module`, `state_dict`,
//     `model_state_dict`, `model_state`, as often as they follow each other at the beginning.
//   * So is one key above that, whatever it is: `app` of {"app": {"model": …, "optim": …}}, as
//     where a state is one object (DCP's AppState). Outside it there are no names like parameters',
//     with dots.
//   * `module.` and `_orig_mod.`, which wrappers of the model put before each of its names, are
//     left out where all of these have it.
// Optimizer state keeps its whole path, `optim.state.<parameter>.exp_avg`: it is the parameter's,
// because that one's name is in it. Where names without the above would be the same, all keep it.
// Files of one name that several ranks wrote leave out the same: the least of what each would.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/codec/torch_path.h"

namespace ptc {

/// What is left out of names.
struct TorchNaming {
  bool whole = false;       // nothing: they would be the same otherwise
  std::string wrappers;     // "module._orig_mod.": before each of the model's
  bool of_model = false;    // there are such names
  std::string inside = {};  // "app": the key above `model` and `optim`
  friend bool operator==(const TorchNaming&, const TorchNaming&) = default;
};
/// What both can leave out.
TorchNaming in_common(const TorchNaming& a, const TorchNaming& b);

/// Names all tensors of a file, or of a checkpoint, together. Memory: 45 bytes for each.
class TorchNames {
 public:
  /// `whole` is torch_name(path), and outlives what finish() returns.
  void add(std::string_view whole, std::span<const TorchStep> path);
  /// In the same order: the ends of those texts. `as`: leaves out that, or nothing where names
  /// would be the same; else as much as it can. `naming`: what it left out. `before_inside`: as
  /// when nobody looked for a key above `model`.
  std::vector<std::string_view> finish(const std::optional<TorchNaming>& as = {},
                                       TorchNaming* naming = nullptr,
                                       bool before_inside = false) &&;

 private:
  void look_for_inside(std::span<const TorchStep> path);
  /// The key that encloses all that is the model's and the optimizer's; empty: none does.
  std::string inside() const;

  std::vector<std::string_view> whole_, names_;
  std::vector<uint32_t> within_;  // bytes to leave out where the first step encloses
  std::vector<bool> of_optimizer_;
  // First steps: of a model below one, of any names with dots; two are as many as more.
  std::set<std::string, std::less<>> above_model_, with_dots_;
  bool at_the_top_ = false;  // the model is there, or the optimizer
};

/// "layers.#.w" of all layers' names.
std::string without_numbers(std::string_view name);

/// Whether there is the state of a random generator, which is its rank's own.
bool is_random_state(std::span<const TorchStep> path);

}  // namespace ptc
