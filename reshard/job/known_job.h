// What this node knows of a job: an immutable value, replaced whole whenever any of it changes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/job_record.h"
#include "reshard/move/last_reshard.h"
#include "reshard/move/plan_report.h"
#include "store/base/mutex.h"

namespace ptc {

/// What is agreed on of a checkpoint, and that.
struct CheckpointRecord : Agreed<CheckpointEntry> {
  CheckpointRef checkpoint;
  std::shared_ptr<const StoredState> where;  // its bytes lie: what `stored` says

  /// Decided here: sets `where`, and the names of the nodes that it says.
  void lies(std::shared_ptr<const StoredState> there);
};

/// A checkpoint that is agreed on and cannot be shown here.
struct Unreadable {
  CheckpointRecord record;  // as it is agreed on: without the checkpoint
  std::string why;
  bool lost = false;  // no node that is there has the files that describe it
};

struct KnownJob {
  using Clock = std::chrono::steady_clock;
  using PlanRef = std::shared_ptr<const PlanTexts>;

  // --- as agreed on ---
  Agreed<LayoutEdit> saved;
  Agreed<InForce> in_force;
  Agreed<LastSequence> sequence;
  Agreed<AttributesInForce> attributes;
  std::optional<std::string> rules_text;
  std::map<std::string, LayoutSpec, std::less<>> custom_specs;       // by name
  std::map<std::string, CheckpointRecord, std::less<>> checkpoints;  // by name
  std::map<std::string, Unreadable, std::less<>> damaged;            // that could not be loaded
  std::map<std::string, Agreed<LookedOver>> looked_over;             // by checkpoint id
  std::vector<std::string> alive;    // nodes, as the stored states know them
  std::vector<std::string> drained;  // nodes that shall hold nothing (drain.h)
  /// The two as they were when all that follows from them had been read again: stored states are
  /// opened with the nodes that are there. They change together with look_anyway.
  std::vector<std::string> followed_alive, followed_drained;
  bool followed_whole = false;  // nothing was lacking then
  bool removed = false;         // the job: from then on nothing is taken over

  // --- found here ---
  std::set<std::string, std::less<>> damaged_ids;  // ever; their files stay until they are removed
  std::vector<std::string>
      unnamed;  // below checkpoints/, though neither a decision nor a tombstone names them

  // --- what came of it ---
  JobCounts counts;
  PlanRef last_plan = std::make_shared<const PlanTexts>();  // carried out, on whatever node
  std::optional<LastReshard> last_reshard;                  // as that says
  int64_t last_plan_revision = 0;                           // of the decision with which it was
  PlanRef running_plan;                                     // that this node leads; null: none
  struct LastError {
    std::string what;
    int64_t time_ns = 0;
  };
  std::optional<LastError> last_error;
  std::optional<LastError>
      layout_error;  // why layout.json was refused; none: one was accepted since
  /// A reshard of this checkpoint to this revision failed; not tried again until either changes,
  /// or the layout is saved again.
  struct Failed {
    int64_t revision;
    std::string checkpoint;
  };
  std::optional<Failed> failed;

  // --- what is to be done about it ---
  bool look_anyway =
      false;  // nodes or copies changed: something may be to do though all is settled
  Clock::time_point others_first{};  // until then another node may do it
  bool leads = false;                // this node, and is at it

  /// It is what record() says, and which nodes are there and in service: all that was agreed could
  /// be read here.
  bool follows_record() const { return followed_whole && damaged.empty() && damaged_ids.empty(); }
  JobRecord record() const;                // what is agreed on
  const CheckpointRecord* latest() const;  // null: there is none
  /// Rules that a layout was saved with; none: that had this id.
  LayoutRules rules_of_id(std::string_view id) const;
  /// Also of one that cannot be shown; null: none.
  const CheckpointRecord* record_of(std::string_view name) const;
  /// Of one that can; null: none.
  const CheckpointRecord* find_id(std::string_view id) const;
  /// It was not removed.
  bool has(const Checkpoint& checkpoint) const;
  /// One that is lost, and so this node leads nothing; null: none.
  const std::pair<const std::string, Unreadable>* lost() const;
  bool settled() const;  // nothing to reshard
  bool has_work() const { return lost() == nullptr && (!settled() || look_anyway); }
  /// What a look for something to do rests on, in short: who knows the same need not look again.
  std::string view() const;
  JobState state(bool reshards) const;             // `reshards`: something is under way
  uint64_t bytes_on(std::string_view node) const;  // of images, within reach or not
  uint64_t missing_copies() const;                 // bytes
  const PlanTexts& shown_plan() const { return running_plan ? *running_plan : *last_plan; }
  std::vector<std::string> in_service(std::vector<std::string> nodes) const;  // of these
  /// Of those that view() names: of one that was away for a moment, and is back before that is
  /// followed, nobody would look again at what was planned without it.
  std::vector<std::string> followed_in_service() const;

  /// What looks found right nowhere is not read any more, and what a later one found right is read
  /// again; names of checkpoints for which that is new. `reads_damaged`: all is read.
  std::set<std::string> show_damage(bool reads_damaged) const;

  void set_error(const std::string& what);        // names in it may be no text
  void forget_error(std::string_view beginning);  // if it begins so
  void forget_errors();                           // a layout was accepted
  /// Of a file of the job that was to be saved. Of layout.json it stays known, whatever else is
  /// refused after it.
  void note_refused_save(const std::string& file, const std::string& why);
  void forget_refused_save(const std::string& file);
  /// Where it tells of that, it says `why` instead.
  void conceal_refused_save(const std::string& file, const std::string& why);
  /// What was refused of a text that they open to others is not told any more.
  void set_attributes(Agreed<AttributesInForce> now);
  void set_last_plan(PlanRef plan, int64_t decided);
  /// The decision has come: `record` is what is known from now on, and `plan` was carried out.
  void take_over(const CheckpointRecord& record, PlanRef plan);
  /// `job`: its name, for the log.
  void take_over_damaged(const std::string& job,
                         std::map<std::string, Unreadable, std::less<>> now);

 private:
  std::string_view latest_name() const;  // empty: there is none
  bool has_failed() const;
};

/// Who has the latest. Threads: any; its lock is held while a change is made, and for no longer.
class JobKnowledge {
 public:
  using Snapshot = std::shared_ptr<const KnownJob>;

  /// `told`: called by tell(), without a lock. `updated`: by each update(), when its change can be
  /// seen, and without this one's lock; must not wait for a part of the job.
  explicit JobKnowledge(std::function<void()> told, std::function<void()> updated = {})
      : told_(std::move(told)), updated_(std::move(updated)) {}

  /// Whoever holds one for long keeps the images of checkpoints that were removed meanwhile.
  Snapshot now() const {
    MutexLock lock(mutex_);
    return now_;
  }
  /// Makes a change to what is known at just this moment; nobody sees half of it. `change` gets a
  /// KnownJob&, and must not wait nor ask this.
  template <class Change>
  auto update(Change&& change) {
    Snapshot before;  // what only that had goes without the lock
    const Updated after{updated_};
    MutexLock lock(mutex_);
    auto next = std::make_shared<KnownJob>(*now_);
    if constexpr (std::is_void_v<decltype(change(*next))>) {
      change(*next);
      before = std::exchange(now_, std::move(next));
    } else {
      auto result = change(*next);
      before = std::exchange(now_, std::move(next));
      return result;
    }
  }
  /// Whoever waits looks again, and what is to be done about it in the background is done.
  void tell() {
    {
      MutexLock lock(mutex_);  // nobody looks before it and waits after
    }
    changed_.notify_all();
    told_();
  }
  template <class Condition>
  void wait(Condition&& condition) const {
    MutexLock lock(mutex_);
    changed_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) { return condition(*now_); });
  }

 private:
  struct Updated {
    const std::function<void()>& call;
    ~Updated() {
      if (call) call();
    }
  };

  const std::function<void()> told_, updated_;
  mutable Mutex mutex_;
  mutable ConditionVariable changed_;
  Snapshot now_ PTC_GUARDED_BY(mutex_) = std::make_shared<const KnownJob>();
};

/// Bytes of a checkpoint as it is stored, with all copies on all nodes.
uint64_t bytes_of(const StoredState& stored);
/// Bytes that this node cannot reach as often as so many further copies make. Copies of one file
/// count, whatever they were made for; of those in devices one, as for place_files().
uint64_t bytes_of_missing_copies(const StoredState& stored, uint32_t replicas);

}  // namespace ptc
