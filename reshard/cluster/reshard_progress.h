// How far a reshard is, which several nodes carry out.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// What one node does of it, or all.
struct ReshardProgress {
  bool leads = false;
  std::string phase, checkpoint, from, to;
  uint64_t bytes_done = 0;   // by the one node
  uint64_t bytes_total = 0;  // to be written on all nodes
  double seconds = 0;

  /// As in status.json; without `leads`, which nodes tell each other beside it.
  boost::json::object to_json() const;
  static Result<ReshardProgress> from_json(const boost::json::object& object);
};

/// Of all that nodes do the whole. nullopt: they do nothing.
std::optional<ReshardProgress> add_up(const std::vector<ReshardProgress>& nodes);

}  // namespace ptc
