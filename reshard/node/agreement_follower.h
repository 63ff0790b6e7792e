// What a node does when what is agreed on changes: other nodes have made or removed jobs, or
// decided something about one; a node has come or gone, or shall be emptied.
//
// A watch only says that there is something. Then all of it is taken over, in this order:
//
// 1. What is agreed is looked at: unless it can have come of what this store has seen, nothing is
//    taken over (StoreMembership::look). Only what changed is read where that is enough.
// 2. Jobs that tombstones name go, with their directories. One that nothing names any more, and no
//    tombstone, stops it all.
// 3. Each job takes over what was decided about it (Job::follow), and those that are new here are
//    loaded.
// 4. Drafts of images that a former life of this node left go, now that it is known what all jobs
//    need.
// 5. This store's copy of what is agreed follows, and the others learn which tombstones were
//    carried out.
//
// A job of which something cannot be carried out now holds up no other; but 4 and 5 wait for it,
// and all is done again half a second later. A directory of a removed job that stays, of whatever
// cause, keeps 5 back alone, and is tried again every ten seconds. The first such reason is told,
// once. Files that describe a checkpoint come from other nodes while nothing is locked; then it is
// begun anew. Who makes or removes a job here meanwhile waits for 1, 2 and 4, and for one job that
// is loaded; not until thousands have heard that a node is away. Where only files cannot be had
// that describe a checkpoint (nodes that have them are away), 4 waits, and 5 does not: what was
// removed has gone. If no node that is there has them, that is tried again when one comes, or ten
// seconds later.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/node/job_table.h"
#include "reshard/node/store_contents.h"
#include "reshard/node/store_membership.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// What others decided was taken over.
struct TakenOver {
  std::optional<Error> lacking;  // Followed::lacking of a job
  std::optional<Error> left;     // a job was removed, and its directory cannot be
};

/// Who takes over what others decide. This one is of a node that is alone: nobody else decides.
class Follower {
 public:
  virtual ~Follower() = default;

  /// From now on it follows by itself. Something may have changed since the jobs were loaded.
  virtual Result<> start() { return ok(); }
  virtual void stop() {}
  /// Once this node decides nothing more: what was agreed by now is in the store's own copy, where
  /// the agreement store can be asked. Who is told later than a node stops is not told any more.
  virtual void note_last() {}

  /// Takes over all there is, now. kUnavailable: not all of it could be had.
  virtual Result<> sync() { return ok(); }
  /// The same; an error says that something of it was not carried out.
  virtual Result<TakenOver> take_over() { return TakenOver(); }
  /// Soon.
  virtual void want_sync() {}
  /// Waits until what others decided and who came or went by now is taken over, two seconds at
  /// most; false: it was already, or somebody has waited in vain of late.
  virtual bool catch_up() { return false; }

  /// Nodes that shall hold nothing (drain.h), by name, as of the last change heard of.
  virtual std::vector<std::string> drained() const { return {}; }
  /// Why what is known here may not be what is agreed on; empty: it was read under this node's
  /// lease. Files that other nodes do not give now are no reason. Asks nobody.
  virtual std::string behind() const { return {}; }
};

/// Of a node of a cluster. Threads: any. All that it is given outlives it.
class AgreementFollower final : public Follower {
 public:
  using MakeJob = std::function<JobRef(const std::string& name, const std::string& id)>;
  AgreementFollower(MetaClient& meta, Cluster& cluster, std::unique_ptr<StoreMembership> membership,
                    JobTable& jobs, StoreContents& contents, JobListener* listener,
                    MakeJob make_job)
      : meta_(meta),
        cluster_(cluster),
        membership_(std::move(membership)),
        jobs_(jobs),
        contents_(contents),
        listener_(listener),
        make_job_(std::move(make_job)) {}
  ~AgreementFollower() override { stop(); }

  Result<> start() override;
  void stop() override;
  void note_last() override;
  Result<> sync() override;
  Result<TakenOver> take_over() override;
  void want_sync() override;
  bool catch_up() override;
  std::vector<std::string> drained() const override;
  std::string behind() const override;

 private:
  void note_put(MetaEntry entry);
  void note_gone(const MetaEvent& event);
  bool note_looked_over(const MetaEvent& event);  // false: it says something else
  void follow(std::stop_token stop);
  Result<> note_failure(const std::string& name, Result<> taken_over, Result<>& first);
  /// What other nodes have to give before jobs can go on, by their ids; asked for without the lock.
  struct Fetches {
    struct OfJob {
      JobRef job;
      FetchedFiles fetched;
      std::vector<NamedFile> wanted;
    };
    std::map<std::string, OfJob> jobs;
    bool any() const;
  };
  struct Agreement {
    StoreMembership::Agreed agreed;
    std::vector<MetaEntry> drained_entries;
    std::vector<JobRef> known;
    std::map<std::string, std::string> to_load;  // ids by name
    Result<> carried_out = ok();
  };
  Result<Agreement> take_over_jobs() PTC_REQUIRES(turn_);
  Result<TakenOver> take_over_with(Fetches& fetches);
  Result<StoreMembership::Agreed> look() PTC_REQUIRES(turn_, jobs_.changes);
  /// What a job's state followed from when it was looked at last, in short: its keys and the nodes
  /// not in service, with their revisions.
  struct Looked {
    uint64_t keys = 0, drained = 0;
    friend bool operator==(const Looked&, const Looked&) = default;
  };
  Result<> load_new(const std::string& name, const std::string& id,
                    const Tombstones& removed_meanwhile, Fetches& fetches) PTC_REQUIRES(turn_);
  Result<> remove_opened(const std::map<std::string, std::string>& names, const Tombstones& removed)
      PTC_REQUIRES(turn_, jobs_.changes);

  MetaClient& meta_;
  Cluster& cluster_;
  /// Of who takes over; before JobTable::changes, which is not held while jobs follow.
  Mutex turn_;
  const std::unique_ptr<StoreMembership> membership_ PTC_PT_GUARDED_BY(turn_);
  JobTable& jobs_;
  StoreContents& contents_;
  JobListener* const listener_;
  const MakeJob make_job_;
  /// Name and id of jobs that have a directory here, and are not loaded yet.
  std::map<std::string, std::string> opened_ PTC_GUARDED_BY(turn_);
  bool failed_ PTC_GUARDED_BY(turn_) = false;  // to take all over, when that was tried last
  std::map<std::string, Looked> looked_ PTC_GUARDED_BY(turn_);  // by id
  std::atomic<bool> stops_ = false;

  mutable Mutex drained_mutex_;
  std::vector<std::string> drained_ PTC_GUARDED_BY(drained_mutex_);

  mutable Mutex mutex_;
  StoppableConditionVariable wanted_, synced_;
  bool stale_ PTC_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<std::string, int64_t>> gone_meanwhile_ PTC_GUARDED_BY(mutex_);
  uint64_t syncs_wanted_ PTC_GUARDED_BY(mutex_) = 0, syncs_done_ PTC_GUARDED_BY(mutex_) = 0;
  std::vector<std::string> synced_alive_
      PTC_GUARDED_BY(mutex_);  // nodes, when the last sync began that was done
  /// The own one, then. Who leaves gives it up by letting go of it: nobody else holds it.
  std::weak_ptr<const MetaLease> synced_lease_ PTC_GUARDED_BY(mutex_);
  std::string not_synced_ PTC_GUARDED_BY(mutex_);  // why the last sync failed; empty: it did not
  std::chrono::steady_clock::time_point next_catch_up_ PTC_GUARDED_BY(mutex_);
  std::vector<MetaEntry> put_meanwhile_
      PTC_GUARDED_BY(mutex_);  // of data sets, for the copy of what is agreed
  std::shared_ptr<void> watch_, drained_watch_;
  std::jthread thread_;
};

/// Names of jobs, and their ids: of the keys under jobs/.
std::map<std::string, std::string> jobs_in(const std::vector<MetaEntry>& entries);

}  // namespace ptc
