// How many bytes and files a job, and a user in all jobs, may have on this node.
//
// Counted is what lies outside of checkpoints (incoming/, and what users keep beside layout.json,
// extended attributes with it), as it changes, and checkpoints' bytes on this node, by who
// committed them, when they change. Nothing is scanned but at the start, when a checkpoint comes,
// goes or is moved, and when a commit was answered. Files are those outside of checkpoints,
// directories and links among them, the job's own, too
// (which counts on the node that made it, and elsewhere from the first change of what it has
// there). Texts that are saved (layout.json …), and drafts of them, are the job's owner's.
//
// What is removed, itself or with its job, is counted until its memory is free: a file until the
// last one closes it, an image of a checkpoint until nobody reads it. So an account can outlive its
// job. The kernel tells of that a moment after unlink() has returned: a write that would be refused
// for want of what its user, or somebody in its job, removed just now may wait for that moment.
//
// Where a limit concerns a job, its files are written and read through the daemon: what the kernel
// writes by itself nobody counts. Files that were open before there was a limit are looked at
// whenever somebody wants more; they grow all the same. A reshard, which is nobody's wish alone, is
// not held up.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fs/tree/errno.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

struct QuotaLimit {
  uint64_t bytes = UINT64_MAX, files = UINT64_MAX;
  bool any() const { return bytes != UINT64_MAX || files != UINT64_MAX; }
  /// "64G", "64G,1M", "none,100000" (or with ';', where commas separate options): sizes as --memory
  /// has them, counts likewise. "none": no limit.
  static Result<QuotaLimit> parse(std::string_view text);
};

struct QuotaAmount {
  int64_t bytes = 0, files = 0;
};

/// Threads: any.
class Quotas {
  struct Job;

 public:
  using ByUser = std::map<uid_t, QuotaAmount>;
  /// What one job has, for as long as anything of it takes memory.
  using Account = std::shared_ptr<Job>;

  /// Of the mount: for each user but root, and each job that has none of its own.
  void set_limits(QuotaLimit user, QuotaLimit job);
  /// nullopt: that of the mount. A job is due to be counted anew where it was not limited, or its
  /// owner, whose its texts are, was another.
  void set_job_limit(const std::string& job, std::optional<QuotaLimit> limit, uid_t owner = 0);
  bool is_due(const std::string& job) const;

  /// Whether anything limits what is in the job.
  bool limits(const std::string& job) const;
  /// Those of the job, with what there is: nullopt where it has none.
  struct Space {
    QuotaLimit limit;
    QuotaAmount used;
  };
  std::optional<Space> space_of(const Account& account);

  /// That of the job which has this name now.
  Account account(const std::string& job);
  std::vector<std::string> jobs() const;

  /// Counts what is about to be there; EDQUOT where that is more than the user or the job may have.
  FsResult<> reserve(const Account& account, uid_t user, QuotaAmount amount);
  /// The same; before it is refused it waits, 0.1 s at most, for what of that user or job was
  /// removed just now. A few at most wait at the same time.
  FsResult<> reserve_in_a_moment(const Account& account, uid_t user, QuotaAmount amount);
  /// Whether the user may have as much more; of what will be counted by recount().
  bool has_room(uid_t user, QuotaAmount amount);
  /// Counts what has come or gone. Never more goes than there is.
  void add(const Account& account, uid_t user, QuotaAmount amount);

  /// An image of a checkpoint, by who committed it. It is counted while it is one, and then until
  /// nobody holds it.
  struct Held {
    uid_t user;
    int64_t bytes;
    std::weak_ptr<const void> image;
  };
  struct Counted {
    ByUser outside;  // of checkpoints
    std::vector<Held> images;
  };
  /// Counts a job anew. While something changes and is counted, the gate is held shared; here
  /// alone. `count` returns what is there by name.
  void recount(const std::string& job, const std::function<Counted()>& count);
  static SharedMutex& gate(const Account& account);

  /// The job is gone: another one of its name has an account of its own. settle() is to follow,
  /// with no lock held.
  Account detach(const std::string& job);
  /// From now on only what is open, or held, is counted.
  void settle(const Account& account);

  /// A file that is open, or has lost its last name; or something else that recount() does not find
  /// by name.
  struct Seen {
    uid_t user = 0;
    QuotaAmount amount;
    bool named = true;  // then it is counted by its name
  };
  /// `look` is called, by one at a time, until forget_file(); also with the gate held, but with no
  /// lock that others wait for. `by_kernel`: it grows without anybody being asked.
  void know_file(const Account& account, const void* key, std::function<Seen()> look,
                 bool by_kernel);
  /// It is counted by itself from now on.
  void note_alone(const Account& account, const void* key);
  /// The same: it has lost its last name, and what is counted of it stays so. It was this user's.
  void note_nameless(const Account& account, const void* key, uid_t user);
  /// It is about to be closed, and its space to be free unless it has a name.
  void forget_file(const Account& account, const void* key);

 private:
  /// It may be on a file system that is slow: so it is looked at without mutex_.
  struct File {
    explicit File(std::function<Seen()> how) : look(std::move(how)) {}
    Mutex looking;                                       // before mutex_
    std::function<Seen()> look PTC_GUARDED_BY(looking);  // none: it is forgotten
    // The rest is guarded by the mutex_ of all.
    bool by_kernel = false;
    bool alone = false;  // counted by itself
    bool gone = false;   // not counted any more
    Seen seen;           // when it was looked at last
  };
  using FileRef = std::shared_ptr<File>;
  struct Job {
    SharedMutex gate;
    std::optional<QuotaLimit> limit;
    std::optional<uid_t> owner;  // when it was limited last
    bool due = false;
    QuotaAmount all;
    ByUser by_user;
    std::unordered_map<const void*, FileRef> files;
    std::unordered_map<const void*, Held> images;  // of checkpoints
    std::vector<Held> removed;                     // and of no checkpoint any more
    bool gone = false, looked_after = false;
  };
  using Clock = std::chrono::steady_clock;
  /// It was removed, and may take its space for just a moment more.
  struct Going {
    Clock::time_point until;
    FileRef file;                     // or
    std::weak_ptr<const void> image;  // of a checkpoint
    const Job* job;                   // for being compared alone
    uid_t user;
  };
  void note_going_locked(const Job& job, uid_t user, FileRef file,
                         std::weak_ptr<const void> image = {}) PTC_REQUIRES(mutex_);
  bool is_any_going_locked(const Job& job, uid_t user) PTC_REQUIRES(mutex_);
  bool fits_locked(const Job& job, uid_t user, const QuotaAmount& amount) PTC_REQUIRES(mutex_);
  QuotaLimit limit_of(const Job& job) const PTC_REQUIRES(mutex_) {
    return job.limit.value_or(each_job_);
  }
  Account account_locked(const std::string& job) PTC_REQUIRES(mutex_);
  void add_locked(Job& job, uid_t user, QuotaAmount amount) PTC_REQUIRES(mutex_);
  void clear_locked(Job& job) PTC_REQUIRES(mutex_);
  /// It has something that changes by itself.
  void look_after_locked(const Account& account) PTC_REQUIRES(mutex_);
  /// What grew, or went, by itself is counted.
  void look();
  using AllSeen = std::unordered_map<const void*, Seen>;
  AllSeen look_at_all(Job& job);

  mutable Mutex mutex_;
  QuotaLimit each_user_ PTC_GUARDED_BY(mutex_), each_job_ PTC_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Account> jobs_ PTC_GUARDED_BY(mutex_);
  std::vector<Account> looked_after_ PTC_GUARDED_BY(mutex_);
  std::unordered_map<uid_t, QuotaAmount> users_ PTC_GUARDED_BY(mutex_);
  ConditionVariable went_;
  unsigned waiting_ PTC_GUARDED_BY(mutex_) = 0;     // for what goes
  std::deque<Going> going_ PTC_GUARDED_BY(mutex_);  // the oldest first
};

}  // namespace ptc
