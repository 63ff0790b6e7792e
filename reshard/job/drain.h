// Nodes that shall hold nothing, so that they can be stopped without any loss.
//
// drained/<node> in the metadata says so, until it is taken away: {"since": <time>}. Nothing new is
// placed on such a node (who decides to compares that there is no such key), and the jobs' threads
// move what lies on it to others (resharder.h); until then it serves what it has,
// as any other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reshard/job/job.h"
#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

std::string drained_key(const std::string& node);
/// By name.
Result<std::vector<std::string>> drained_nodes(MetaClient& meta);

/// Puts the key, or says why it cannot be: the node is unknown, away or the last one in service, a
/// layout.json wants ranks on it, the others have not enough memory. What a checkpoint has lost
/// already holds up nothing. All `jobs` are those of the metadata. One that is there already:
/// nothing happens.
Result<> begin_drain(MetaClient& meta, Cluster& cluster, const std::vector<JobRef>& jobs,
                     ImageStore& images, const std::string& node);
/// kNotFound: it is not drained.
Result<> cancel_drain(MetaClient& meta, Cluster& cluster, const std::string& node);

}  // namespace ptc
