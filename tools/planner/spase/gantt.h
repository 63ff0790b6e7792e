// A schedule as a picture: a line a GPU, by node; a bar a task.
#pragma once

#include <boost/json/object.hpp>
#include <optional>
#include <string>

#include "store/base/json.h"
#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

/// An SVG document of its own, legible on light and on dark. A task may have several runs.
/// `lower_bound`: none is drawn where there is none.
std::string gantt_svg(const Instance& instance, const Schedule& schedule,
                      std::optional<double> lower_bound);

/// The same as JSON: {"makespan_s", "lower_bound_s", "tasks": [{"name", "start_s", …}]}; "late_s"
/// of a task that ends after its deadline.
json::object schedule_json(const Instance& instance, const Schedule& schedule, double lower_bound);

/// "1 h 20 min", "45 s".
std::string time_text(double seconds);

}  // namespace ptc::planner
