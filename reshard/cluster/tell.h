// What one node decided is seen on all others when the call that decided it returns.
#pragma once

#include <chrono>
#include <string>

#include "reshard/cluster/cluster.h"

namespace ptc {

/// Asks every other living node to take over now what is decided about `job`, which its watch would
/// have it do a moment later: who made, changed, committed or removed something finds it so on any
/// node. Best effort: a node that does not answer in time (`at_most`; 0: as peer_table.h says) is
/// not waited for.
/// Threads: any, but without a lock that a synchronisation takes: two nodes may tell each other at
/// once.
void tell_others(Cluster& cluster, const std::string& job, std::chrono::milliseconds at_most = {});

/// The same of what was decided about the job's data set (Job::decide).
void tell_others_of_data_set(Cluster& cluster, const WhichJob& job);

}  // namespace ptc
