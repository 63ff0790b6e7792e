// What this node made for plans that others lead, until it is decided on or dropped.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "reshard/cluster/keyed_lock.h"
#include "reshard/cluster/reshard_progress.h"
#include "reshard/job/plan_part.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// At most one part for a checkpoint. The images of one that is dropped go, but for those that the
/// checkpoint's stored state names by then: they were decided on. Threads: any; its lock is held
/// while nothing else is called.
class PartShelf {
 public:
  struct Part {
    std::string plan;  // the request for it
    PlanPart part;
    int64_t epoch;  // of the leader that asked for it last; of a commit: 0
    ReshardProgress done;
    uint64_t kept_at = 0;  // of the shelf
  };
  using ImageNames = std::set<std::string, std::less<>>;

  /// `decided`: the images that a checkpoint's stored state names, as is known now, by its id;
  /// `remove`: of this node's images.
  PartShelf(std::function<ImageNames(const std::string& id)> decided,
            std::function<void(const std::string& image)> remove)
      : decided_(std::move(decided)), remove_(std::move(remove)) {}

  /// One part for a checkpoint is made at a time.
  [[nodiscard]] KeyedLock::Held making(const std::string& id) { return being_made_.hold(id); }
  /// It was made for just this plan: from now on for this leader. kCancelled: a later one has
  /// asked.
  Result<std::optional<PlanPart>> find(const std::string& id, const std::string& plan,
                                       int64_t epoch);
  bool has_of_other_plan(const std::string& id, const std::string& plan) const;
  void keep(const std::string& id, Part part);
  /// Unless a leader of a later epoch wants it.
  void drop(const std::string& id, int64_t epoch = std::numeric_limits<int64_t>::max());
  /// A moment: what is kept, or found again, from then on is not dropped by drop_of_before().
  uint64_t now() const;
  /// What was kept before `moment`, at which something else was decided of this checkpoint: of what
  /// comes for it since, nothing may be decided yet.
  void drop_of_before(uint64_t moment, const std::string& id);

  bool empty() const;
  std::map<std::string, int64_t> epochs() const;  // by checkpoint id
  /// Of a reshard: it counts until all nodes are done.
  std::optional<ReshardProgress> done() const;

 private:
  void drop_if(const std::string& id, const std::function<bool(const Part&)>& may_go);

  const std::function<ImageNames(const std::string& id)> decided_;
  const std::function<void(const std::string& image)> remove_;
  KeyedLock being_made_;
  mutable Mutex mutex_;
  uint64_t now_ PTC_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Part> parts_ PTC_GUARDED_BY(mutex_);  // by checkpoint id
};

}  // namespace ptc
