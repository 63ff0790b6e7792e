// A large cluster, and what each change costs it: how long it takes, how much is agreed on, and how
// often nodes call each other; with the goals of that. No faults but those that are measured, and
// nothing else is checked but that each change comes to its end.
#pragma once

#include <cstdint>
#include <filesystem>

namespace ptc::sim {

struct ScaleOptions {
  uint64_t seed = 1;
  unsigned nodes = 1000;
  std::filesystem::path directory;
  bool verbose = false;
};

/// Prints a line for each change, as tests/bench/README.md has them; false: one did not come to its
/// end, or missed a goal.
/// Threads: one at a time in a process.
bool run_scale(const ScaleOptions& options);

}  // namespace ptc::sim
