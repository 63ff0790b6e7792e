// The store of a node and the cluster that it belongs to (store_identity.h): found to fit when the
// node starts, and looked at again with every change that is taken over.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/cluster/tombstones.h"
#include "reshard/node/agreed_facts.h"
#include "reshard/node/join_jobs.h"
#include "reshard/node/store_identity.h"

namespace ptc {

struct MembershipOptions {
  std::string directory;
  std::string node;
  std::string cluster_name;  // --cluster
  std::string where;         // endpoints of etcd, for messages
  bool join = false;  // with jobs of its own, though the cluster has some; or with what the cluster
                      // has lost sight of
  /// Called with the store's id once it is known to fit, before the cluster learns of the start;
  /// may be empty.
  std::function<Result<>(const std::string& store)> begin;
  /// Called once the store fits, before anything is written; may be empty.
  std::function<Result<>(bool is_new)> check_let_in = nullptr;
  JobNames join_as = {};  // names that its jobs get in the cluster
};

/// Of a store that is alone: makes its identity, or fails when it belongs to a cluster.
Result<> open_alone(const std::string& directory, const std::string& node);

/// Threads: one at a time; the store's lock is held.
class StoreMembership {
 public:
  /// A store with nothing in it joins whatever cluster is there, and makes one where there is none.
  /// One that was alone joins with its jobs, by itself only if the cluster has none. kUnavailable,
  /// with what to do: the store belongs to another cluster, what was agreed is not what the store
  /// has seen, or it is an older copy of a store that was started since.
  static Result<std::unique_ptr<StoreMembership>> open(MembershipOptions options, MetaClient& meta,
                                                       Cluster& cluster);

  /// What is agreed, if it can have come of what this store has seen; else the cluster is
  /// distrusted.
  struct Agreed {
    bool whole = true;            // else `jobs` are those keys that changed since the copy was made
    std::vector<MetaEntry> jobs;  // all that begins with jobs/, by key
    std::vector<std::string> gone;  // keys, where it is not whole: none of a job
    Tombstones removed;             // read after the jobs
  };
  /// With thousands of jobs most is in the copy already: so what changed is read alone where that
  /// is all, unless `whole` is asked for. `more_gone` waits a moment for what note_gone() has not
  /// been told yet: a transaction's deletions come one by one. false: nothing came.
  Result<Agreed> look(bool whole = false, const std::function<bool()>& more_gone = {});
  /// The keys of a job as they are agreed now, but for its data set's, and their revisions.
  std::map<std::string_view, int64_t> keys_of(const std::string& job, const Agreed& agreed) const;
  /// A key was deleted, at this revision. Who never hears of it looks at all of them.
  void note_gone(std::string key, int64_t revision);
  /// That has been taken over here: the copy follows, and, if all that was removed is gone, the
  /// others learn which tombstones were carried out.
  void taken_over(const Agreed& agreed, const std::vector<MetaEntry>& drained, bool removed);
  /// Keys that were put meanwhile.
  void note(std::vector<MetaEntry> entries);

 private:
  StoreMembership(MembershipOptions options, MetaClient& meta, Cluster& cluster)
      : options_(std::move(options)), meta_(meta), cluster_(cluster) {}
  Error refuse(std::string_view what, std::string_view to_do) const;
  Result<> find_cluster();
  Result<> take_identity(const ClusterIdentity& cluster);
  Result<> check_seen(const ClusterIdentity& cluster);
  Result<> check_name_is_free(const ClusterIdentity& cluster) const;
  Result<> join_with_jobs(const ClusterIdentity& cluster);
  Result<> register_store();
  Result<> forget_replaced();
  Result<std::optional<Agreed>> look_at_changes();
  std::chrono::steady_clock::duration whole_after() const;
  int64_t carried_out_of(const Agreed& agreed) const;
  bool are_worth_a_look(const Tombstones& removed, int64_t done) const;  // of those beyond
  Result<> remove_tombstones(const Tombstones& removed);
  void take_stores();
  bool write_facts();

  MembershipOptions options_;
  MetaClient& meta_;
  Cluster& cluster_;
  StoreIdentity identity_;
  AgreedFacts facts_;
  /// When all of jobs/ was read last, and found to be what it can be, with all looks since.
  std::optional<std::chrono::steady_clock::time_point> believed_whole_;
  /// The latest revision in the copy under jobs/ that is not beyond what was read of all of it.
  std::optional<int64_t> latest_known_;
  std::map<std::string, int64_t> gone_;  // of note_gone(), and not taken yet
  bool lacks_gone_ = false;              // the last look found fewer keys than there should be
  int64_t stores_taken_at_ = -1;         // the revision of kMembership then
  bool facts_behind_ = false;            // and that is in the log
  RegisteredStore own_;                  // as the registry of stores has it
  bool all_removals_ = true;
  bool replaces_ = false;  // stores of its node that may still have been there when it registered
};

}  // namespace ptc
