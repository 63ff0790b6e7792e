#include "tools/planner/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/planner/elastic/placement.h"
#include "tools/planner/sim/random.h"

namespace ptc::planner {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSecondsOfADay = 86400;

class Simulation {
 public:
  Simulation(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
             std::vector<const Curve*> curves, const SimulationRules& rules,
             const ScalingRules& decides_by, uint64_t seed)
      : arriving_(jobs),
        rules_(rules),
        decides_by_(decides_by),
        cluster_(nodes),
        random_(seed ^ 0x6661696C),
        back_at_(nodes.size(), kNever) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      Job job;
      job.curve = curves[i];
      job.left = jobs[i].samples;
      jobs_.push_back(job);
    }
    out_.jobs.resize(jobs.size());
    fails_at_ = next_failure();
  }

  Simulated run() {
    while (next_arrival_ < jobs_.size() || !here_.empty()) step();
    out_.makespan = now_;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const JobOutcome& job = out_.jobs[i];
      if (job.end) out_.makespan = std::max(out_.makespan, *job.end);
    }
    return std::move(out_);
  }

 private:
  struct Job {
    const Curve* curve = nullptr;
    double left = 0;
    std::optional<uint32_t> point;        // of its curve
    double since = 0;                     // up to which `left` holds
    double ready_at = 0;                  // it stands still until then
    double begun = 0, left_at_begin = 0;  // of this segment: when it got its GPUs
    double rate() const { return curve->points[*point].samples_per_s; }
    double ends_at() const { return point ? std::max(since, ready_at) + left / rate() : kNever; }
  };

  double next_failure() {
    const double per_s =
        rules_.failures_per_day / kSecondsOfADay * static_cast<double>(cluster_.nodes());
    return per_s > 0 ? now_ + random_.wait(per_s) : kNever;
  }

  void note(SimulatedEvent::What what, uint32_t subject) {
    SimulatedEvent event{now_, what, subject};
    if (what == SimulatedEvent::What::kStarts || what == SimulatedEvent::What::kChanges) {
      const CurvePoint& point = jobs_[subject].curve->points[*jobs_[subject].point];
      event.gpus = point.gpus;
      event.batch = point.batch;
    }
    out_.events.push_back(event);
  }

  /// Trains until now.
  void advance(Job& job) const {
    const double from = std::max(job.since, job.ready_at);
    if (job.point && now_ > from) job.left = std::max(0.0, job.left - job.rate() * (now_ - from));
    job.since = std::max(job.since, now_);
  }

  void end_segment(uint32_t index) { end_segment(index, cluster_.of(index)); }
  void end_segment(uint32_t index, const std::vector<OnNode>& on) {
    Job& job = jobs_[index];
    const CurvePoint& point = job.curve->points[*job.point];
    out_.jobs[index].gpu_s += point.gpus * (now_ - job.begun);
    if (now_ > job.begun) out_.segments.push_back({index, job.begun, now_, point, on});
  }

  void begin_segment(uint32_t index, uint32_t point) {
    Job& job = jobs_[index];
    JobOutcome& outcome = out_.jobs[index];
    const bool begins = !job.point;
    job.point = point;
    job.begun = now_;
    job.left_at_begin = job.left;
    job.since = now_;
    job.ready_at = now_ + (begins ? rules_.scaling.start_s : rules_.scaling.change_s);
    if (outcome.start) ++outcome.changes;
    note(begins ? SimulatedEvent::What::kStarts : SimulatedEvent::What::kChanges, index);
    if (!outcome.start) outcome.start = now_;
  }

  void finish(uint32_t index) {
    Job& job = jobs_[index];
    job.left = 0;
    end_segment(index);
    cluster_.release(index);
    job.point.reset();
    out_.jobs[index].end = now_;
    out_.jobs[index].samples = arriving_[index].samples;
    here_.erase(std::find(here_.begin(), here_.end(), index));
    note(SimulatedEvent::What::kEnds, index);
  }

  void fail() {
    fails_at_ = next_failure();
    const auto node = static_cast<uint32_t>(random_.below(cluster_.nodes()));
    if (!cluster_.works(node)) return;
    for (const uint32_t index : here_) {
      Job& job = jobs_[index];
      const std::vector<OnNode>& on = cluster_.of(index);
      if (std::none_of(on.begin(), on.end(), [&](const OnNode& one) { return one.node == node; }))
        continue;
      advance(job);
      end_segment(index);
      const double trained = std::max(0.0, now_ - job.ready_at);
      const double kept =
          std::floor(trained / rules_.checkpoint_s) * rules_.checkpoint_s * job.rate();
      const double left = std::min(job.left_at_begin, job.left_at_begin - kept);
      out_.jobs[index].lost_samples += left - job.left;
      job.left = left;
      job.point.reset();
    }
    cluster_.fail(node);
    back_at_[node] = now_ + rules_.repair_s;
    note(SimulatedEvent::What::kFails, node);
  }

  void step() {
    // What is next; of several at one time, who ends makes room for who comes.
    uint32_t ending = 0, returning = 0;
    double ends = kNever, returns = kNever;
    for (const uint32_t index : here_)
      if (const double at = jobs_[index].ends_at(); at < ends) ends = at, ending = index;
    for (uint32_t node = 0; node < back_at_.size(); ++node)
      if (back_at_[node] < returns) returns = back_at_[node], returning = node;
    const double arrives = next_arrival_ < jobs_.size() ? arriving_[next_arrival_].at_s : kNever;
    const double ticks = here_.empty() ? kNever : tick_;
    const double next = std::min({ends, returns, arrives, fails_at_, ticks});
    now_ = std::max(now_, next);
    bool decides = rules_.on_events;
    if (next == ends) {
      finish(ending);
    } else if (next == returns) {
      cluster_.repair(returning);
      back_at_[returning] = kNever;
      note(SimulatedEvent::What::kReturns, returning);
    } else if (next == fails_at_) {
      fail();
    } else if (next == arrives) {
      note(SimulatedEvent::What::kArrives, static_cast<uint32_t>(next_arrival_));
      here_.push_back(static_cast<uint32_t>(next_arrival_++));
    } else {
      decides = true;
    }
    while (tick_ <= now_) tick_ += rules_.every_s;
    if (decides) decide_now();
  }

  void decide_now() {
    ++out_.decisions;
    std::vector<ElasticJob> view;
    view.reserve(here_.size());
    for (const uint32_t index : here_) {
      advance(jobs_[index]);
      view.push_back({jobs_[index].curve, std::max(jobs_[index].left, 1e-9), jobs_[index].point});
    }
    apply(decide(view, cluster_.gpus(), decides_by_));
    if (rules_.drops) drop_waiting();
  }

  void drop_waiting() {
    std::erase_if(here_, [&](uint32_t index) {
      if (jobs_[index].point || out_.jobs[index].start) return false;
      out_.jobs[index].dropped = true;
      note(SimulatedEvent::What::kDropped, index);
      return true;
    });
  }

  /// Who has after it what he had before goes on: he would else stand still again at each decision.
  void apply(const std::vector<std::optional<uint32_t>>& decided) {
    std::vector<Wish> wishes;
    std::vector<std::vector<OnNode>> before;
    for (size_t i = 0; i < here_.size(); ++i) {
      const uint32_t index = here_[i];
      wishes.push_back({index, jobs_[index].curve, decided[i], jobs_[index].point});
      before.push_back(cluster_.of(index));
    }
    cluster_.carry_out(wishes);
    for (size_t i = 0; i < wishes.size(); ++i) {
      const Wish& wish = wishes[i];
      Job& job = jobs_[wish.job];
      if (wish.point ? job.point == wish.point && same_nodes(cluster_.of(wish.job), before[i])
                     : !job.point)
        continue;
      if (job.point) end_segment(wish.job, before[i]);
      if (wish.point) {
        begin_segment(wish.job, *wish.point);
      } else {
        job.point.reset();
        note(SimulatedEvent::What::kStops, wish.job);
      }
    }
  }

  const std::vector<ArrivingJob>& arriving_;
  const SimulationRules& rules_;
  const ScalingRules decides_by_;
  Placement cluster_;
  Random random_;
  std::vector<Job> jobs_;
  std::vector<uint32_t> here_;   // came and not ended, in that order
  std::vector<double> back_at_;  // by node
  double now_ = 0, tick_ = 0, fails_at_ = kNever;
  size_t next_arrival_ = 0;
  Simulated out_;
};

}  // namespace

Result<Simulated> simulate(const std::vector<NodeOfCluster>& nodes,
                           const std::vector<ArrivingJob>& jobs, PolicyCurves& curves,
                           const SimulationRules& rules, uint64_t seed) {
  std::vector<const Curve*> of_jobs;
  for (size_t i = 0; i < jobs.size(); ++i) {
    PTC_TRY(const Curve* curve, curves.of(jobs[i], seed + i));
    of_jobs.push_back(curve);
  }
  ScalingRules decides_by = rules.scaling;
  decides_by.objective = curves.policy().objective;
  if (curves.policy().ignores_prices) decides_by.change_s = decides_by.start_s = 0;
  return Simulation(nodes, jobs, std::move(of_jobs), rules, decides_by, seed).run();
}

Summary summary_of(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
                   const Simulated& run, const SimulationRules& rules) {
  Summary sum;
  std::vector<double> took;
  double gpus = 0, gpu_s = 0;
  for (const NodeOfCluster& node : nodes) gpus += node.gpus;
  sum.jobs = jobs.size();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const JobOutcome& job = run.jobs[i];
    gpu_s += job.gpu_s;
    sum.changes += job.changes;
    sum.dropped += job.dropped;
    if (!job.end) continue;
    ++sum.done;
    sum.done_in_window += *job.end <= rules.window_s;
    took.push_back(*job.end - jobs[i].at_s);
  }
  sum.makespan_s = run.makespan;
  sum.gpu_hours = gpu_s / 3600;
  sum.utilisation = run.makespan > 0 ? gpu_s / (gpus * run.makespan) : 0;
  if (took.empty()) return sum;
  std::sort(took.begin(), took.end());
  for (const double one : took) sum.mean_s += one / static_cast<double>(took.size());
  const auto at = [&](double part) {
    return took[static_cast<size_t>(std::ceil(part * static_cast<double>(took.size()))) - 1];
  };
  sum.median_s = at(0.5);
  sum.p99_s = at(0.99);
  return sum;
}

}  // namespace ptc::planner
