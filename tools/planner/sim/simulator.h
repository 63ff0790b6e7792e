// A cluster in simulated time: jobs come, are given GPUs, change, end; nodes fail. What decides is
// what decides for real (../elastic/autoscaler.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/sim/change_prices.h"
#include "tools/planner/sim/policy.h"
#include "tools/planner/sim/workload.h"
#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

struct SimulationRules {
  ScalingRules scaling;  // its seconds a change are what Pollux's policy takes for them
  std::optional<double> first_start_s;  // what a job's first start costs; none: as other starts
  double growth =
      0;  // so many times the GPUs that it has trained with a job may have, one at first; 0: any
  double every_s = 60;          // it is decided so often …
  bool on_events = true;        // … and when jobs come and end, nodes fail and return
  bool drops = false;           // who has no room when he comes goes, and does not wait
  double window_s = 8 * 3600;   // in which ended jobs are counted
  double failures_per_day = 0;  // of each node
  double repair_s = 1800;
  double checkpoint_s = 600;                // what was trained since the last goes with a node
  const std::atomic<bool>* stop = nullptr;  // ends the run with an error; outlives it
};

struct JobOutcome {
  std::optional<double> start, end;  // seconds; none: it never began, or was dropped
  double samples = 0;                // that counted
  double lost_samples = 0;           // trained, and lost with a node
  double gpu_s = 0;                  // for which it had GPUs
  uint32_t changes = 0;              // of GPUs, batch or nodes once it had begun
  bool dropped = false;
};

/// For how long a job had what.
struct Segment {
  uint32_t job = 0;
  double start = 0, end = 0;
  CurvePoint point;
  std::vector<OnNode> on;
};

struct SimulatedEvent {
  /// kStops: it has no GPUs any more and waits, for others or since its node failed.
  enum class What { kArrives, kStarts, kChanges, kStops, kEnds, kDropped, kFails, kReturns };
  double at = 0;
  What what = What::kArrives;
  uint32_t subject = 0;  // a job, or a node
  uint32_t gpus = 0;     // of what starts or changes
  uint64_t batch = 0;
};

struct Simulated {
  std::vector<JobOutcome> jobs;  // as they came
  std::vector<Segment> segments;
  std::vector<SimulatedEvent> events;
  double makespan = 0;
  uint64_t decisions = 0;
};

/// What people compare.
struct Summary {
  size_t jobs = 0, done = 0, done_in_window = 0, dropped = 0;
  double mean_s = 0, median_s = 0, p99_s = 0;  // from arrival to end, of those that ended
  double makespan_s = 0, gpu_hours = 0;
  double utilisation = 0;  // GPU seconds that were given away, of those until the end
  uint64_t changes = 0;
};

inline constexpr double kMostSimulatedYears = 100;

/// All jobs are run to their ends, however long after the window. Equal arguments give equal
/// results. kInvalidArgument: a job that the policy can give nothing; a change without a price; it
/// was stopped; jobs that have not ended after kMostSimulatedYears.
Result<Simulated> simulate(const std::vector<NodeOfCluster>& nodes,
                           const std::vector<ArrivingJob>& jobs, PolicyCurves& curves,
                           ChangePrices& prices, const SimulationRules& rules, uint64_t seed);

Summary summary_of(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
                   const Simulated& run, const SimulationRules& rules);

}  // namespace ptc::planner
