#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "reshard/plan/plan_svg.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/sim/files.h"
#include "tools/planner/spase/gantt.h"

namespace ptc::planner {
namespace {

constexpr double kWidth = 1080, kHeight = 320, kLeft = 72, kRight = 24, kTop = 84, kBottom = 40;
constexpr size_t kMostSteps = 4000;

/// A value that changes at times.
class Steps {
 public:
  void add(double at, double change) { changes_[at] += change; }
  double most() const {
    double sum = 0, most = 0;
    for (const auto& [at, change] : changes_) most = std::max(most, sum += change);
    return most;
  }
  /// As a path; in each of many short spans only its last value is drawn.
  template <class X, class Y>
  std::string path(double until, X x_of, Y y_of) const {
    std::string path = fmt::format("M{:.1f},{:.1f}", x_of(0), y_of(0));
    double sum = 0, drawn = -1;
    for (auto place = changes_.begin(); place != changes_.end(); ++place) {
      sum += place->second;
      const auto next = std::next(place);
      if (next != changes_.end() && next->first - drawn < until / kMostSteps) continue;
      drawn = place->first;
      path += fmt::format("H{:.1f}V{:.1f}", x_of(place->first), y_of(sum));
    }
    return path + fmt::format("H{:.1f}V{:.1f}", x_of(until), y_of(0));
  }

 private:
  std::map<double, double> changes_;
};

}  // namespace

std::string gantt_of(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
                     const Simulated& run) {
  Instance instance{nodes, {}};
  for (const ArrivingJob& job : jobs) instance.tasks.push_back({job.name, {}, {}});
  Schedule schedule;
  schedule.makespan = run.makespan;
  for (const Segment& segment : run.segments) {
    std::vector<Configuration>& of = instance.tasks[segment.job].configurations;
    of.push_back({segment.point.gpus, static_cast<uint32_t>(segment.on.size()),
                  segment.end - segment.start, segment.point.batch,
                  fmt::format("batch {}, {}", segment.point.batch, segment.point.way)});
    schedule.runs.push_back({segment.job, static_cast<uint32_t>(of.size() - 1), segment.start,
                             segment.end, segment.on});
  }
  return gantt_svg(instance, schedule, std::nullopt);
}

std::string utilisation_svg(const std::vector<NodeOfCluster>& nodes, const Simulated& run) {
  uint32_t gpus = 0;
  for (const NodeOfCluster& node : nodes) gpus += node.gpus;
  Steps used, waiting;
  for (const Segment& segment : run.segments) {
    used.add(segment.start, segment.point.gpus);
    used.add(segment.end, -static_cast<double>(segment.point.gpus));
  }
  for (const SimulatedEvent& event : run.events) {
    using What = SimulatedEvent::What;
    if (event.what == What::kArrives || event.what == What::kStops) waiting.add(event.at, 1);
    if (event.what == What::kStarts || event.what == What::kDropped) waiting.add(event.at, -1);
  }
  const double until = std::max(run.makespan, 1e-9), most_waiting = std::max(1.0, waiting.most());
  const double bottom = kHeight - kBottom, high = bottom - kTop;
  const auto x_of = [&](double at) { return kLeft + (kWidth - kLeft - kRight) * at / until; };
  std::string out;
  const auto add = [&]<class... T>(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(out), format, std::forward<T>(values)...);
  };
  add("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 "
      "0 {0:.0f} {1:.0f}\">\n{2}<style>\n  .used {{ fill: #4c8dd6; fill-opacity: .7 }}\n"
      "  .waiting {{ fill: none; stroke: #c2323a; stroke-width: 1.5 }}\n</style>\n"
      "<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n",
      kWidth, kHeight, kSvgStyle);
  add("<text x=\"24\" y=\"36\" class=\"title strong\">{} in use, of {}</text>\n"
      "<text x=\"24\" y=\"58\" class=\"weak\">line: jobs that wait, {:.0f} at most; {} in "
      "all</text>\n",
      "GPUs", gpus, waiting.most(), time_text(run.makespan));
  add("<path class=\"used\" d=\"{}\"/>\n",
      used.path(until, x_of, [&](double value) { return bottom - high * value / gpus; }));
  add("<path class=\"waiting\" d=\"{}\"/>\n", waiting.path(until, x_of, [&](double value) {
    return bottom - high * value / most_waiting;
  }));
  for (const double part : {0.0, 0.5, 1.0})
    add("<text class=\"weak\" x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{:.0f}</text>\n",
        kLeft - 8, bottom - high * part + 4, gpus * part);
  for (int tick = 0; tick <= 8; ++tick)
    add("<text class=\"weak\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
        x_of(until * tick / 8), bottom + 18,
        tick == 0 ? std::string("0") : time_text(until * tick / 8));
  return out + "</svg>\n";
}

}  // namespace ptc::planner
