// Policies that are compared: each is the autoscaler, told other curves.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/elastic/curve.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/profile/room.h"
#include "tools/planner/sim/goodput.h"
#include "tools/planner/sim/workload.h"

namespace ptc::planner {

/// Which batch a job trains with.
enum class BatchRule { kBest, kMost, kLeast, kRandom };

struct Policy {
  std::string name;  // as it was written
  BatchRule batch = BatchRule::kBest;
  bool accumulates = false;         // gradients, where a batch has no room
  bool ignores_prices = false;      // decides as if a change cost nothing
  bool takes_asked = false;         // the GPUs that its user asked for, and never others
  bool takes_what_is_free = false;  // as Rubick: ../sim/rubick.h
  Objective objective = Objective::kThroughput;
  bool is_simulated_only = false;  // others' policies, and what needs to know how long a job waits
};

/// "elastic", "elastic-completion", "elastic-overtaking", "max-batch", "min-batch", "random-batch",
/// "asked", "pollux", "rubick"; each may end in "+accumulation", "+unpriced", or both.
/// kInvalidArgument names the nearest.
Result<Policy> parse_policy(const std::string& name);
/// Each name, and what it does.
std::vector<std::pair<std::string, std::string>> known_policies();

/// The curves that a policy gives to jobs: of a kind, of a kind with one batch, or with one number
/// of GPUs. Those of jobs that agree are one. Curves live as long as this.
class PolicyCurves {
 public:
  /// `rows` outlive it; batches that nobody tried are interpolated between those that were.
  /// `efficiency`: by model, of those whose throughput counts goodput; outlives it. `spreads`: as
  /// make_curve().
  PolicyCurves(const Policy& policy, const std::vector<const ProfileRow*>& rows,
               const std::vector<JobToTrain>& kinds, const std::vector<NodeOfCluster>& nodes,
               const std::map<std::string, Efficiency>* efficiency = nullptr, bool spreads = false);

  /// In an epoch, where goodput counts; those of all epochs have the same numbers of GPUs.
  /// kInvalidArgument: the policy has nothing to give to such a job. A random batch is drawn by
  /// `seed`.
  Result<const Curve*> of(const ArrivingJob& job, uint64_t seed, size_t epoch = 0);
  /// Null: a sample is a sample.
  const Efficiency* efficiency_of(const ArrivingJob& job) const;
  /// kInvalidArgument, with the place: a job fits nowhere, of the file whose jobs are the kinds.
  Result<> check(const JobsFile& file) const;
  const Policy& policy() const { return policy_; }

 private:
  struct Kind {
    std::vector<ProfileRow> made;         // interpolated
    std::vector<const ProfileRow*> rows;  // measured ones and those
    std::vector<uint64_t> batches;        // with which it can be trained, ascending
    std::optional<Misfit> misfit;         // why there is none
  };
  const Policy policy_;
  const std::vector<JobToTrain>& kinds_;
  const std::vector<NodeOfCluster>& nodes_;
  std::vector<Kind> of_kind_;
  std::vector<uint32_t> alike_;  // by kind: the first with its model, technique and batches
  const std::map<std::string, Efficiency>* efficiency_;
  const bool spreads_;
  /// By kind, batch, GPUs, epoch.
  std::map<std::tuple<uint32_t, uint64_t, uint32_t, size_t>, Curve> curves_;
};

}  // namespace ptc::planner
