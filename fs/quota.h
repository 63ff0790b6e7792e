// How many bytes and files a job, and a user in all jobs, may have on this node.
//
// Counted is what lies outside of checkpoints (incoming/, and what users keep beside layout.json), as it changes, and
// checkpoints' bytes on this node, by who committed them, when they change. Nothing is scanned but at the start and when a
// checkpoint comes, goes or is moved. Files are those outside of checkpoints, directories and links among them.
//
// Where a limit concerns a job, its files are written and read through the daemon: what the kernel writes by itself
// nobody counts. A reshard, which is nobody's wish alone, is not held up.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "fs/errno.h"
#include "store/base/error.h"

namespace ptc {

struct QuotaLimit {
  uint64_t bytes = UINT64_MAX, files = UINT64_MAX;
  bool any() const { return bytes != UINT64_MAX || files != UINT64_MAX; }
  /// "64G", "64G,1M", "none,100000" (or with ';', where commas separate options): sizes as --memory has them, counts likewise. "none": no limit.
  static Result<QuotaLimit> parse(std::string_view text);
};

struct QuotaAmount {
  int64_t bytes = 0, files = 0;
};

/// Threads: any.
class Quotas {
 public:
  using ByUser = std::map<uid_t, QuotaAmount>;

  /// Of the mount: for each user but root, and each job that has none of its own.
  void set_limits(QuotaLimit user, QuotaLimit job);
  /// nullopt: that of the mount.
  void set_job_limit(const std::string& job, std::optional<QuotaLimit> limit);

  /// Whether anything limits what is in the job.
  bool limits(const std::string& job) const;
  /// Those of the job, with what there is: nullopt where it has none.
  struct Space {
    QuotaLimit limit;
    QuotaAmount used;
  };
  std::optional<Space> space_of(const std::string& job) const;

  /// Counts what is about to be there; EDQUOT where that is more than the user or the job may have.
  FsResult<> reserve(const std::string& job, uid_t user, QuotaAmount amount);
  /// Counts what has come or gone.
  void add(const std::string& job, uid_t user, QuotaAmount amount);

  /// Counts a job anew. While something changes and is counted, the gate is held shared; here alone. `count` returns what
  /// is there outside of checkpoints, and in them.
  void recount(const std::string& job, const std::function<std::pair<ByUser, ByUser>()>& count);
  std::shared_ptr<std::shared_mutex> gate(const std::string& job);
  void forget(const std::string& job);

  /// A file without a name takes space until the last one closes it: `amount` says how much, now.
  void add_nameless(const std::string& job, const void* file, uid_t user, std::function<QuotaAmount()> amount);
  /// It is closed, and its space free.
  void remove_nameless(const std::string& job, const void* file);

 private:
  struct Job {
    std::shared_ptr<std::shared_mutex> gate = std::make_shared<std::shared_mutex>();
    std::optional<QuotaLimit> limit;
    QuotaAmount all;
    ByUser by_user;
    std::unordered_map<const void*, std::pair<uid_t, std::function<QuotaAmount()>>> nameless;
  };
  QuotaLimit limit_of(const Job& job) const { return job.limit.value_or(each_job_); }
  void add_locked(Job& job, uid_t user, QuotaAmount amount);

  mutable std::mutex mutex_;  // all below
  QuotaLimit each_user_, each_job_;
  std::unordered_map<std::string, Job> jobs_;
  std::unordered_map<uid_t, QuotaAmount> users_;
};

}  // namespace ptc
