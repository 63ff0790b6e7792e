// What is decided, at work: jobs.json and a mount in, layouts saved and processes started.
#pragma once

#include <boost/json/object.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"
#include "tools/planner/run/decider.h"
#include "tools/planner/run/mounted_job.h"

namespace ptc::planner {

struct LiveSettings {
  std::string mount;   // its top directory
  std::string file;    // jobs.json; read again whenever it changes
  std::string logs;    // a directory, which is made; what jobs print is there
  std::string device;  // in the place of the file's; may be empty
  struct FixedPrices {
    double change_s = 0, start_s = 0;
  };
  std::optional<FixedPrices> prices = {};  // none: by ptcfs's own plan and what changes took
  double every_s = 60;                     // decided this often at least
  bool until_done = false;                 // ends when no job has anything left to do
  bool drops = false;  // who has no room when it comes is given up, and does not wait
};

struct LiveUses {
  std::function<void(const std::string& line)> say;
  AskMount ask;
  std::function<bool()> is_stopped;
};

/// Carries out what `decider` says, job by job, until it is stopped or all is done; jobs go on when
/// it ends, and the next one finds them. kBusy: another one is at work in this mount.
/// kInvalidArgument: the file is wrong, or does not fit the mount. While it runs a file that has
/// become wrong is said, and the one before holds. Returned are the jobs that are given up.
Result<std::vector<std::string>> run_live(LiveSettings settings, LiveUses uses, Decider& decider);

/// A job that was left alone or given up is decided for again, by whoever decides or by the next
/// one. False: it is neither, and nothing was done.
Result<bool> adopt(const std::string& mount, const std::string& job);

}  // namespace ptc::planner
