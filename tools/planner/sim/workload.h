// Which jobs come, and when: drawn, or as a trace says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/profile/jobs_file.h"

namespace ptc::planner {

struct ArrivingJob {
  std::string name;
  uint32_t kind = 0;  // of the jobs that come: its model and batches
  double at_s = 0;    // ≥ 0
  double samples = 0;
  uint32_t asked_gpus = 0;  // what its user would take; 0: not said
};

/// How jobs come. All are Poisson processes; rates are of what the cluster would bear.
enum class Arrivals {
  kLow,      // half of it
  kHigh,     // all of it
  kBursty,   // all of it, in the first quarter of every four hours
  kExtreme,  // twice as many
};

struct DrawnWorkload {
  Arrivals arrivals = Arrivals::kHigh;
  double per_hour = 0;  // in the mean; 0: as `arrivals` says
  double hours = 8;     // in which they come
  /// What a job would take on one GPU, at its best batch there; drawn evenly.
  double least_minutes = 20, most_minutes = 60;
};

/// Each is of a kind that is drawn evenly. `of_one_gpu`: of each kind the samples a second of one
/// GPU. In the order in which they come. Equal seeds give equal jobs.
std::vector<ArrivingJob> draw_jobs(const std::vector<JobToTrain>& kinds,
                                   const std::vector<double>& of_one_gpu, uint32_t gpus,
                                   const DrawnWorkload& how, uint64_t seed);

/// A table (CSV): time_s, and job (a kind's name) or model; and samples or minutes (on one GPU).
/// May be there: name, gpus (what its user asked for; at most those of the cluster, `gpus`).
/// kInvalidArgument: "name: line 3, column 7 (…): …".
Result<std::vector<ArrivingJob>> read_trace(std::string_view text, const std::string& name,
                                            const std::vector<JobToTrain>& kinds,
                                            const std::vector<double>& of_one_gpu, uint32_t gpus);

}  // namespace ptc::planner
