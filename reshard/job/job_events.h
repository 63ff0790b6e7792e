// What has happened to a job, in the order in which this node came to know it: a line of JSON for
// each event, in jobs/<job>/events.jsonl, which outlives the daemon.
//
// Events are the difference between what was known and what is known now. So each node has those
// that follow from what is agreed on, whoever decided it, and beside them its own: its starts, the
// reshards that it leads, the commits that it refused.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/known_job.h"
#include "store/base/error.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {

/// What events tell of, of what is known: small, and holds no image. Which nodes hold a checkpoint
/// may change without an update of what is known.
struct EventView {
  struct Checkpoint {
    std::string id, layout;
    std::weak_ptr<const StoredState> where;  // what `lost` and `bytes` were made of
    uint64_t tensors = 0, bytes = 0, lost = 0, damaged = 0;
    bool lost_with_device = false;  // some of it was in the memory of one, and is not there
    int64_t mended = 0;
    bool pinned = false;
  };
  std::map<std::string, Checkpoint, std::less<>> checkpoints;  // by name
  std::map<std::string, bool, std::less<>> unreadable;         // by name; true: lost
  int64_t revision = 0, in_force_revision = 0, layout_refused_ns = 0;
  std::string wanted, layout, current;
  std::optional<std::string> rules;
  std::vector<std::string> alive, drained;  // nodes, in order
  uint64_t commits_refused = 0, reshards_failed = 0, reshards_abandoned = 0;
  std::string last_error;
  KnownJob::PlanRef running;  // null: this node leads none
  int64_t last_plan_revision = 0;
  std::optional<LastReshard> last_reshard;

  /// `before`: what of it still holds is not looked for again.
  static EventView of(const KnownJob& known, const EventView& before);
};

/// What became of the first until the second: each with "event", and what it is about. Nodes that
/// came or went together are one event: a thousand of them push nothing else out. A pure function.
std::vector<json::object> events_between(const EventView& before, const EventView& after);

/// Threads: any. What cannot be written, for there is no room, say, is left out.
class JobEvents {
 public:
  static constexpr size_t kMost = 1000;  // events that are shown; twice as many are kept at most

  /// `path`: of the file; its directory may not be there yet. `node`: whose events these are.
  JobEvents(std::string path, std::string node) : path_(std::move(path)), node_(std::move(node)) {}

  /// Before it nothing is noted. The daemon was started, or the job was made.
  void begin(const KnownJob& known);
  /// What has changed since. `now` is asked while nobody else is.
  void note(const std::function<std::shared_ptr<const KnownJob>()>& now);
  /// From here on nothing is noted.
  void end();
  /// The last lines, oldest first. One that was cut off in the middle is not among them.
  std::string text() const;

 private:
  void append(std::vector<json::object> events) PTC_REQUIRES(mutex_);

  const std::string path_, node_;
  mutable Mutex mutex_;
  bool begun_ PTC_GUARDED_BY(mutex_) = false;
  EventView seen_ PTC_GUARDED_BY(mutex_);
  uint64_t next_ PTC_GUARDED_BY(mutex_) = 1;   // number of the next
  uint64_t lines_ PTC_GUARDED_BY(mutex_) = 0;  // of the file
};

}  // namespace ptc
