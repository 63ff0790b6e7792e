#include "tools/planner/sim/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "tools/planner/elastic/placement.h"
#include "tools/planner/sim/random.h"
#include "tools/planner/sim/rubick.h"

namespace ptc::planner {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSecondsOfADay = 86400;

/// A stretch of a job in which its speeds stay.
struct Epoch {
  const Curve* curve = nullptr;
  double ends_at = kNever;  // samples
};

bool share_a_node(const std::vector<OnNode>& a, const std::vector<OnNode>& b) {
  return std::any_of(a.begin(), a.end(), [&](const OnNode& one) {
    return std::any_of(b.begin(), b.end(),
                       [&](const OnNode& other) { return one.node == other.node; });
  });
}

class Simulation {
 public:
  Simulation(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
             std::vector<std::vector<Epoch>> epochs, const Policy& policy, ChangePrices& prices,
             const SimulationRules& rules, uint64_t seed)
      : arriving_(jobs),
        policy_(policy),
        prices_(prices),
        rules_(rules),
        decides_by_(rules.scaling),
        cluster_(nodes),
        random_(seed ^ 0x6661696C),
        back_at_(nodes.size(), kNever) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      Job job;
      job.epochs = std::move(epochs[i]);
      job.curve = job.epochs.front().curve;
      job.samples = job.left = jobs[i].samples;
      jobs_.push_back(std::move(job));
    }
    decides_by_.objective = policy.objective;
    if (policy.ignores_prices) decides_by_.change_s = decides_by_.start_s = 0;
    out_.jobs.resize(jobs.size());
    fails_at_ = next_failure();
  }

  Result<Simulated> run() {
    constexpr double kMost = kMostSimulatedYears * 365.25 * kSecondsOfADay;
    while (next_arrival_ < jobs_.size() || !here_.empty()) {
      if (rules_.stop != nullptr && rules_.stop->load(std::memory_order_relaxed))
        return invalid_argument("the simulation was stopped");
      step();
      if (now_ > kMost)
        return invalid_argument(
            "after {:g} years of simulated time {} of {} jobs have not ended: they are too long, "
            "changes cost too much, or nodes fail too often",
            kMostSimulatedYears, here_.size() + jobs_.size() - next_arrival_, jobs_.size());
    }
    out_.makespan = now_;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      const JobOutcome& job = out_.jobs[i];
      if (job.end) out_.makespan = std::max(out_.makespan, *job.end);
    }
    return std::move(out_);
  }

 private:
  struct Job {
    std::vector<Epoch> epochs;
    size_t epoch = 0;              // in which it is
    const Curve* curve = nullptr;  // of that
    double samples = 0;
    double left = 0;
    std::optional<CurvePoint> had;        // the last point that it had
    uint32_t trained_with = 0;            // most GPUs
    std::optional<uint32_t> point;        // of its curve
    double since = 0;                     // up to which `left` holds
    double ready_at = 0;                  // it stands still until then
    double begun = 0, left_at_begin = 0;  // of this segment: when it got its GPUs
    double rate() const { return curve->points[*point].samples_per_s; }
    /// Its end, or that of its epoch.
    double goes_on_until() const {
      return point ? std::max(since, ready_at) + (left - left_after()) / rate() : kNever;
    }
    double left_after() const { return std::max(0.0, samples - epochs[epoch].ends_at); }
    void find_epoch() {
      epoch = 0;
      while (epoch + 1 < epochs.size() && left <= left_after()) ++epoch;
      curve = epochs[epoch].curve;
    }
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
    if (job.point && now_ > from) {
      job.left = std::max(0.0, job.left - job.rate() * (now_ - from));
      job.trained_with = std::max(job.trained_with, job.curve->points[*job.point].gpus);
    }
    job.since = std::max(job.since, now_);
  }

  void end_segment(uint32_t index) { end_segment(index, cluster_.of(index)); }
  void end_segment(uint32_t index, const std::vector<OnNode>& on) {
    Job& job = jobs_[index];
    const CurvePoint& point = job.curve->points[*job.point];
    out_.jobs[index].gpu_s += point.gpus * (now_ - job.begun);
    if (now_ > job.begun) out_.segments.push_back({index, job.begun, now_, point, on});
  }

  /// Of a job that is given this point, on nodes that it has, or on others.
  double price_of(uint32_t index, uint32_t point, bool stays) {
    const Job& job = jobs_[index];
    if (!out_.jobs[index].start && rules_.first_start_s) return *rules_.first_start_s;
    const bool runs = job.point.has_value();
    const CurvePoint* from = runs ? &job.curve->points[*job.point] : job.had ? &*job.had : nullptr;
    return prices_.of({arriving_[index].kind, from, &job.curve->points[point], runs, stays});
  }

  void begin_segment(uint32_t index, uint32_t point, bool stays) {
    Job& job = jobs_[index];
    JobOutcome& outcome = out_.jobs[index];
    const bool begins = !job.point;
    const double price = price_of(index, point, stays);
    job.point = point;
    job.had = job.curve->points[point];
    job.begun = now_;
    job.left_at_begin = job.left;
    job.since = now_;
    job.ready_at = now_ + price;
    if (outcome.start) ++outcome.changes;
    note(begins ? SimulatedEvent::What::kStarts : SimulatedEvent::What::kChanges, index);
    if (!outcome.start) outcome.start = now_;
  }

  /// False: it goes on with another epoch.
  bool finish(uint32_t index) {
    Job& job = jobs_[index];
    advance(job);
    job.left = job.left_after();
    if (job.left > 0) {
      job.find_epoch();
      return false;
    }
    end_segment(index);
    cluster_.release(index);
    job.point.reset();
    out_.jobs[index].end = now_;
    out_.jobs[index].samples = arriving_[index].samples;
    here_.erase(std::find(here_.begin(), here_.end(), index));
    note(SimulatedEvent::What::kEnds, index);
    return true;
  }

  void fail() {
    fails_at_ = next_failure();
    const auto node = static_cast<uint32_t>(random_.below(cluster_.nodes()));
    if (!cluster_.works(node)) return;
    note(SimulatedEvent::What::kFails, node);
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
      job.find_epoch();
      note(SimulatedEvent::What::kStops, index);
    }
    cluster_.fail(node);
    back_at_[node] = now_ + rules_.repair_s;
  }

  void step() {
    // What is next; of several at one time, who ends makes room for who comes.
    uint32_t ending = 0, returning = 0;
    double ends = kNever, returns = kNever;
    for (const uint32_t index : here_)
      if (const double at = jobs_[index].goes_on_until(); at < ends) ends = at, ending = index;
    for (uint32_t node = 0; node < back_at_.size(); ++node)
      if (back_at_[node] < returns) returns = back_at_[node], returning = node;
    const double arrives = next_arrival_ < jobs_.size() ? arriving_[next_arrival_].at_s : kNever;
    const double ticks = here_.empty() ? kNever : tick_;
    const double next = std::min({ends, returns, arrives, fails_at_, ticks});
    now_ = std::max(now_, next);
    bool decides = rules_.on_events;
    if (next == ends) {
      decides = finish(ending) && decides;
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
    if (tick_ <= now_) tick_ += rules_.every_s * std::ceil((now_ - tick_) / rules_.every_s);
    if (tick_ <= now_) tick_ += rules_.every_s;
    if (decides) decide_now();
  }

  void decide_now() {
    ++out_.decisions;
    std::vector<ElasticJob> view;
    view.reserve(here_.size());
    for (const uint32_t index : here_) {
      advance(jobs_[index]);
      view.push_back(as_told(index));
    }
    apply(view);
    if (rules_.drops) drop_waiting();
  }

  ElasticJob as_told(uint32_t index) {
    const Job& job = jobs_[index];
    ElasticJob told{job.curve, std::max(job.left, 1e-9), job.point};
    told.age_s = now_ - arriving_[index].at_s;
    told.changes = out_.jobs[index].changes;
    if (rules_.growth > 0)
      told.most_gpus = static_cast<uint32_t>(std::clamp<double>(
          rules_.growth * job.trained_with, 1, std::numeric_limits<uint32_t>::max()));
    for (uint32_t i = 0; i < job.curve->points.size(); ++i)
      told.price_s.push_back(policy_.ignores_prices ? 0
                                                    : price_of(index, i, job.point.has_value()));
    return told;
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
  void apply(const std::vector<ElasticJob>& view) {
    std::vector<std::optional<uint32_t>> decided(view.size());
    if (!policy_.takes_what_is_free) decided = decide(view, cluster_.gpus(), decides_by_);
    std::vector<Wish> wishes;
    std::vector<std::vector<OnNode>> before;
    for (size_t i = 0; i < here_.size(); ++i) {
      const uint32_t index = here_[i];
      wishes.push_back({index, jobs_[index].curve, decided[i], jobs_[index].point});
      before.push_back(cluster_.of(index));
    }
    if (policy_.takes_what_is_free) take_what_is_free(view, wishes, cluster_);
    else cluster_.carry_out(wishes);
    for (size_t i = 0; i < wishes.size(); ++i) {
      const Wish& wish = wishes[i];
      Job& job = jobs_[wish.job];
      if (wish.point ? job.point == wish.point && same_nodes(cluster_.of(wish.job), before[i])
                     : !job.point)
        continue;
      if (job.point) end_segment(wish.job, before[i]);
      if (wish.point) {
        begin_segment(wish.job, *wish.point, share_a_node(before[i], cluster_.of(wish.job)));
      } else {
        job.point.reset();
        note(SimulatedEvent::What::kStops, wish.job);
      }
    }
  }

  const std::vector<ArrivingJob>& arriving_;
  const Policy& policy_;
  ChangePrices& prices_;
  const SimulationRules& rules_;
  ScalingRules decides_by_;
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
                           ChangePrices& prices, const SimulationRules& rules, uint64_t seed) {
  std::vector<std::vector<Epoch>> epochs(jobs.size());
  std::set<const Curve*> checked;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Efficiency* efficiency = curves.efficiency_of(jobs[i]);
    const size_t count = efficiency == nullptr ? 1 : efficiency->epochs();
    for (size_t epoch = 0; epoch < count; ++epoch) {
      PTC_TRY(const Curve* curve, curves.of(jobs[i], seed + i, epoch));
      epochs[i].push_back({curve, epoch + 1 == count ? kNever : efficiency->ends_at(epoch)});
      if (!checked.insert(curve).second) continue;
      PTC_TRY(prices.check(jobs[i].kind, *curve));
    }
  }
  return Simulation(nodes, jobs, std::move(epochs), curves.policy(), prices, rules, seed).run();
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
