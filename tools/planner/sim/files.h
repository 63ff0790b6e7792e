// What a simulation leaves behind: tables, and pictures.
#pragma once

#include <string>
#include <vector>

#include "store/base/json.h"
#include "tools/planner/sim/simulator.h"

namespace ptc::planner {

/// A line a job: when it came, began and ended, and what it had.
std::string jobs_csv(const std::vector<JobToTrain>& kinds, const std::vector<ArrivingJob>& jobs,
                     const Simulated& run);
/// A line an event: {"t_s": 12.5, "what": "starts", "job": "bert-1", "gpus": 4, "batch": 96}.
std::string events_jsonl(const std::vector<NodeOfCluster>& nodes,
                         const std::vector<ArrivingJob>& jobs, const Simulated& run);
json::object summary_json(const Summary& summary);

/// A line a GPU, a bar for each job and layout that it had there. SVG.
std::string gantt_of(const std::vector<NodeOfCluster>& nodes, const std::vector<ArrivingJob>& jobs,
                     const Simulated& run);
/// GPUs in use, and jobs that wait, by time. SVG.
std::string utilisation_svg(const std::vector<NodeOfCluster>& nodes, const Simulated& run);

}  // namespace ptc::planner
