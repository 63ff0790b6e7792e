// How Model::bind finds what binds each tensor. For model.cc and model_infer.cc only, but
// find_masters().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"
#include "reshard/ptc/parameter_names.h"

namespace ptc {

/// Which tensors are master weights: float32 under the very name that another file has in lower
/// precision. They are optimizer state of that parameter.
std::vector<bool> find_masters(const std::vector<TensorInfo>& tensors);

/// Fills in a model of which rules_, facts_ and tensors_ are set.
class Model::Binder {
 public:
  explicit Binder(Model& model) : model_(model) {}
  Result<> bind();

 private:
  void bind_to_rules();
  void bind_to_rule(uint32_t tensor, const RuleSet::Match& match);
  void bind_scales(uint32_t tensor);
  void bind_quantised();
  bool is_of_each_head(uint32_t tensor, const RuleSet::Match& match);
  bool fits_weight(uint32_t tensor, const RuleSet::Match& match,
                   std::optional<uint32_t> stored) const;
  void forget_other_orders();
  void keep_groups_whole();
  void bind_to_parameter(uint32_t tensor);
  void settle_one_element();
  std::string kind_of(uint32_t tensor) const;
  uint32_t cut_of_rule(const Rule& rule);
  bool tied_copy(const Rule& rule) const;
  void count_layers_and_experts();

  Model& model_;
  ParameterNames parameters_;
  std::vector<std::pair<uint32_t, RuleSet::Match>> quantised_;  // tensors that are to be bound
  std::vector<bool> masters_;                                   // by tensor
  std::vector<bool> one_element_;                               // by tensor
  struct Stretch {
    size_t begin = 0, length = 0;
  };
  std::vector<Stretch>
      parameter_at_;  // by tensor that follows one: the parameter's name in its own
  std::vector<uint32_t> cut_of_rule_;  // by rule: index in cuts
  std::vector<RuleCut> cuts_;
};

}  // namespace ptc
