// What is said of a model, by config.json or rules.json, and what its tensors are.
#pragma once

#include <string>
#include <vector>

#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/error.h"

namespace ptc {

/// Where the facts say otherwise than the tensors: of layers more than have tensors, of experts
/// another number, of a vocabulary more rows. A sentence each. (More layers than said predict
/// further tokens, more rows are padding, adapters may be of a few layers, and stacked experts are
/// as many as they are.) Cost: all names are looked at.
std::vector<std::string> contradictions(const Model& model);

/// What is contradicted, and matters to some layouts. Immutable.
class DoubtfulFacts {
 public:
  /// Cost: all names are looked at.
  explicit DoubtfulFacts(const Model& model);
  /// Whether it matters under `spec`: its stages, or its shares of experts, would be of what is not
  /// there. So where it is not known whether the last stage has the embedding too, as its head.
  /// kInvalidArgument says what to do. What was decided or written is read all the same, as it
  /// always was.
  Result<> check(const LayoutSpec& spec) const;

 private:
  std::string layers_, experts_, embedding_;  // a sentence of each that is in doubt
  std::string mend_layers_, mend_experts_, mend_embedding_;
};
Result<> check_facts(const Model& model, const LayoutSpec& spec);

/// Whether both cut a model into the same stages and shares of experts, by the same rules:
/// check_facts() says the same of both.
bool same_stages_and_experts(const LayoutSpec& a, const LayoutSpec& b);

/// What makes a layout of a committed checkpoint go by other rules: a rules.json with such a
/// member, or, where the rules are the job's own, the member alone.
std::string rules_with(const RuleSet& rules, std::string_view member);
/// … and this. A rules.json alone is for checkpoints that are committed later.
inline constexpr std::string_view kThenTheLayout =
    "then the layout with \"rules\": \"rules.json\" (ptc layout JOB set --rules rules.json)";

}  // namespace ptc
