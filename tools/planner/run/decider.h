// Who decides what is wanted of the jobs of a live cluster: the autoscaler, or a schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/elastic/placement.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/run/live_job.h"
#include "tools/planner/sim/policy.h"
#include "tools/planner/spase/introspection.h"

namespace ptc::planner {

struct DecidedJob {
  const LiveJob* job = nullptr;
  ElasticJob view;  // with its prices, by point; what it has, it has in ClusterNow::placement
  double trains_in_s = 0;  // it runs, and has not trained yet
};

struct ClusterNow {
  const std::vector<NodeOfCluster>& nodes;
  Placement& placement;
  UsableGpus usable;  // of nodes that work, but for those of jobs that are not decided for
  std::string why;    // it is decided now
  std::vector<std::string> held = {};  // by whom others are: "c, which is left alone with 2 GPUs"
};

struct Wanted {
  std::optional<uint32_t> point;  // of its curve, with the GPUs that it has in the placement
  std::string waits = {};         // for what, where nothing is wanted yet
};

/// Threads: one.
class Decider {
 public:
  virtual ~Decider() = default;
  virtual std::string name() const = 0;     // "autoscaler"
  virtual std::string command() const = 0;  // "ptc autoscale"
  /// Of each job of a file. kInvalidArgument: a job that fits nowhere. Called for whatever file is
  /// read, before it holds.
  virtual Result<std::vector<Curve>> curves(const JobsAndProfiles& from,
                                            const std::vector<const ProfileRow*>& rows) = 0;
  /// What is wanted of each; afterwards `cluster.placement` says where.
  virtual std::vector<Wanted> decide(std::span<const DecidedJob> jobs, ClusterNow& cluster) = 0;
  /// Why it is to be decided before the usual time.
  virtual std::vector<std::string> reasons(std::span<LiveJob* const> jobs) {
    static_cast<void>(jobs);
    return {};
  }
};

class Autoscaler : public Decider {
 public:
  Autoscaler(Policy policy, ScalingRules rules) : policy_(std::move(policy)), rules_(rules) {}

  std::string name() const override { return "autoscaler"; }
  std::string command() const override { return "ptc autoscale"; }
  Result<std::vector<Curve>> curves(const JobsAndProfiles& from,
                                    const std::vector<const ProfileRow*>& rows) override;
  std::vector<Wanted> decide(std::span<const DecidedJob> jobs, ClusterNow& cluster) override;

 private:
  const Policy policy_;
  const ScalingRules rules_;
};

/// A schedule of all jobs, that is looked at again by introspect() whenever it is decided, and then
/// carried out: a job begins when those before it on its GPUs have ended.
class Scheduler : public Decider {
 public:
  /// `told` hears what was found, each time, and why it was looked for.
  using Told = std::function<void(const Instance& instance, const Introspection& found,
                                  const std::string& why)>;
  Scheduler(IntrospectionRules rules, Told told) : rules_(rules), told_(std::move(told)) {}

  std::string name() const override { return "schedule"; }
  std::string command() const override { return "ptc spase run"; }
  Result<std::vector<Curve>> curves(const JobsAndProfiles& from,
                                    const std::vector<const ProfileRow*>& rows) override;
  std::vector<Wanted> decide(std::span<const DecidedJob> jobs, ClusterNow& cluster) override;
  /// A job is slower than was assumed, or has failed.
  std::vector<std::string> reasons(std::span<LiveJob* const> jobs) override;

 private:
  struct Planned {
    uint32_t job = 0;  // LiveJob::id()
    CurvePoint point;
    std::vector<OnNode> on;
  };
  struct Assumed {
    std::optional<CurvePoint> point = {};  // that it is to have, and how slow it is there
    double slowness = 1;
    uint64_t failures = 0;
  };

  Schedule planned_of(std::span<const DecidedJob> jobs) const;

  const IntrospectionRules rules_;
  const Told told_;
  std::vector<NodeOfCluster> nodes_;  // as the schedule numbers them
  std::vector<Planned> planned_;      // in the order of starts
  std::map<uint32_t, Assumed> assumed_;
};

}  // namespace ptc::planner
