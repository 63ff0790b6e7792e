// Trials: how fast a model trains with each technique, number of GPUs and batch, by trying it on
// this machine.
//
// A technique is a program in a folder. `NAME search` reads one JSON object and prints another:
//
//   in   {"model": "gpt2", "batch": 64, "gpus": 2, "devices": [0, 1], "trial": {…}}   of jobs.json
//   out  {"tp": 1, "pp": 1, "dp": 2, "iteration_s": 0.41, "peak_bytes": 7000000000}
//        {"none": "why it cannot be had"}
//
// Its last line counts; whatever it prints before goes nowhere. Where it crashes, hangs, prints
// without end or says what cannot be, there is none, and why. `NAME execute` trains a job:
// ../README.md.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

struct Trial {
  std::string model, technique;
  uint64_t batch = 0;
  uint32_t gpus = 0;
  json::object what;  // "trial" of the job
};

/// Programs in the folder, by name. kInvalidArgument: it is none, or there are none in it.
Result<std::vector<std::string>> techniques_in(const std::string& library);

/// What is to be tried for these jobs: each model once, with batches from its least to its most and
/// 1, 2, 4 … `most_gpus` GPUs, and what `known` has no trial of. kInvalidArgument: a job does not
/// say its batches, or two jobs with one model say different things to try.
Result<std::vector<Trial>> trials_of(const JobsFile& file,
                                     const std::vector<std::string>& techniques, uint32_t most_gpus,
                                     const std::vector<ProfileRow>& known);

struct TrialSettings {
  std::string library;         // a folder of techniques
  std::string scratch;         // a directory for what they read and print
  std::string directory;       // where they start
  uint32_t gpus = 1;           // of this machine
  double within_s = 600;       // then a trial is killed
  bool one_at_a_time = false;  // else as many side by side as have GPUs
};

/// `row` without iteration_s: there is none, and `none` says why.
using OnTrial =
    std::function<Result<>(const Trial& trial, const ProfileRow& row, const std::string& none)>;

/// All of them, in this order as far as GPUs are free. `is_stopped`: those under way are killed,
/// and not told of. An error of `on_trial` ends it as well.
Result<> run_trials(const std::vector<Trial>& trials, const TrialSettings& settings,
                    const OnTrial& on_trial, const std::function<bool()>& is_stopped);

}  // namespace ptc::planner
