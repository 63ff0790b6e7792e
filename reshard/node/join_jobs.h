// The jobs of a store that was alone, brought into a cluster.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// Names of jobs: of the store alone, of the cluster alone, and different ones under one name.
/// Those that have been brought over already are in none of these.
struct ComparedJobs {
  std::vector<std::string> own, others, in_both;
  std::vector<std::string>
      there_already;  // of the store: the cluster has it, under any name, or had
};
/// `as`: names that jobs of the store get in the cluster, by those that they have.
using JobNames = std::map<std::string, std::string, std::less<>>;
Result<ComparedJobs> compare_jobs(MetaClient& own, MetaClient& cluster, const JobNames& as = {});
/// "llama=llama-b".
Result<> take_job_name(std::string_view text, JobNames& as);
/// kInvalidArgument: there is no such job to get another name, or the store has that for something
/// else.
Result<> check_job_names(MetaClient& own, const std::string& directory, const JobNames& as);

/// All that `own` knows of its jobs, in steps: a job is there with the last of its keys. Where
/// their bytes lie is said anew, in files beside the old ones: on `node`. May be done again after a
/// crash. Every step compares `identity`. The directories of jobs with other names get these.
Result<> join_jobs(MetaClient& own, MetaClient& cluster, const std::string& directory,
                   const std::string& node, const JobNames& as,
                   const MetaTransaction::Compare& identity);

}  // namespace ptc
