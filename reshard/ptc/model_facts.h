// What is said of a model, by config.json or rules.json, and what its tensors are.
#pragma once

#include <string>
#include <vector>

#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/error.h"

namespace ptc {

/// What makes a layout of a committed checkpoint go by other rules: a rules.json with such a
/// member, or, where the rules are the job's own, the member alone.
std::string rules_with(const RuleSet& rules, std::string_view member);
/// … and this. A rules.json alone is for checkpoints that are committed later.
inline constexpr std::string_view kThenTheLayout =
    "then the layout with \"rules\": \"rules.json\" (ptc layout JOB set --rules rules.json)";

}  // namespace ptc
