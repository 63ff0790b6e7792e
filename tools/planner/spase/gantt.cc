#include "tools/planner/spase/gantt.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <cmath>
#include <iterator>
#include <string_view>
#include <vector>

#include "reshard/plan/plan_svg.h"
#include "store/base/utf8.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

// Pixels.
constexpr double kWidth = 1080, kMargin = 24, kTop = 84, kBottom = 44, kGap = 12;
constexpr double kLeastLabels = 96, kMostLabels = 260, kOfLabel = 8, kOfName = 7;  // a character
constexpr size_t kMostLines = 2048;

constexpr std::string_view kStyle = R"(<style>
  .grid { stroke: #d5dae1 }
  .bound { stroke: #c2323a; stroke-dasharray: 5 4 }
  .bar { fill-opacity: .8 }
  .bar:hover { fill-opacity: 1 }
  .name { fill: #10151c; font-size: 11px; pointer-events: none }
  @media (prefers-color-scheme: dark) {
    .grid { stroke: #39424f }
  }
</style>
)";

/// A step of the axis: 1, 2 or 5 of a unit that people count in.
double tick_of(double makespan) {
  constexpr double kSteps[] = {1,    2,    5,    10,    30,    60,    120,    300,    600,
                               1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2592000};
  for (const double step : kSteps)
    if (makespan / step <= 10) return step;
  return std::pow(10, std::ceil(std::log10(makespan / 10)));
}

/// Its characters, each with what it takes: those of East Asia are as wide as two.
std::vector<std::string_view> characters_of(std::string_view text) {
  std::vector<std::string_view> all;
  while (!text.empty()) {
    const size_t length = std::max<size_t>(utf8_character(text), 1);
    all.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return all;
}
size_t width_of(std::string_view character) {
  return static_cast<unsigned char>(character.front()) >= 0xE1 ? 2 : 1;
}
size_t width_of(const std::vector<std::string_view>& characters) {
  size_t width = 0;
  for (const std::string_view one : characters) width += width_of(one);
  return width;
}

/// Names can be anything, and XML can not: U+FFFD for control characters.
std::string plain_name(std::string_view name) {
  std::string plain;
  for (const std::string_view one : characters_of(name))
    plain += printable(one, 64) == one ? one : "\uFFFD";
  return plain;
}

/// In at most `most` characters: "…" in its middle, as names differ at their ends.
std::string fitted(const std::string& name, size_t most) {
  const std::vector<std::string_view> all = characters_of(name);
  if (width_of(all) <= most) return name;
  std::string begin, end;
  size_t room = most > 0 ? most - 1 : 0, first = 0, behind = all.size();
  for (bool from_end = true; first < behind; from_end = !from_end) {
    const std::string_view next = from_end ? all[behind - 1] : all[first];
    if (width_of(next) > room) break;
    room -= width_of(next);
    if (from_end) end.insert(0, next), --behind;
    else begin += next, ++first;
  }
  return begin + "…" + end;
}

}  // namespace

std::string time_text(double seconds) {
  if (seconds > 1e12) return fmt::format("{:.3g} d", seconds / 86400);
  if (seconds < 100) return fmt::format("{:.3g} s", seconds);
  const auto minutes = static_cast<uint64_t>(std::llround(seconds / 60));
  if (minutes < 60) return fmt::format("{} min", minutes);
  if (minutes < 48 * 60) return fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
  const uint64_t hours = (minutes + 30) / 60;
  return fmt::format("{} d {} h", hours / 24, hours % 24);
}

std::string gantt_svg(const Instance& instance, const Schedule& schedule,
                      std::optional<double> lower_bound) {
  const size_t gpus = instance.gpus();
  const double line = gpus <= 64 ? 18 : gpus <= 256 ? 8 : 3;
  const size_t shown = std::min(gpus, kMostLines);
  const double span = std::max(schedule.makespan, 1e-9);
  double labels = kLeastLabels;
  for (const NodeOfCluster& node : instance.nodes)
    labels = std::max(labels, 12 + kOfLabel * static_cast<double>(
                                                  width_of(characters_of(plain_name(node.name)))));
  labels = std::min(labels, kMostLabels);
  const double left = kMargin + labels, wide = kWidth - left - kMargin;
  std::vector<double> top_of_node;
  double y = kTop;
  size_t lines = 0;
  for (const NodeOfCluster& node : instance.nodes) {
    if (lines + node.gpus > shown && lines > 0) break;  // the rest is not drawn
    top_of_node.push_back(y);
    lines += node.gpus;
    y += node.gpus * line + kGap;
  }
  const size_t nodes = top_of_node.size();
  const double height = y + kBottom;
  std::string out;
  const auto add = [&]<class... T>(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(out), format, std::forward<T>(values)...);
  };
  add("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" viewBox=\"0 0 "
      "{:.0f} {:.0f}\">\n{}{}<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n",
      kWidth, height, kWidth, height, kSvgStyle, kStyle);
  add("<text x=\"{}\" y=\"36\" class=\"title strong\">{} task{} on {}: {}</text>\n", kMargin,
      instance.tasks.size(), instance.tasks.size() == 1 ? "" : "s", counted(gpus, "GPU"),
      time_text(schedule.makespan));
  std::vector<std::string> remarks;
  if (lower_bound)
    remarks.push_back(
        fmt::format("no schedule is shorter than {} (dashed)", time_text(*lower_bound)));
  if (const size_t more = instance.nodes.size() - nodes; more > 0)
    remarks.push_back(fmt::format("{} more node{} not drawn", more, more == 1 ? " is" : "s are"));
  add("<text x=\"{}\" y=\"58\" class=\"weak\">{}</text>\n", kMargin, fmt::join(remarks, "; "));
  const auto x_of = [&](double seconds) { return left + wide * seconds / span; };
  const double tick = tick_of(span);
  for (double at = 0; at <= span * 1.0001; at += tick) {
    add("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2:.1f}\"/>\n",
        x_of(at), kTop - 6, height - kBottom);
    add("<text class=\"weak\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n",
        x_of(at), height - kBottom + 18, at == 0 ? std::string("0") : time_text(at));
  }
  for (size_t node = 0; node < nodes; ++node) {
    const std::string name = plain_name(instance.nodes[node].name);
    add("<text class=\"strong\" x=\"{}\" y=\"{:.1f}\"><title>{}: {}</title>{}</text>\n", kMargin,
        top_of_node[node] + 13, xml_escaped(name), counted(instance.nodes[node].gpus, "GPU"),
        xml_escaped(fitted(name, static_cast<size_t>((labels - 12) / kOfLabel))));
  }
  for (const Run& run : schedule.runs) {
    const Task& task = instance.tasks[run.task];
    const Configuration& what = task.configurations[run.configuration];
    const std::string name = plain_name(task.name);
    const double hue = std::fmod(run.task * 137.508, 360);  // far from its neighbours'
    for (const OnNode& on : run.on) {
      if (on.node >= nodes) continue;
      bool named = false;
      for (size_t i = 0; i < on.gpus.size();) {
        size_t end = i + 1;
        while (end < on.gpus.size() && on.gpus[end] == on.gpus[end - 1] + 1) ++end;
        const double x = x_of(run.start), width = std::max(x_of(run.end) - x - 1, 0.5);
        const double top = top_of_node[on.node] + on.gpus[i] * line;
        add("<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
            "rx=\"2\" "
            "fill=\"hsl({:.0f} 62% 62%)\"><title>{}: {}, {}, {} to {}</title></rect>\n",
            x, top + 0.5, width, (end - i) * line - 1, hue, xml_escaped(name),
            counted(what.gpus, "GPU"), xml_escaped(plain_name(what.way)), time_text(run.start),
            time_text(run.end));
        if (!named && width > 40 && (end - i) * line >= 12) {
          const auto most = static_cast<size_t>((width - 8) / kOfName);
          add("<text class=\"name\" x=\"{:.1f}\" y=\"{:.1f}\"><title>{}</title>{}</text>\n", x + 4,
              top + 12, xml_escaped(name), xml_escaped(fitted(name, most)));
          named = true;
        }
        i = end;
      }
    }
  }
  if (lower_bound)
    add("<line class=\"bound\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2:.1f}\"/>\n",
        x_of(*lower_bound), kTop - 10, height - kBottom);
  return out + "</svg>\n";
}

json::object schedule_json(const Instance& instance, const Schedule& schedule, double lower_bound) {
  const std::vector<double> lateness = lateness_of(instance, schedule);
  json::array tasks;
  for (const Run& run : schedule.runs) {
    const Configuration& what = instance.tasks[run.task].configurations[run.configuration];
    json::object on;
    for (const OnNode& part : run.on)
      on[instance.nodes[part.node].name] = json::array(part.gpus.begin(), part.gpus.end());
    json::object task{{"name", instance.tasks[run.task].name},
                      {"start_s", run.start},
                      {"end_s", run.end},
                      {"gpus", what.gpus},
                      {"batch", what.batch},
                      {"way", what.way},
                      {"devices", std::move(on)}};
    const double late = lateness[static_cast<size_t>(&run - schedule.runs.data())];
    if (late > 0) task["late_s"] = late;
    tasks.push_back(std::move(task));
  }
  return {{"makespan_s", schedule.makespan},
          {"lower_bound_s", lower_bound},
          {"tasks", std::move(tasks)}};
}

}  // namespace ptc::planner
