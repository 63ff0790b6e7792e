// A job as its files in the mount show it, and how a decision is written into them.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/planner/elastic/curve.h"
#include "tools/planner/price/prices.h"

namespace ptc::planner {

struct MountedJob {
  json::object layout;      // of layout.json
  std::string state;        // of status.json: idle, resharding, failed
  std::string last_error;   // of a reshard that failed
  std::string in_force;     // "tp2-pp1-dp2"
  std::string checkpoint;   // that `current` shows; empty: none
  uint64_t consumed = 0;    // of its data set
  uint64_t revision = 0;    // one more with each save of another layout
  bool is_settled = false;  // the layout that is wanted is in force
};
/// kNotFound: there is no such job. kUnavailable: the daemon is not there, or does not answer.
Result<MountedJob> look_at_job(const std::string& directory);

/// `layout` with what a point of a curve says and these devices ("w0:0", by rank). What its user
/// has set beside stays, but for stages where the sizes change. kInvalidArgument: it is cut in ways
/// that no profile knows (cp).
Result<json::object> layout_of_point(json::object layout, const CurvePoint& point,
                                     const std::vector<std::string>& devices);

/// Of .ptc/ask.
using AskMount = std::function<Result<json::object>(const json::object& request)>;
/// What a change of this job (`name`) to a point's layout brings elsewhere, by ptcfs's own plan:
/// nothing, of one without a checkpoint. Without `devices` it is where the least moves.
/// kInvalidArgument: it cannot have that layout.
Result<Movement> movement_to(const AskMount& ask, const std::string& name, const MountedJob& job,
                             const CurvePoint& point, const std::vector<std::string>& devices = {});

/// kInvalidArgument: it was refused, and why. kUnavailable: for now.
Result<> save_layout(const std::string& directory, const json::object& layout);
/// Of order.json; 0: there is none.
uint64_t batch_of(const std::string& directory);
/// order.json with another batch; nothing where there is no order.json, or it has that batch.
/// Errors as of save_layout().
Result<> save_batch(const std::string& directory, uint64_t batch);

/// Names of the nodes that are up and not being drained. kUnavailable: the mount does not answer.
Result<std::vector<std::string>> nodes_up(const std::string& mount);

}  // namespace ptc::planner
