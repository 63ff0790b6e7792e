// ptc profile fit.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc::cli {

struct ProfileFitOptions {
  std::string file;
  std::optional<std::string> output, gpus, node, sums;
  std::vector<std::string> bytes;  // MODEL=N
};

Result<int> run_profile_fit(const ProfileFitOptions& options);

}  // namespace ptc::cli
