// The jobs of a store that was alone, brought into a cluster.
#pragma once

#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// Names of jobs: of the store alone, of the cluster alone, and different ones under one name.
/// Those that have been brought over already are in none.
struct ComparedJobs {
  std::vector<std::string> own, others, in_both;
};
Result<ComparedJobs> compare_jobs(MetaClient& own, MetaClient& cluster);

/// All that `own` knows of its jobs, in steps: a job is there with the last of its keys. Where
/// their bytes lie is said anew, in files beside the old ones: on `node`. May be done again after a
/// crash. Every step compares `identity`.
Result<> join_jobs(MetaClient& own, MetaClient& cluster, const std::string& directory,
                   const std::string& node, const MetaTransaction::Compare& identity);

}  // namespace ptc
