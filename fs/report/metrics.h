// .ptc/metrics: what this mount counts, for Prometheus.
#pragma once

#include <string>

#include "fs/tree/tree.h"

namespace ptc {

/// Counters count from the start of the daemon. Labels are operations, jobs, and few fixed words.
std::string metrics_text(Tree& tree);

}  // namespace ptc
