// autoscale.json in a job's directory: what the autoscaler has done with the job. The next one
// reads it, and `ptc top` shows it.
#pragma once

#include <boost/json/object.hpp>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/planner/elastic/curve.h"
#include "tools/planner/price/prices.h"
#include "tools/planner/run/worker.h"

namespace ptc::planner {

enum class LiveState {
  kWaits,    // it has no GPUs, or not all yet that it is to have
  kChanges,  // nothing of it runs; its layout is on the way
  kRuns,
  kStops,    // it was asked to save its state and to end
  kDone,     // all its samples are consumed, or it says so
  kGivenUp,  // it ends again and again
  kByHand,   // somebody else saved layout.json: left alone
};
std::string_view state_word(LiveState state);

struct JobRecord {
  LiveState state = LiveState::kWaits;
  /// As it was read: nobody but who runs this can have written it. Else whoever may write in the
  /// job's directory could name any process there.
  bool is_own = true;
  uid_t owner = 0;
  std::optional<CurvePoint> has = {};     // what runs, or is on the way; its GPUs are taken
  std::vector<std::string> devices = {};  // "w0:0", by rank
  /// As the autoscaler saved it last, and what stood there before: it may have been killed between.
  std::optional<json::object> layout = {}, layout_before = {};
  WorkerId worker = {};
  std::string log = {};  // where what it prints goes
  bool was_asked_to_end = false;
  std::optional<ChangeCosts> costs = {};
  double slowness = 1;  // what a sample has taken lately ÷ what its curve says
  std::map<std::string, double> slowness_by_point = {};  // where it was measured; see point_key()
  uint64_t changes = 0, failures = 0;
  double samples = 0;          // of a job that is done: so many it was to read
  bool was_removed = false;    // from jobs.json: so it is left alone
  json::object decision = {};  // the last one: at, why, from, to, gain, price_s
  std::string remark = {};     // for people: why it is as it is

  /// As it was measured there; where it never was, what was measured last.
  double slowness_of(const CurvePoint& point) const;
  /// Returned is what was measured there before; 0: nothing was.
  double note_slowness(const CurvePoint& point, double measured);
};

std::string point_key(const CurvePoint& point);

/// A damaged or missing one is none.
std::optional<JobRecord> read_record(const std::string& directory);
/// Whole or not at all.
Result<> write_record(const std::string& directory, const JobRecord& record);

}  // namespace ptc::planner
