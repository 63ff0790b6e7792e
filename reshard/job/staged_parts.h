// Which nodes have written something into incoming/<name>, said where a commit finds it also when
// they are away: what nobody can ask for is not taken for what was never there.
//
//   staged/<job>/<name>/<node>      "<the job's id> <the store's>", put by the node when it closes
//   a
//                                   file in there, or one is moved or linked there
//
// Nobody follows these keys. Only their node takes them away: when it finds the directory gone or
// empty, as after its commit; at its next start if it was not there then. They go with the job,
// too, and not with the store that had the directory: what a node has lost is not taken for what it
// never had.
//
// incoming/<name>.without, written where the mv will be, names nodes that are gone on without. When
// it is closed, what those of them have said that are away is forgotten, and what those have lost
// that are back with another store. It speaks of what had been said by then: of nothing that they
// say when they are back, and of no node that answers. Of one that is gone, but counts as there
// until its lease ends, it says nothing: it is written once more then.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/job_place.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/base/step_pool.h"

namespace ptc {

/// What the node cannot give to a commit any more: kConflict.
Error lost_with_its_store(const std::string& node, const std::string& incoming);

/// Of a node without others nothing is said. Threads: any.
class StagedParts {
 public:
  explicit StagedParts(const JobPlace& place) : place_(place) {}

  /// Once; what lies in incoming/ by then counts as closed, but <name>.without as heeded.
  void start(StepPool& pool);
  /// Of directories that are gone by then nothing is said any more.
  void stop();
  /// `path` is relative to incoming/. A directory: what is in there.
  void closed(const std::string& path);
  /// Those that have said it of incoming/<incoming>, this one too.
  Result<std::set<std::string>> nodes_of(std::string_view incoming) const;
  /// Of a directory that is not here: whether a former store of this node had it, and said so.
  Result<bool> was_lost(std::string_view incoming) const;
  /// Before a commit asks who has something: <incoming>.without was heeded, if it is there.
  Result<> heed_without(const std::string& incoming);
  /// `node` has lost what it had said. Whether <incoming>.without says that this is gone on
  /// without: then it is forgotten.
  Result<bool> goes_without_lost(const std::string& incoming, const std::string& node);

  /// Of the store with this id, when it is opened.
  static Result<std::shared_ptr<const OwnStore>> own_store(MetaClient& meta, const Cluster& cluster,
                                                           const std::string& id);
  /// The keys of a job of this name, for who removes it.
  static Result<> add_keys(MetaClient& meta, std::string_view job, std::vector<std::string>& keys);

  /// Whether anything is said at all.
  bool says() const { return place_.services.cluster->shares_bytes(); }

 private:
  using Time = StepPool::Time;
  struct Said {
    ino_t directory = 0;
    int64_t as_member = 0;  // another when this node was away since, and others forgot it perhaps
    Time when;
  };
  /// What <name>.without says, and what of it was lost when it was heeded.
  struct Without {
    int64_t changed_ns = 0;
    std::map<std::string, int64_t> revisions;  // of the keys, by node
  };
  std::optional<Time> say(const std::stop_token& stop);
  bool say_one(const std::string& incoming);  // false: later
  int64_t as_member() const;
  Result<std::vector<MetaEntry>> keys_of(std::string_view incoming) const;
  std::string name_of(ino_t directory) const;  // in incoming/; empty: it is not there any more
  static std::string prefix_of(std::string_view job);
  std::string value() const;
  bool is_of_this_job(std::string_view value) const;
  std::string key_of(std::string_view incoming) const;

  const JobPlace& place_;
  std::map<std::string, Said> said_;  // by name in incoming/; of the loop alone
  Mutex heeding_;                     // while <name>.without is heeded
  Mutex mutex_;
  std::set<std::string> written_ PTC_GUARDED_BY(mutex_);  // since the last step
  std::set<std::string> to_heed_ PTC_GUARDED_BY(mutex_);  // the same
  std::map<std::string, Without> without_ PTC_GUARDED_BY(mutex_);
  Loop loop_;  // last: its steps use the rest
};

}  // namespace ptc
