#include "tools/planner/sim/rubick.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

namespace ptc::planner {
namespace {

constexpr uint32_t kManyGpus = 32, kMostReleases = 7;
constexpr double kNoFaster = 1.01;  // within which fewer GPUs are as good

class Taker {
 public:
  Taker(std::span<const ElasticJob> jobs, std::span<Wish> wishes, Placement& cluster)
      : jobs_(jobs), wishes_(wishes), cluster_(cluster) {
    for (const Wish& wish : wishes) before_.push_back(cluster.of(wish.job));
  }

  void run() {
    std::vector<uint32_t> order(jobs_.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return slope(a) < slope(b); });
    for (const uint32_t j : order) {
      wishes_[j].point = jobs_[j].now;
      if (is_large(j) && gpus(j) >= kManyGpus && jobs_[j].changes < kMostReleases) release(j);
    }
    for (const uint32_t j : order) {
      if (!is_large(j)) take_on_a_node(j);
      else if (!wishes_[j].point) take_nodes(j);
    }
    for (const uint32_t j : order)
      if (is_large(j)) take_nodes(j);
  }

 private:
  /// What a node holds only with its state offloaded, or not at all.
  bool is_large(uint32_t j) const {
    const std::vector<CurvePoint>& points = jobs_[j].curve->points;
    return std::all_of(points.begin(), points.end(), [&](const CurvePoint& point) {
      return point.gpus > cluster_.largest_node() || point.technique.ends_with("offload");
    });
  }
  uint32_t gpus(uint32_t j) const {
    return wishes_[j].point ? jobs_[j].curve->points[*wishes_[j].point].gpus : 0;
  }
  void release(uint32_t j) {
    cluster_.release(wishes_[j].job);
    wishes_[j].point.reset();
  }
  bool place(uint32_t j, uint32_t point) {
    const CurvePoint& wanted = jobs_[j].curve->points[point];
    if (!cluster_.place(wishes_[j].job, wanted.gpus, &before_[j], wanted.each)) return false;
    wishes_[j].point = point;
    return true;
  }

  /// The fewest GPUs that are as fast as so many.
  std::optional<uint32_t> best_of(uint32_t j, uint32_t most) const {
    const std::vector<CurvePoint>& points = jobs_[j].curve->points;
    std::optional<uint32_t> best;
    for (uint32_t i = 0; i < points.size() && points[i].gpus <= most; ++i)
      if (!best || points[i].samples_per_s > kNoFaster * points[*best].samples_per_s) best = i;
    return best;
  }

  double slope(uint32_t j) const {
    const std::vector<CurvePoint>& points = jobs_[j].curve->points;
    const auto speed_up = [&](std::optional<uint32_t> point) {
      return point ? points[*point].speed_up : 0;
    };
    const uint32_t has = jobs_[j].now ? points[*jobs_[j].now].gpus : 0;
    return has == 0 ? std::max(speed_up(best_of(j, 1)), 1.0)
                    : speed_up(best_of(j, has + 1)) - speed_up(jobs_[j].now);
  }

  void take_on_a_node(uint32_t j) {
    std::optional<uint32_t> node;
    if (wishes_[j].point) {
      node = cluster_.of(wishes_[j].job).front().node;
    } else {
      for (uint32_t one = 0; one < cluster_.nodes(); ++one)
        if (!node || cluster_.free_on(one) > cluster_.free_on(*node)) node = one;
    }
    const uint32_t free = cluster_.free_on(*node);
    const auto best = best_of(j, gpus(j) + free);
    if (free == 0 || !best || wishes_[j].point == best) return;
    cluster_.release(wishes_[j].job);
    const std::vector<OnNode> there = {{*node, {}}};
    PTC_CHECK(cluster_.place(wishes_[j].job, jobs_[j].curve->points[*best].gpus, &there));
    wishes_[j].point = best;
  }

  void take_nodes(uint32_t j) {
    const std::vector<OnNode> had = cluster_.of(wishes_[j].job);
    const uint32_t least = gpus(j);
    cluster_.release(wishes_[j].job);
    const std::vector<CurvePoint>& points = jobs_[j].curve->points;
    for (uint32_t i = static_cast<uint32_t>(points.size()); i-- > 0 && points[i].gpus >= least;)
      if (place(j, i)) return;
    if (!had.empty()) PTC_CHECK(cluster_.take(wishes_[j].job, had));
  }

  const std::span<const ElasticJob> jobs_;
  const std::span<Wish> wishes_;
  Placement& cluster_;
  std::vector<std::vector<OnNode>> before_;
};

}  // namespace

void take_what_is_free(std::span<const ElasticJob> jobs, std::span<Wish> wishes,
                       Placement& cluster) {
  Taker(jobs, wishes, cluster).run();
}

}  // namespace ptc::planner
