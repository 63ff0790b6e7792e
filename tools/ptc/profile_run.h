// ptc profile run: tries how fast the models of jobs train on this machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc::cli {

struct ProfileRunOptions {
  std::string file;                    // jobs.json
  std::optional<std::string> output;   // else the profile that it names
  std::optional<std::string> library;  // else the techniques that come along
  std::vector<std::string> techniques;
  std::optional<std::string> gpus;  // of this machine; else those of the largest node
  std::string device, within = "600";
  bool one_at_a_time = false, again = false;
};

/// Each trial is in the table as soon as it has ended.
Result<int> run_profile_run(const ProfileRunOptions& options);

}  // namespace ptc::cli
