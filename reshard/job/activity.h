// What a job is busy with. Each thing under way has an Activity of its own, held by whoever does
// it: what one ends, or is told to stop, is no other's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

class Activities;

class Activity {
 public:
  enum class Kind {
    kReshard,  // led by this node
    kPart,     // this node's part of a reshard that another leads
    kTrim,     // copies beyond those that are wanted go; whatever else is to be done goes first
    kCommit,   // a checkpoint that is being committed, here or elsewhere
    kFetch,    // what describes a checkpoint, by its id, comes from another node: a file, to `to`
  };
  /// A checkpoint on its way from one layout to another, or out of incoming/; by name.
  struct Subject {
    Kind kind;
    std::string checkpoint, from, to;
  };
  /// As it is told to people.
  struct Progress {
    Subject subject;
    std::string phase;
    uint64_t bytes_done = 0, bytes_total = 0;
    double seconds = 0;
  };

  ~Activity();  // it is over
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  void begin(std::string_view phase);
  void begin(std::string_view phase, uint64_t bytes_total);  // of which nothing is done yet
  std::atomic<uint64_t>& bytes_done() { return bytes_done_; }
  std::stop_token stop_token() const { return stop_.get_token(); }

 private:
  friend class Activities;
  Activity(Activities& all, Subject subject);
  Progress progress() const;  // all_.mutex_ is held

  Activities& all_;
  const Subject subject_;
  const std::chrono::steady_clock::time_point started_;
  std::string phase_ = "planning";  // guarded by all_.mutex_, as the next
  uint64_t bytes_total_ = 0;
  std::atomic<uint64_t> bytes_done_ = 0;
  std::stop_source stop_;
};

/// Threads: any; never waits, so it may be asked under any lock. Outlives all that is under way.
class Activities {
 public:
  /// After stop_all() what is begun is told to stop at once.
  std::unique_ptr<Activity> begin(Activity::Subject subject);

  bool any_reshard() const;
  /// What is told to people of reshards: what this node leads, else what was begun first.
  std::optional<Activity::Progress> reshard() const;
  std::vector<Activity::Progress> commits() const;
  std::vector<Activity::Progress> fetches() const;

  void stop_all();
  void stop_reshards();  // their parts too: a newer edit wins
  void stop_trims();
  void stop_with(std::string_view checkpoint);

 private:
  friend class Activity;
  mutable Mutex mutex_;
  std::list<Activity*> under_way_ PTC_GUARDED_BY(mutex_);  // in the order in which they were begun
  bool stopped_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc
