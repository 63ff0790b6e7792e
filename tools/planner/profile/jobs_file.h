// jobs.json: what is to be trained, on what.
//
//   { "cluster": {"nodes": {"w0": 8, "w1": 8},             // GPUs by node; or [8, 8]
//                 "device": "A100"},                       // their kind, as profiles name it
//     "profiles": "profiles.csv",                           // or several; beside jobs.json
//     "jobs": [
//       {"name": "a", "model": "gpt2", "samples": 1000000, "batch": 256},
//       {"name": "b", "model": "bert", "samples": 5e6, "batch": [64, 1024], "technique": "ddp",
//        "now": {"gpus": 4, "batch": 256},                 // what it has, if it runs
//        "deadline": "2030-06-01T18:00Z",                  // by when it is to be done
//        "state": "bert-base",                             // a directory of its tensors, or bytes
//        "run": ["./train.sh", "b"]} ]}                    // how "ptc autoscale" starts it
//
// "trial" is an object for techniques ("ptc profile run"). "run" may say more: {"command":
// ["./train.sh"], "directory": "..", "stops_within": 600, "progress_within": 3600} (seconds).
#pragma once

#include <boost/json/object.hpp>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

struct NodeOfCluster {
  std::string name;
  uint32_t gpus = 0;
};

/// GPUs of a node by their numbers there; they need not lie one behind the other.
struct OnNode {
  uint32_t node = 0;           // an index
  std::vector<uint32_t> gpus;  // ascending

  bool operator==(const OnNode&) const = default;
};

struct JobToTrain {
  std::string name, model;
  double samples = 0;  // to be read; > 0. Without a mount: still to be read
  uint64_t least_batch = 1, most_batch = UINT64_MAX;
  std::string technique;  // what its user would take; empty: any
  struct Now {
    uint32_t gpus = 0;
    uint64_t batch = 0;  // 0: not said
  };
  std::optional<Now> now = {};  // none: it has not begun
  struct Run {
    std::vector<std::string> command;              // a program and its arguments
    std::string directory;                         // where it starts; relative to that of the file
    double stops_within_s = 600;                   // after SIGTERM; then it is killed
    std::optional<double> progress_within_s = {};  // of its start and of each progress

    bool operator==(const Run&) const = default;
  };
  std::optional<Run> run = {};
  json::object trial = {};  // what techniques are told: "ptc profile run"
  using Time = std::chrono::system_clock::time_point;
  std::optional<Time> deadline = {};
  std::string deadline_is_past = {};  // when it was read: where it stands, and what to do
  /// What changes of layout move: bytes; or files whose headers say it, beside jobs.json.
  double state_bytes = 0;
  std::string state_directory = {};
  size_t number = 0;  // in its file
};

struct JobsFile {
  std::vector<NodeOfCluster> nodes;
  std::string device;                 // the kind of their GPUs; empty: the only one of the profiles
  std::vector<std::string> profiles;  // paths, as they stand there
  std::vector<JobToTrain> jobs;
  std::string name, text;  // its own, for errors

  uint32_t gpus() const;  // of all nodes
  /// In the place of what the file says; empty: that stays.
  void choose_device(const std::string& chosen);
  /// "jobs.json: line 3, column 7" of what `path` leads to, or of the innermost part that is there.
  std::string place(const std::vector<std::string>& path) const;
  /// kInvalidArgument: "jobs.json: line 3, column 7: job 'a': …", where the job's `key` stands, or
  /// the job, if it has none.
  Error error(const JobToTrain& job, const std::string& key, std::string_view message) const;

  bool device_is_chosen = false;  // by its user: it stands in no file
};

/// kInvalidArgument: "name: line 3, column 7: …".
Result<JobsFile> parse_jobs_file(std::string_view text, const std::string& name);

/// The file, and the rows of its profiles.
struct JobsAndProfiles {
  JobsFile file;
  std::vector<ProfileRow> rows;
  std::vector<std::string> read = {};     // which files; rows tell theirs by its number here
  std::vector<std::string> remarks = {};  // on them, for their user

  /// "profiles.csv: line 3, column 7"
  std::string place(const ProfileRow& row) const;
};
enum class PastDeadlines { kRefused, kKept };
/// "-" is standard input. Profiles lie beside the file, and those of a pipe in the current
/// directory. kInvalidArgument: a deadline is past already, and such are refused. A profile that is
/// not there is named where the file names it.
Result<JobsAndProfiles> read_jobs_file(const std::string& path,
                                       PastDeadlines past = PastDeadlines::kRefused);

/// Whoever has no deadline comes after all who have one.
bool is_due_before(const JobToTrain& a, const JobToTrain& b);
/// Seconds until then; negative: it is past.
double seconds_until(JobToTrain::Time time);
/// "2030-06-01T18:00:00Z", "2030-06-01T20:00+02:00"; none: it is no such time.
std::optional<JobToTrain::Time> parse_time(std::string_view text);

/// Those rows that are of the jobs' models, on the cluster's kind of GPU. kInvalidArgument, with
/// the place in the file: no profile has a job's model, or as rows_of_device().
Result<std::vector<const ProfileRow*>> rows_of_jobs(const JobsAndProfiles& from);

}  // namespace ptc::planner
