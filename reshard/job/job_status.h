// What a job says about itself: status.json for people and programs, numbers for metrics.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/reshard_progress.h"
#include "reshard/job/activity.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/known_job.h"

namespace ptc {

/// What it says beside what is known of the job: at just this moment.
struct StatusBeside {
  std::optional<ReshardProgress> progress = std::nullopt;  // on all nodes
  bool reshards = false;                                   // here
  std::vector<Activity::Progress> commits = {}, fetches = {};
  std::optional<std::string> distrusted = std::nullopt;  // Cluster::distrusted()
  std::vector<std::string> alive = {};                   // nodes, by name
};

/// A pure function. `node`: this one; `shares_bytes`: Cluster::shares_bytes().
std::string status_of(const KnownJob& known, const std::string& job, const std::string& node,
                      bool shares_bytes, const StatusBeside& beside);

/// The same in numbers; without the progress, and without what of incoming/ was hashed. `node`: as
/// StoredImage has it; `reshards`: one is under way.
JobNumbers numbers_of(const KnownJob& known, std::string_view node, bool reshards);

}  // namespace ptc
