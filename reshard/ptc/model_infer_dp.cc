#include "reshard/ptc/model_infer_dp.h"

#include <optional>
#include <string>
#include <unordered_set>

#include "reshard/ptc/model_bind.h"

namespace ptc {
namespace {

class DpCut {
 public:
  DpCut(const RuleSet& rules, OptimizerCut cut, uint32_t ranks,
        const std::vector<uint64_t>& dp_rows, const std::vector<bool>& known,
        std::vector<TensorInfo>& tensors)
      : rules_(rules),
        cut_(cut),
        ranks_(ranks),
        dp_rows_(dp_rows),
        known_(known),
        tensors_(tensors) {}

  void undo() {
    std::vector<uint32_t> unclear;
    for (uint32_t tensor : parameters()) {
      if (!follow(tensor, /*one_element_too=*/false)) unclear.push_back(tensor);
    }
    for (uint32_t tensor : unclear) follow(tensor, /*one_element_too=*/true);
  }

 private:
  /// Parameters get their shapes and names; the rest is returned.
  std::vector<uint32_t> parameters() {
    RuleFinder finder(rules_);
    const std::vector<bool> masters = find_masters(tensors_);
    std::vector<uint32_t> rest;
    for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
      const TensorInfo& info = tensors_[tensor];
      const auto match = masters[tensor] ? std::nullopt : finder.find(info.name);
      if (!match) {
        rest.push_back(tensor);
        continue;
      }
      if (!match->rule->buffer) add_rows(tensor);
      names_.add(info.name, match->prefix_length, tensor);
    }
    return rest;
  }

  void add_rows(uint32_t tensor) {
    Shape& shape = tensors_[tensor].shape;
    if (cut_ == OptimizerCut::kFsdp && !shape.empty() && !known_[tensor])
      shape[0] = dp_rows_[tensor];
  }

  /// Finds the parameter that the tensor follows and takes over its shape. False: it may be an end
  /// of a cut tensor, but also a scalar.
  bool follow(uint32_t tensor, bool one_element_too) {
    if (known_[tensor]) return true;
    const std::string& name = tensors_[tensor].name;
    const auto& scales = rules_.scales();
    if (scales && name.ends_with(scales->suffix) &&
        names_.exact(std::string_view(name).substr(0, name.size() - scales->suffix.size()))) {
      add_rows(tensor);
      return true;
    }
    bool clear = true;
    const bool found = names_.find(name, [&](const ParameterNames::Entry& entry, size_t offset) {
      const TensorInfo& parameter = tensors_[entry.parameter];
      if (!fits(tensor, parameter.shape)) return tensors_[tensor].shape == Shape{1};
      std::string kind = name;
      kind.erase(offset, parameter.name.size() - entry.dropped);
      if (tensors_[tensor].shape == Shape{1}) {
        clear = one_element_too;
        if (!clear || !kinds_.contains(kind)) return true;
      }
      kinds_.insert(std::move(kind));
      tensors_[tensor].shape = parameter.shape;
      return true;
    });
    if (!found && tensors_[tensor].shape != Shape{1}) add_rows(tensor);
    return clear;
  }

  /// Whether what was written may be a cut tensor of this shape.
  bool fits(uint32_t tensor, const Shape& shape) const {
    const Shape& written = tensors_[tensor].shape;
    if (shape.empty() || written.empty()) return false;
    if (cut_ == OptimizerCut::kZero1) {
      const auto elements = num_elements(shape);
      if (!elements || written.size() != 1) return false;
      return written[0] == elements.value() / ranks_ + (elements.value() % ranks_ != 0);
    }
    Shape whole = written;
    whole[0] = dp_rows_[tensor];
    return whole == shape;
  }

  const RuleSet& rules_;
  OptimizerCut cut_;
  uint32_t ranks_;
  const std::vector<uint64_t>& dp_rows_;
  const std::vector<bool>& known_;
  std::vector<TensorInfo>& tensors_;
  ParameterNames names_;
  std::unordered_set<std::string> kinds_;  // names without the parameter's, of what is cut
};

}  // namespace

void undo_dp_cut(const RuleSet& rules, OptimizerCut cut, uint32_t ranks,
                 const std::vector<uint64_t>& dp_rows, const std::vector<bool>& known,
                 std::vector<TensorInfo>& tensors) {
  if (cut != OptimizerCut::kReplicated) DpCut(rules, cut, ranks, dp_rows, known, tensors).undo();
}

}  // namespace ptc
