// A job's status.json.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/progress.h"
#include "tools/ptc/text.h"

namespace ptc::cli {

struct JobStatus {
  std::string job;
  std::string state;  // idle, resharding, failed
  uint64_t revision = 0;
  uint64_t in_force_revision = 0;
  std::string layout;  // in force
  std::string wanted;
  std::string checkpoint;  // that `current` shows; empty: none
  std::string last_error;  // empty: none
  json::object raw;

  /// Nothing is running and nothing is about to.
  bool settled() const {
    return state == "failed" || (state == "idle" && in_force_revision == revision);
  }
};

Result<JobStatus> read_status(const Target& target);

/// "copying base", from "progress".
std::string phase_text(const json::object& progress);
/// How far a reshard is, and its mean rate so far; nullopt while none runs.
std::optional<ProgressView> progress_of(const JobStatus& status);

/// "w1 up (draining, 1.2 GiB left)": an entry of "nodes".
std::string node_text(const json::object& node);

/// One row for each job, in this order: what `ptc ls` and `ptc top` list.
Table job_table(const std::vector<JobStatus>& jobs);
/// One row for each checkpoint: what `ptc ls JOB` and `ptc status` list.
Table checkpoint_table(const JobStatus& status);

/// Watches a job until it is settled, with a progress bar on standard error. kCancelled when
/// `timeout_seconds` (≤ 0: none) have passed.
Result<JobStatus> wait_until_settled(const Target& target, double timeout_seconds);

/// One or two sentences on how it settled, as `ptc wait` prints them.
std::string settled_text(const JobStatus& status);

}  // namespace ptc::cli
