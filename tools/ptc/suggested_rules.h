// A rules.json for a model of which no set knows all names: the nearest set, and guesses, marked as
// such, for the rest.
#pragma once

#include <boost/json/object.hpp>
#include <cstddef>

namespace ptc::cli {

struct SuggestedRules {
  boost::json::object text;
  size_t guesses = 0;  // descriptions in it that begin with "guess"
};

/// `report`: cut_report()'s. Guessed is by shape and by how parameters are usually called; what
/// neither tells is whole on each rank, which is never wrong.
SuggestedRules suggested_rules(const boost::json::object& report);

}  // namespace ptc::cli
