// What an autoscaler has written down of a job, in the job's directory: autoscale.json. ptcfs
// itself makes nothing of it but numbers for metrics; anybody who may write there may have written
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ptc {

struct AutoscaleNote {
  std::string state;  // "runs", "waits", …: lower-case letters and blanks, 16 at most
  uint64_t gpus = 0, batch = 0, changes = 0, failures = 0;
  /// Of the last decision.
  std::string why;  // 256 bytes at most
  uint64_t from_gpus = 0, to_gpus = 0;
  double price_s = 0;
};

/// `files_dir` is a job's. nullopt: there is none, or it is no such file. Reads 64 KiB at most.
std::optional<AutoscaleNote> read_autoscale_note(const std::string& files_dir);

}  // namespace ptc
