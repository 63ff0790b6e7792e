// What `ptc top` shows at one moment, as lines of text.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/ptc/job_status.h"

namespace ptc::cli {

/// What the files of a mount say, read one after the other.
struct TopSample {
  std::string mount;
  json::object stats, nodes, requests;  // .ptc/stats, .ptc/nodes.json, .ptc/requests
  std::vector<JobStatus> jobs;          // by name
  std::vector<std::string> autoscale;   // of each job what an autoscaler has decided; may be empty
  std::chrono::steady_clock::time_point taken;
};

Result<TopSample> read_top_sample(const std::string& mount);

/// Lines of at most `width` columns (≥ 20), the mount first, then the jobs. Rates are over the time
/// since `before`; null: none are shown.
std::vector<std::string> top_lines(const TopSample& now, const TopSample* before, size_t width,
                                   bool utf8);

}  // namespace ptc::cli
