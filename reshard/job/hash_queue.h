// Files of incoming/ are hashed when they are closed, so that a commit need not.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/intake/commit.h"
#include "reshard/ptc/layout.h"
#include "store/base/mutex.h"
#include "store/base/step_pool.h"

namespace ptc {

/// One at a time, in the order in which they were closed. One that can be written still, through a
/// mapping that outlives the close, is asked for again for a second. What is wrong with one, or not
/// hashed in time, the commit sees to. Threads: any.
class HashQueue {
 public:
  /// What a file is taken for that says nothing of its own: written under `spec`, by a model as
  /// that of `previous` (null: of which nothing is known).
  struct Expected {
    LayoutSpec spec;
    CheckpointRef previous;
  };
  HashQueue(std::string job, std::string incoming_dir, std::function<Expected()> expected)
      : job_(std::move(job)),
        incoming_dir_(std::move(incoming_dir)),
        expected_(std::move(expected)) {}

  void start(StepPool& pool);  // once
  void stop();                 // waits for what is being hashed
  /// `path` is relative to incoming/: <name>/rank/<r>/<path>.
  void closed(const std::string& path);
  /// Nothing of incoming/<incoming> is hashed here from now on, but for what is closed later.
  void leave(const std::string& incoming);

  /// What was hashed, here and by commits.
  HashCache& hashes() { return hashes_; }
  const HashCache& hashes() const { return hashes_; }

 private:
  struct Waiting {
    std::string path;
    std::chrono::milliseconds pause{1};  // before it is asked for again
  };
  std::optional<Waiting> take_next() PTC_REQUIRES(mutex_);  // the next that is due
  void ask_again(Waiting one, const std::stop_source& stop);
  std::optional<StepPool::Time> hash_next(const std::stop_token& stop);  // one
  /// Whether it is seen to; false: somebody may write it still.
  bool hash(const std::string& path, Expected expected, std::stop_token stop);

  const std::string job_, incoming_dir_;
  const std::function<Expected()> expected_;
  HashCache hashes_;
  Mutex mutex_;
  std::deque<Waiting> waiting_ PTC_GUARDED_BY(mutex_);
  std::multimap<StepPool::Time, Waiting> again_ PTC_GUARDED_BY(mutex_);  // when they are due
  std::string hashing_
      PTC_GUARDED_BY(mutex_);  // the name in incoming/ of which a file is being hashed
  std::stop_source stop_hashing_ PTC_GUARDED_BY(mutex_);  // ends that
  Loop loop_;                                             // last: its steps use the rest
};

}  // namespace ptc
