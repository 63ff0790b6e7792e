// Where the mount is, and what a user's "JOB" or "JOB/CHECKPOINT" means in it. `ptc` does all its
// work through the files found here.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"

namespace ptc::cli {

/// Finds a ptcfs mount: `option` (-C); else $PTC_MOUNT; else the one that the current directory is
/// in; else the only one of this machine that this user may enter; else /mnt/ptc. Returns its top
/// directory. The error says what to do.
Result<std::string> find_mount(const std::string& option);

/// A job, and perhaps one of its checkpoints.
struct Target {
  std::string mount;
  std::string job;
  std::string checkpoint;  // empty: none was named

  std::string job_dir() const { return mount + "/" + job; }
  std::string checkpoint_dir() const { return job_dir() + "/checkpoints/" + checkpoint; }
  /// "llama" or "llama/base".
  std::string name() const { return checkpoint.empty() ? job : job + "/" + checkpoint; }
};

/// Reads JOB, JOB/CHECKPOINT, JOB/checkpoints/CHECKPOINT or a path into a mount (absolute or
/// beginning with a dot, or one that is there where no job has the name; the mount is then the one
/// it leads into). The job must exist unless `may_be_new`.
Result<Target> find_target(const std::string& mount_option, const std::string& text,
                           bool may_be_new = false);
/// The same for a command that wants a job alone.
Result<Target> find_job(const std::string& mount_option, const std::string& text,
                        bool may_be_new = false);

/// `target` with its checkpoint: the one named, checked to exist; else the one `current` leads to,
/// else the newest.
Result<Target> with_checkpoint(Target target);

/// Names in a directory, sorted, without those that begin with a dot.
Result<std::vector<std::string>> list_directory(const std::string& path);
Result<std::vector<std::string>> list_jobs(const std::string& mount);

/// A JSON file of the mount, which must be an object. Checkpoints of large models have long
/// meta.json files, so the limit is wide.
Result<json::object> read_json_file(const std::string& path);

/// Sends a request to the daemon through .ptc/ask and returns its "result". An answer that is not
/// "ok" becomes an error with the daemon's message.
Result<json::object> ask(const std::string& mount, const json::object& request,
                         std::chrono::milliseconds patience = std::chrono::minutes(1));

}  // namespace ptc::cli
