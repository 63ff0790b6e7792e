#include "reshard/ptc/model_infer_dp.h"

#include <optional>
#include <string>
#include <unordered_set>

#include "reshard/ptc/model_bind.h"

namespace ptc {
namespace {

class DpCut {
 public:
  DpCut(const RuleSet& rules, OptimizerCut cut, const DpRows& experts, const DpRows& dense,
        const std::vector<bool>& known, std::vector<TensorInfo>& tensors)
      : rules_(rules),
        cut_(cut),
        experts_(experts),
        dense_(dense),
        known_(known),
        tensors_(tensors),
        of_experts_(tensors.size()) {}

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
      of_experts_[tensor] = match->name.expert || match->rule->expert_axis;
      if (!match->rule->buffer) add_rows(tensor, tensor);
      names_.add(info.name, match->prefix_length, tensor);
    }
    return rest;
  }

  /// As the other tensor is cut, an expert's or not.
  const DpRows& cut_as(uint32_t other) const { return of_experts_[other] ? experts_ : dense_; }

  void add_rows(uint32_t tensor, uint32_t other) {
    Shape& shape = tensors_[tensor].shape;
    if (cut_ == OptimizerCut::kFsdp && !shape.empty() && !known_[tensor])
      shape[0] = cut_as(other).rows[tensor];
  }

  /// Finds the parameter that the tensor follows and takes over its shape. False: it may be an end
  /// of a cut tensor, but also a scalar.
  bool follow(uint32_t tensor, bool one_element_too) {
    if (known_[tensor]) return true;
    const std::string& name = tensors_[tensor].name;
    const auto& scales = rules_.scales();
    if (scales && name.ends_with(scales->suffix)) {
      const auto weight =
          names_.exact(std::string_view(name).substr(0, name.size() - scales->suffix.size()));
      if (weight) {
        add_rows(tensor, *weight);
        return true;
      }
    }
    bool clear = true;
    const bool found = names_.find(name, [&](const ParameterNames::Entry& entry, size_t offset) {
      const TensorInfo& parameter = tensors_[entry.parameter];
      if (!fits(tensor, entry.parameter)) return tensors_[tensor].shape == Shape{1};
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
    if (!found && tensors_[tensor].shape != Shape{1}) add_rows(tensor, tensor);
    return clear;
  }

  /// Whether what was written may be a cut tensor of the parameter's shape.
  bool fits(uint32_t tensor, uint32_t parameter) const {
    const Shape& shape = tensors_[parameter].shape;
    const DpRows& by = cut_as(parameter);
    const Shape& written = tensors_[tensor].shape;
    if (shape.empty() || written.empty()) return false;
    if (cut_ == OptimizerCut::kZero1) {
      const auto elements = num_elements(shape);
      if (!elements || written.size() != 1) return false;
      return written[0] == elements.value() / by.ranks + (elements.value() % by.ranks != 0);
    }
    Shape whole = written;
    whole[0] = by.rows[tensor];
    return whole == shape;
  }

  const RuleSet& rules_;
  OptimizerCut cut_;
  const DpRows& experts_;
  const DpRows& dense_;
  const std::vector<bool>& known_;
  std::vector<TensorInfo>& tensors_;
  std::vector<bool> of_experts_;  // by tensor, of parameters
  ParameterNames names_;
  std::unordered_set<std::string> kinds_;  // names without the parameter's, of what is cut
};

}  // namespace

void undo_dp_cut(const RuleSet& rules, OptimizerCut cut, const DpRows& experts, const DpRows& dense,
                 const std::vector<bool>& known, std::vector<TensorInfo>& tensors) {
  if (cut != OptimizerCut::kReplicated) DpCut(rules, cut, experts, dense, known, tensors).undo();
}

}  // namespace ptc
