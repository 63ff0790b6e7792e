// Rules for names that no rule set knows: guesses, marked as such, beside the nearest set.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cstddef>
#include <optional>
#include <vector>

#include "reshard/ptc/guessed_cuts.h"

namespace ptc {

struct SuggestedRules {
  boost::json::object text;
  size_t guesses = 0;  // descriptions in it that begin with "guess"
};

/// A rules.json for a model with these parameters: the nearest set, and guesses for the rest, each
/// with its reason. What nothing tells is whole on each rank, which is right but for parts of
/// weights that are cut.
SuggestedRules suggested_rules(const std::vector<NamedShape>& parameters, const ModelHints& hints);

/// What has a rule, and the axis that this cuts.
struct KnownCut {
  NamedShape parameter;
  std::optional<size_t> axis;
};
/// The guesses alone, by names: rules for parameters that no rule knows. `known`: others of the
/// same layers, which may be cut to match.
boost::json::array guessed_rules(const std::vector<NamedShape>& parameters,
                                 const std::vector<KnownCut>& known);

}  // namespace ptc
