// Who runs on this machine, as /proc says.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc::planner {

/// What /proc/PID/stat says of one.
struct ProcessFacts {
  pid_t pid = 0, parent = 0, group = 0, session = 0;
  bool has_ended = false;  // all its threads have, and nobody has reaped it
  uint64_t ticks = 0;      // from the boot of the machine to its start

  /// The boot and the ticks: no other process has the same number and that.
  std::string started_at() const;
};

/// none: there is no such process.
std::optional<ProcessFacts> facts_of(pid_t pid);
/// One for each, in no order; an error where it cannot be said who there is. Cost: O(processes of
/// the machine).
Result<std::vector<ProcessFacts>> all_processes();
std::string boot_id();

/// A variable of the environment that it was started with, as far as it has not written over it.
/// none: it cannot be said, for it is just about to start or to end. "": it has none, or is another
/// user's. Cost: waits for who changes its memory's layout just then.
std::optional<std::string> variable_of(pid_t pid, const std::string& name);

/// Sends it to the process that `is_it` is still true of; no other one gets it, whose number it may
/// have by now.
void signal_if(pid_t pid, int signal, const std::function<bool(pid_t)>& is_it);

}  // namespace ptc::planner
