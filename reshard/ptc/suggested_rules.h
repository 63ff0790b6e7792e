// Rules for names that no rule set knows: guesses, marked as such, beside the nearest set.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cstddef>
#include <string>
#include <vector>

namespace ptc {

/// Tensors of one kind: "model.layers.{0-3}.mlp.up_proj.weight", or the name of one of them.
struct NamedAxes {
  std::string names;
  size_t axes = 0;
};

struct SuggestedRules {
  boost::json::object text;
  size_t guesses = 0;  // descriptions in it that begin with "guess"
};

/// A rules.json for a model with these parameters: the nearest set, and guesses for the rest.
/// Guessed is by shape and by how parameters are usually called; what neither tells is whole on
/// each rank, which is right but for parts of weights that are cut.
SuggestedRules suggested_rules(const std::vector<NamedAxes>& parameters);

/// The same guesses alone: rules for parameters that no rule knows.
boost::json::array guessed_rules(const std::vector<NamedAxes>& parameters);

}  // namespace ptc
