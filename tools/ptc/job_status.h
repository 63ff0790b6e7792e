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
  std::string checkpoint;    // that `current` shows; empty: none
  std::string last_error;    // empty: none
  std::string layout_error;  // why layout.json was refused; empty: one was accepted since
  json::object raw;

  /// Nothing is running and nothing is about to.
  bool settled() const {
    return state == "failed" || (state == "idle" && in_force_revision == revision);
  }
};

Result<JobStatus> read_status(const Target& target);
/// Of all jobs of the mount, by name; without those that this user may not see, which are counted
/// in `hidden`, and those that are removed meanwhile.
Result<std::vector<JobStatus>> read_statuses(const std::string& mount, size_t* hidden);
/// "2 jobs of other users are not shown", on standard error; 0: nothing.
void say_hidden(size_t hidden);

/// Why the job refuses something: what it says of that in files, once it has, beside the errno.
class Reason {
 public:
  /// Before it is asked for. `error_file`: where it may be said first; empty: only in status.json.
  explicit Reason(Target target, std::string error_file = "");
  /// After it was refused with `error`: the job's words, or else what the errno stands for. One
  /// line or more.
  std::string text(int error) const;

 private:
  std::string file_version() const;
  std::string last_error(bool whole) const;
  const Target target_;
  const std::string error_file_;
  const std::string file_before_, error_before_;
};

/// "copying base", from "progress".
std::string phase_text(const json::object& progress);
/// How far a reshard is, and its mean rate so far; nullopt while none runs.
std::optional<ProgressView> progress_of(const JobStatus& status);

/// "w1 up (draining, 1.2 GiB left)": an entry of "nodes".
std::string node_text(const json::object& node);
/// Of an entry of nodes.json: it counts as there, but has not answered this node lately.
bool is_unheard(const json::object& node);
/// "away for 3 min: why; what that means", of nodes.json; "": nodes agree.
std::string agreement_text(const json::object& nodes_json);
/// The same of the node whose mount this is, as it knows now.
std::string agreement_text(const std::string& mount);

/// One row for each job, in this order: what `ptc ls` and `ptc top` list.
Table job_table(const std::vector<JobStatus>& jobs);
/// One row for each checkpoint: what `ptc ls JOB` and `ptc status` list.
Table checkpoint_table(const JobStatus& status);

/// Why a checkpoint that is there cannot be shown; nullopt: it can, or there is none of the name.
std::optional<std::string> why_unreadable(const JobStatus& status, std::string_view checkpoint);

/// Watches a job until it is settled, with a progress bar on standard error. kCancelled when
/// `timeout_seconds` (≤ 0: none) have passed.
Result<JobStatus> wait_until_settled(const Target& target, double timeout_seconds);

/// One or two sentences on how it settled, as `ptc wait` prints them.
std::string settled_text(const JobStatus& status);

/// "it runs on 2 GPUs with batch 8 (…); 1 GPU before, and now these because b has ended"; "": no
/// autoscaler has the job.
std::string autoscale_text(const std::string& job_dir);

}  // namespace ptc::cli
