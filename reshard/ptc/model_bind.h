// How Model::bind finds what binds each tensor. For model.cc and model_infer.cc only, but
// find_masters().
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "reshard/ptc/attention_heads.h"
#include "reshard/ptc/model.h"
#include "reshard/ptc/parameter_names.h"

namespace ptc {

/// Which tensors are master weights: float32 under the very name that another file has in lower
/// precision. They are optimizer state of that parameter.
std::vector<bool> find_masters(const std::vector<TensorInfo>& tensors);

/// Fills in a model of which rules_, facts_ and tensors_ are set.
class Model::Binder {
 public:
  /// `shapes`: what the tensors' are.
  Binder(Model& model, CutShapes shapes) : model_(model), shapes_(std::move(shapes)) {}
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
  uint32_t cut_of_rule(const Rule& rule, uint32_t heads = kNone);
  uint32_t cut_of(uint32_t tensor, const Rule& rule, const NameMatch& name);
  std::string attention_of(uint32_t tensor, const NameMatch& name) const;
  void count_heads();
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
      parameter_at_;                  // by tensor that follows one: the parameter's name in its own
  std::map<const Rule*, bool> tied_;  // of rules with tied_head that hold: tied_copy()
  const CutShapes shapes_;
  std::vector<uint32_t> cut_of_rule_;  // by rule: index in cuts
  enum class CutsBy : uint8_t { kElse, kHeads, kKeyValueHeads };
  std::vector<CutsBy> cuts_by_;     // by rule
  bool heads_are_counted_ = false;  // some rules say what of a layer's attention weights are
  uint32_t unknown_heads_[2] = {kNone, kNone};  // in heads_: of queries, and of keys and values
  std::vector<AttentionFacts::Found> heads_;    // different ones
  std::unordered_map<std::string, uint32_t> heads_of_;  // by attention_of(): index in heads_
  std::map<std::pair<size_t, uint32_t>, uint32_t> cut_of_heads_;  // by rule and index in heads_
  std::vector<RuleCut> cuts_;
};

}  // namespace ptc
