// The jobs of a store, by name.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/job.h"
#include "store/base/mutex.h"

namespace ptc {

/// Threads: any. Who makes, removes or takes over jobs holds `changes` all the while: then nobody
/// else does.
class JobTable {
 public:
  Mutex changes;  // before all locks of jobs

  JobRef find(std::string_view name) const {
    MutexLock lock(mutex_);
    auto it = jobs_.find(name);
    return it == jobs_.end() ? nullptr : it->second;
  }
  std::vector<JobRef> list() const {  // by name
    MutexLock lock(mutex_);
    std::vector<JobRef> list;
    for (const auto& [name, job] : jobs_) list.push_back(job);
    return list;
  }
  size_t count() const {
    MutexLock lock(mutex_);
    return jobs_.size();
  }
  void insert(const JobRef& job) PTC_REQUIRES(changes) {
    MutexLock lock(mutex_);
    jobs_.emplace(job->name(), job);
  }
  void erase(const std::string& name) PTC_REQUIRES(changes) {
    MutexLock lock(mutex_);
    jobs_.erase(name);
  }

 private:
  mutable Mutex mutex_;
  std::map<std::string, JobRef, std::less<>> jobs_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
