// What was written into incoming/ and not committed, and is not being written any more.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

namespace ptc::cli {

struct Leftover {
  std::string job;
  std::string name;        // incoming/<name>
  uint64_t bytes = 0;      // of its files
  std::time_t latest = 0;  // when the latest of them was written
  bool all_seen = true;    // false: it has more files than were looked at, or some are hidden
};

/// Of which nothing was written in the last minutes, by name. Looks at each file, of very many only
/// at the first. What this user may not see is left out.
std::vector<Leftover> leftovers_of_job(const std::string& mount, const std::string& job);
/// Of all jobs, the largest first.
std::vector<Leftover> leftovers_of_mount(const std::string& mount);

}  // namespace ptc::cli
