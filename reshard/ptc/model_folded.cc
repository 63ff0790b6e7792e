// Experts of which files have no axis of their own (TensorInfo::folded_into).

#include "reshard/ptc/model.h"
#include "reshard/ptc/slicing.h"

namespace ptc {

SubTensor TensorInfo::whole() const {
  SubTensor all = SubTensor::whole(shape);
  if (folded_into) fold(all, *folded_into);
  return all;
}

Result<Model> Model::bind_as_in_files(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                                      std::vector<TensorInfo> tensors) {
  PTC_TRY(Model model, bind(std::move(rules), std::move(facts), std::move(tensors)));
  for (uint32_t tensor = 0; tensor < model.tensors_.size(); ++tensor) model.unfold(tensor, 1);
  model.find_kinds();
  return model;
}

/// Gives an array in which files have experts in an axis of others one of their own, if that has
/// room for as many. It has the shape that one of `ep` ranks has. Of others check_fold() tells.
void Model::unfold(uint32_t tensor, uint32_t ep) {
  const Bound& bound = bound_[tensor];
  TensorInfo& info = tensors_[tensor];
  const auto experts = facts_.numbers.find("experts");
  if (!bound.rule || !bound.rule->folded_into || info.folded_into || bound.one_element ||
      bound.scales || bound.part_of != nullptr || experts == facts_.numbers.end() ||
      experts->second == 0 || experts->second % ep != 0 || !are_the_experts(experts->second))
    return;
  const uint32_t into = *bound.rule->folded_into;
  const uint64_t each = experts->second / ep;
  if (into >= info.shape.size() || info.shape.size() == kMaxAxes || info.shape[into] % each != 0)
    return;
  Shape shape{each};
  for (size_t axis = 0; axis < info.shape.size(); ++axis)
    shape.push_back(axis == into ? info.shape[axis] / each : info.shape[axis]);
  info.shape = shape;
  info.folded_into = into;
}

/// Where the rule says that files have experts in an axis of others, and that is not found in the
/// tensor, or the other way round, the rule's axes are not those of the tensor.
Result<> Model::check_fold(uint32_t tensor, const LayoutSpec& spec) const {
  const TensorInfo& info = tensors_[tensor];
  const Rule& rule = *bound_[tensor].rule;
  const bool is_cut = tp_ranks(tensor, spec.sizes) > 1 || spec.sizes.ep > 1;
  if (!is_cut || (!info.folded_into && !rule.folded_into)) return ok();
  const auto experts = facts_.numbers.find("experts");
  if (experts != facts_.numbers.end() && !are_the_experts(experts->second))
    return invalid_argument(
        "config.json says {} experts, and a router has {} rows: commit it with the right "
        "config.json",
        experts->second, experts_along_);
  if (info.folded_into && experts != facts_.numbers.end() && experts->second != info.shape[0])
    return invalid_argument(
        "it was committed as {} experts, and the rules say {}: commit it again with the right "
        "config.json",
        info.shape[0], experts->second);
  if (info.folded_into == rule.folded_into) return ok();
  if (!rule.folded_into)
    return invalid_argument(
        "files have its {} experts in axis {}, and its rule does not say so (\"folded_into\")",
        info.shape[0], *info.folded_into);
  if (experts == facts_.numbers.end())
    return invalid_argument(
        "nobody says how many experts are in axis {} of {}: put the model's config.json beside its "
        "files in the checkpoint, and commit it again",
        *rule.folded_into, info.shape.to_string());
  PTC_TRY(slice_experts(experts->second, 0, spec.sizes.ep));
  return invalid_argument(
      "axis {} of {} does not hold {} experts of one size, or its ranks have said which boxes of "
      "it are theirs: commit whole arrays of each rank, and a config.json that fits them",
      *rule.folded_into, info.shape.to_string(), experts->second);
}

}  // namespace ptc
