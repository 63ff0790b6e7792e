#include "reshard/intake/torch_dist.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "reshard/intake/torch_dist_buckets.h"
#include "reshard/ptc/rule_set.h"

namespace ptc {
namespace {

constexpr std::string_view kLayersOf = "layers.";
constexpr uint64_t kMostLayers = 16384;
constexpr uint64_t kPaddedTo = 128;  // Megatron's default for each tensor rank

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Behind the first "layers." that no number follows.
std::optional<size_t> place_of_layer(std::string_view name) {
  for (size_t at = name.find(kLayersOf); at != name.npos; at = name.find(kLayersOf, at + 1)) {
    const size_t behind = at + kLayersOf.size();
    if (at > 0 && name[at - 1] != '.') continue;
    if (behind < name.size() && !is_digit(name[behind])) return behind;
  }
  return std::nullopt;
}

class Finder {
 public:
  Finder(const RuleSet& rules, std::span<const TorchDistTensor> tensors, const MegatronFile* said)
      : rules_(rules), tensors_(tensors), said_(said), parts_(tensors.size()) {}

  std::vector<TorchDistPart> run() {
    // What a data-parallel group has of all its parameters in one (`dp_reshardable`) is for the
    // writer's ranks, padding and all.
    for (const TorchDistTensor& tensor : tensors_)
      if (is_optimizer_bucket(tensor.name)) said_ = nullptr;
    RuleFinder finder(rules_);
    for (size_t t = 0; t < tensors_.size(); ++t) find_parameter(finder, t);
    for (size_t t = 0; t < tensors_.size(); ++t) find_state(t);
    if (!stacks_are_sure())
      for (TorchDistPart& part : parts_) part.layer_at.reset();
    return std::move(parts_);
  }

 private:
  void find_parameter(RuleFinder& finder, size_t t) {
    const TorchDistTensor& tensor = tensors_[t];
    TorchDistPart part{place_of_layer(tensor.name), {}};
    if (part.layer_at) {
      const auto match = finder.find(part.name_of(tensor.name, 0));
      const bool bytes = dtype_bits(tensor.dtype) % 8 == 0;
      if (!match || !match->name.layer || tensor.shape->empty() || !bytes) return;
    } else {
      const auto match = finder.find(tensor.name);
      if (!match || !match->rule->cut || !match->rule->cut->vocab_multiple || tensor.shape->empty())
        return;
      part.rows = rows_of_one_rank((*tensor.shape)[0]);
      if (!part.rows) return;
    }
    parts_[t] = part;
    parameters_.emplace(tensor.name, t);
  }

  /// It ends with a parameter's name.
  void find_state(size_t t) {
    const TorchDistTensor& tensor = tensors_[t];
    if (parameters_.contains(tensor.name)) return;
    for (size_t dot = tensor.name.find('.'); dot != tensor.name.npos;
         dot = tensor.name.find('.', dot + 1)) {
      const auto found = parameters_.find(tensor.name.substr(dot + 1));
      if (found == parameters_.end()) continue;
      if (*tensors_[found->second].shape != *tensor.shape || dtype_bits(tensor.dtype) % 8 != 0)
        return;
      parts_[t] = parts_[found->second];
      if (parts_[t].layer_at) *parts_[t].layer_at += dot + 1;
      return;
    }
  }

  /// nullopt: as many as there are, or it is not known how they are padded.
  std::optional<uint64_t> rows_of_one_rank(uint64_t rows) const {
    if (said_ == nullptr) return std::nullopt;
    const int64_t vocabulary = said_->argument("vocab_size").value_or(0);
    const int64_t ranks = said_->size("tensor_model_parallel_size");
    const int64_t said = said_->argument("make_vocab_size_divisible_by").value_or(kPaddedTo);
    constexpr int64_t kMost = int64_t{1} << 40;
    if (vocabulary <= 0 || ranks <= 1 || said <= 0 || vocabulary > kMost || ranks > kMost / said)
      return std::nullopt;
    const auto padded = [&](int64_t multiple) {
      return static_cast<uint64_t>((vocabulary + multiple - 1) / multiple * multiple);
    };
    if (padded(said * ranks) != rows || padded(said) == rows) return std::nullopt;
    return padded(said);
  }

  bool stacks_are_sure() const {
    std::optional<uint64_t> layers;
    std::unordered_set<std::string> names;
    for (const TorchDistTensor& tensor : tensors_) names.emplace(tensor.name);
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (!parts_[t].layer_at) continue;
      const Shape& shape = *tensors_[t].shape;
      const uint64_t count = shape[0];
      if (layers.value_or(count) != count || count > kMostLayers) return false;
      // Without an element it may say any number of layers, and no file need have one.
      for (const uint64_t extent : shape)
        if (extent == 0) return false;
      layers = count;
      for (const uint64_t end : {uint64_t{0}, count - 1})
        if (names.contains(parts_[t].name_of(tensors_[t].name, end))) return false;
    }
    return true;
  }

  const RuleSet& rules_;
  const std::span<const TorchDistTensor> tensors_;
  const MegatronFile* said_;
  std::vector<TorchDistPart> parts_;
  std::unordered_map<std::string_view, size_t> parameters_;  // with a part that is said
};

}  // namespace

std::string TorchDistPart::name_of(std::string_view name, uint64_t layer) const {
  return fmt::format("{}{}.{}", name.substr(0, *layer_at), layer, name.substr(*layer_at));
}

std::vector<TorchDistPart> torch_dist_parts(std::span<const TorchDistTensor> tensors,
                                            const MegatronFile* said) {
  const auto rules = RuleSet::builtin("megatron");
  if (rules.has_error()) return std::vector<TorchDistPart>(tensors.size());
  return Finder(*rules.value(), tensors, said).run();
}

}  // namespace ptc
