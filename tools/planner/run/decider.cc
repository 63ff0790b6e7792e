#include "tools/planner/run/decider.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "tools/planner/profile/input.h"
#include "tools/planner/spase/gantt.h"

namespace ptc::planner {
namespace {

constexpr double kSlower = 1.2;  // than was assumed: it is looked again

uint32_t largest_of(const std::vector<NodeOfCluster>& nodes) {
  uint32_t largest = 1;
  for (const NodeOfCluster& node : nodes) largest = std::max(largest, node.gpus);
  return largest;
}

/// What is left of a job, with the points of its curve as configurations.
Task task_of(const LiveJob& job, uint32_t largest) {
  Task task{job.spec().name, {}, {}};
  if (job.spec().deadline) task.due_s = seconds_until(*job.spec().deadline);
  for (const CurvePoint& point : job.curve().points)
    task.configurations.push_back({point.gpus, std::max(1u, point.gpus / largest),
                                   job.samples_left() / point.samples_per_s, point.batch,
                                   point.way});
  return task;
}

TaskNow now_of(const DecidedJob& decided, const Placement& placement) {
  TaskNow now;
  for (const CurvePoint& point : decided.job->curve().points)
    now.slowness_of.push_back(decided.job->slowness_of(point));
  now.price_s = decided.view.price_s;
  if (decided.view.now)
    now.runs = {*decided.view.now, placement.of(decided.job->id()), decided.trains_in_s};
  return now;
}

/// Whether it would have room on the nodes that are up, were it there alone.
bool has_room(const Task& task, const ClusterNow& cluster, uint32_t largest) {
  uint32_t whole = 0, most = 0;
  for (uint32_t node = 0; node < cluster.nodes.size(); ++node) {
    if (!cluster.placement.works(node)) continue;
    most = std::max(most, cluster.nodes[node].gpus);
    whole += cluster.nodes[node].gpus == largest;
  }
  return std::any_of(task.configurations.begin(), task.configurations.end(),
                     [&](const Configuration& one) {
                       return one.nodes > 1 ? one.nodes <= whole : one.gpus <= most;
                     });
}

/// Who comes before it on its GPUs.
std::vector<std::string> before(const Instance& instance, const Schedule& schedule, size_t run) {
  std::set<uint32_t> tasks;
  for (const OnNode& mine : schedule.runs[run].on)
    for (const uint32_t gpu : mine.gpus)
      for (size_t earlier = run; earlier-- > 0;) {
        const std::vector<OnNode>& on = schedule.runs[earlier].on;
        const bool has_it = std::any_of(on.begin(), on.end(), [&](const OnNode& theirs) {
          return theirs.node == mine.node &&
                 std::binary_search(theirs.gpus.begin(), theirs.gpus.end(), gpu);
        });
        if (!has_it) continue;
        tasks.insert(schedule.runs[earlier].task);
        break;
      }
  std::vector<std::string> names;
  for (const uint32_t task : tasks) names.push_back(instance.tasks[task].name);
  return names;
}

}  // namespace

Result<std::vector<Curve>> Autoscaler::curves(const JobsAndProfiles& from,
                                              const std::vector<const ProfileRow*>& rows) {
  PolicyCurves all(policy_, rows, from.file.jobs, from.file.nodes);
  PTC_TRY(all.check(from.file));
  std::vector<Curve> curves;
  for (uint32_t i = 0; i < from.file.jobs.size(); ++i) {
    const JobToTrain& job = from.file.jobs[i];
    PTC_TRY(const Curve* curve, all.of({job.name, i, 0, job.samples, 0}, i));
    curves.push_back(*curve);
  }
  return curves;
}

std::vector<Wanted> Autoscaler::decide(std::span<const DecidedJob> jobs, ClusterNow& cluster) {
  uint32_t gpus = 0;
  for (const std::vector<uint32_t>& of_node : cluster.usable)
    gpus += static_cast<uint32_t>(of_node.size());
  std::vector<size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return is_due_before(jobs[a].job->spec(), jobs[b].job->spec());
  });
  std::vector<ElasticJob> view;
  for (const size_t i : order) {
    view.push_back(jobs[i].view);
    if (policy_.ignores_prices) view.back().price_s.assign(view.back().price_s.size(), 0);
  }
  const auto decided = planner::decide(view, gpus, rules_);
  std::vector<Wish> wishes;
  for (size_t i = 0; i < order.size(); ++i)
    wishes.push_back({jobs[order[i]].job->id(), view[i].curve, decided[i], view[i].now});
  cluster.placement.carry_out(wishes);
  std::vector<Wanted> wanted(jobs.size());
  for (size_t i = 0; i < order.size(); ++i) {
    wanted[order[i]].point = wishes[i].point;
    if (!wishes[i].point)
      wanted[order[i]].waits =
          cluster.held.empty()
              ? "room: others have it, or it is too little on the nodes that are up"
              : fmt::format("room: others have it, and {}", fmt::join(cluster.held, " and "));
  }
  return wanted;
}

Result<std::vector<Curve>> Scheduler::curves(const JobsAndProfiles& from,
                                             const std::vector<const ProfileRow*>& rows) {
  PTC_TRY([[maybe_unused]] const Instance instance, make_instance(from));
  std::vector<Curve> curves;
  for (const JobToTrain& job : from.file.jobs)
    curves.push_back(make_curve(rows, job.model, job.least_batch, job.most_batch, from.file.nodes));
  return curves;
}

Schedule Scheduler::planned_of(std::span<const DecidedJob> jobs) const {
  Schedule schedule;
  for (const Planned& planned : planned_)
    for (uint32_t task = 0; task < jobs.size(); ++task) {
      if (jobs[task].job->id() != planned.job) continue;
      const std::vector<CurvePoint>& points = jobs[task].job->curve().points;
      const auto point = std::find_if(points.begin(), points.end(), [&](const CurvePoint& one) {
        return one.is_as(planned.point);
      });
      if (point != points.end())
        schedule.runs.push_back(
            {task, static_cast<uint32_t>(point - points.begin()), 0, 0, planned.on});
    }
  return schedule;
}

std::vector<Wanted> Scheduler::decide(std::span<const DecidedJob> jobs, ClusterNow& cluster) {
  if (!std::equal(nodes_.begin(), nodes_.end(), cluster.nodes.begin(), cluster.nodes.end(),
                  [](const NodeOfCluster& a, const NodeOfCluster& b) {
                    return a.name == b.name && a.gpus == b.gpus;
                  }))
    planned_.clear();
  nodes_ = cluster.nodes;
  Instance instance{cluster.nodes, {}};
  std::vector<TaskNow> now;
  assumed_.clear();
  for (const DecidedJob& one : jobs) {
    instance.tasks.push_back(task_of(*one.job, largest_of(nodes_)));
    now.push_back(now_of(one, cluster.placement));
    assumed_[one.job->id()] = {{}, 1, one.job->failures()};
  }
  const Introspection found = introspect(instance, planned_of(jobs), now, cluster.usable, rules_);
  if (!jobs.empty()) told_(instance, found, cluster.why);
  std::vector<Wanted> wanted(jobs.size());
  for (const uint32_t task : found.no_room)
    wanted[task].waits =
        !cluster.held.empty() && has_room(instance.tasks[task], cluster, largest_of(nodes_))
            ? fmt::format("{}", fmt::join(cluster.held, " and "))
            : "room: there is too little on the nodes that are up";
  planned_.clear();
  std::vector<const Run*> begin;
  for (size_t i = 0; i < found.schedule.runs.size(); ++i) {
    const Run& run = found.schedule.runs[i];
    planned_.push_back(
        {jobs[run.task].job->id(), jobs[run.task].job->curve().points[run.configuration], run.on});
    Assumed& assumed = assumed_[planned_.back().job];
    assumed.point = planned_.back().point;
    assumed.slowness = jobs[run.task].job->slowness_of(*assumed.point);
    const std::vector<std::string> behind = before(instance, found.schedule, i);
    if (behind.empty()) {
      wanted[run.task].point = run.configuration;
      begin.push_back(&run);
    } else {
      wanted[run.task].waits = fmt::format(
          "{} in about {}, when {} {} ended", counted(planned_.back().point.gpus, "GPU"),
          time_text(run.start), fmt::join(behind, ", "), behind.size() == 1 ? "has" : "have");
    }
  }
  for (const DecidedJob& one : jobs) cluster.placement.release(one.job->id());
  for (const Run* run : begin) cluster.placement.take(jobs[run->task].job->id(), run->on);
  return wanted;
}

std::vector<std::string> Scheduler::reasons(std::span<LiveJob* const> jobs) {
  std::vector<std::string> all;
  for (const LiveJob* job : jobs) {
    const auto known = assumed_.find(job->id());
    if (known == assumed_.end()) continue;
    Assumed& assumed = known->second;
    if (assumed.point && job->has() && job->has()->is_as(*assumed.point)) {
      const double slowness = job->slowness_of(*assumed.point);
      if (slowness > kSlower * assumed.slowness)
        all.push_back(fmt::format("{} takes {:.1f} x as long as its profile says", job->spec().name,
                                  slowness));
      assumed.slowness = std::max(assumed.slowness, slowness);
    }
    if (job->failures() > assumed.failures) all.push_back(job->spec().name + " has failed");
    assumed.failures = job->failures();
  }
  return all;
}

}  // namespace ptc::planner
