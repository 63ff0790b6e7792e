// Who runs on this machine, as /proc says.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ptc::planner {

/// What /proc/PID/stat says of one.
struct ProcessFacts {
  pid_t pid = 0, parent = 0, group = 0, session = 0;
  bool is_zombie = false;  // it has ended, and nobody has reaped it
  std::string started_at;  // the boot of the machine, and the ticks since
};

/// none: there is no such process.
std::optional<ProcessFacts> facts_of(pid_t pid);
/// One for each, in no order. Cost: O(processes of the machine).
std::vector<ProcessFacts> all_processes();
std::string boot_id();

/// Whether NAME=VALUE was in its environment when it was started; of another user's only root
/// knows.
bool was_started_with(pid_t pid, const std::string& name, const std::string& value);

/// Sends it to the process that `is_it` is still true of; no other one gets it, whose number it may
/// have by now.
void signal_if(pid_t pid, int signal, const std::function<bool(pid_t)>& is_it);

}  // namespace ptc::planner
