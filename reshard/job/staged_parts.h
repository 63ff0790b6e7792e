// Which nodes have written something into incoming/<name>, said where a commit finds it also when
// they are away: what nobody can ask for is not taken for what was never there.
//
//   staged/<job>/<name>/<node>      "<the job's id> <the store's>", put by the node when it closes
//   a
//                                   file in there, or one is moved or linked there
//
// Nobody follows these keys. They go with the directory, with its commit, and with the job; not
// with the store that had the directory: what a node has lost is not taken for what it never had.
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

  /// Once; what lies in incoming/ by then counts as closed.
  void start(StepPool& pool);
  /// Of directories that are gone by then nothing is said any more.
  void stop();
  /// `path` is relative to incoming/.
  void closed(const std::string& path);
  /// Those that have said it of incoming/<incoming>, this one too.
  Result<std::set<std::string>> nodes_of(std::string_view incoming) const;
  /// Of a directory that is not here: whether a former store of this node had it, and said so.
  Result<bool> was_lost(std::string_view incoming) const;
  /// It was committed, at this revision: what all had said by then goes.
  void committed(const std::string& incoming, int64_t revision);

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
    Time when;
  };
  std::optional<Time> say(const std::stop_token& stop);
  bool say_one(const std::string& incoming);                                // false: later
  bool forget_all_of(const std::string& incoming, int64_t revision) const;  // false: later
  std::string name_of(ino_t directory) const;  // in incoming/; empty: it is not there any more
  static std::string prefix_of(std::string_view job);
  std::string value() const;
  bool is_of_this_job(std::string_view value) const;
  std::string key_of(std::string_view incoming) const;

  const JobPlace& place_;
  std::map<std::string, Said> said_;  // by name in incoming/; of the loop alone
  Mutex mutex_;
  std::set<std::string> written_ PTC_GUARDED_BY(mutex_);             // since the last step
  std::map<std::string, int64_t> committed_ PTC_GUARDED_BY(mutex_);  // the same
  Loop loop_;                                                        // last: its steps use the rest
};

}  // namespace ptc
