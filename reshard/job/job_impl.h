// The inside of a Job, shared by job.cc (edits), job_status.cc, job_commit.cc (commit and removal),
// job_reshard.cc (what is done in the background) and job_older.cc (checkpoints beside the newest).
//
// Who decides what: `changes` is held while a decision is made and written to the metadata, and
// only for that moment: hashing and moving bytes happen outside of it, on snapshots, and the
// decision then checks (in memory and, by the transaction's compares, in the metadata) that what it
// was based on still holds. What is known is a value (known_job.h). Lock order: `changes`, the
// locks of the parts; of these none is held while another part is called.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>

#include "reshard/checkpoint/examine.h"
#include "reshard/cluster/keyed_lock.h"
#include "reshard/intake/commit.h"
#include "reshard/intake/commit_share.h"
#include "reshard/job/activity.h"
#include "reshard/job/doubts.h"
#include "reshard/job/hash_queue.h"
#include "reshard/job/job.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "reshard/job/known_job.h"
#include "reshard/job/leadership.h"
#include "reshard/job/next_step.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/plan_part.h"
#include "reshard/job/plan_relays.h"
#include "reshard/job/taken_dirs.h"
#include "reshard/move/change.h"
#include "reshard/move/last_reshard.h"
#include "reshard/move/plan_report.h"
#include "store/base/json.h"

namespace ptc {

struct Job::Impl {
  Impl(Job* owner, std::string job_dir, JobServices job_services, JobListener* job_listener)
      : job(owner),
        place{owner->name(), owner->id(), std::move(job_dir), std::move(job_services),
              job_listener} {}

  // --- constant ---
  Job* job;
  const JobPlace place;
  const JobServices& services = place.services;
  JobListener* const listener = place.listener;
  const JobPeers peers{place.name, services.cluster};

  std::mutex changes;

  /// What is known, and who is told of changes: those who wait for it, and what is done about it in
  /// the background.
  JobKnowledge knowledge{[this] { resharding.wake(); }};

  // --- guarded by commits_mutex ---
  mutable std::mutex commits_mutex;
  bool stopping = false;
  bool closed = false;  // being removed: nothing may be committed any more
  class CommitAttempt;
  /// That this node leads, by their names in incoming/; and those of which only the thread is left,
  /// at most.
  std::map<std::string, std::shared_ptr<CommitAttempt>> attempts;
  std::vector<std::shared_ptr<CommitAttempt>> ended_attempts;
  std::deque<std::string> committed_ids;  // of late
  bool space_changed = false;             // in incoming/: what the job takes is to be counted anew

  // --- guarded by mending_mutex ---
  std::mutex mending_mutex;
  std::set<std::string> to_refresh;  // checkpoints of which caches here may hold what was mended
  std::map<std::string, std::string>
      not_said;  // those that were mended, which is not decided yet; name → id

  std::stop_source commit_stop;  // who has given up a commit tells no other once the job ends

  // --- parts that stand alone: each has a lock of its own, or none ---
  Activities activities;
  Doubts doubts;
  Arrivals arrivals;
  PartShelf shelf{[this](const std::string& id) { return images_of(id); },
                  [this](const std::string& image) { (void)services.images->remove({image}); }};
  HashQueue hashing{place.name, place.incoming_dir(), [this] { return expected_of_files(); }};
  TakenDirs taken{
      place,
      peers,
      hashing,
      {[this]() -> Result<> {
         PTC_TRY(follow());
         return ok();
       },
       [this](const std::string& id) { shelf.drop(id); }, [this] { housekeeping.wake(); }}};

  Loop resharding, housekeeping;  // steps of these are next_step() and keep_house()

  std::mutex refreshing;  // caches, one thread at a time; before `changes`

  // --- helpers ---
  std::string meta_key(std::string_view what) const;
  std::string leader_key() const { return place.leader_key(); }
  std::string checkpoint_dir(std::string_view id) const { return place.checkpoint_dir(id); }
  /// Of the checkpoint's stored state.
  PartShelf::ImageNames images_of(const std::string& id) const;
  HashQueue::Expected expected_of_files() const;
  bool at_rest(const KnownJob& known) const {
    return !known.has_work() && !activities.any_reshard() && !known.leads;
  }
  void set_error(const std::string& what);
  void forget_error(std::string_view beginning);  // if it begins so
  Result<> check_layout(const std::string& text, const Layout& wanted) const;
  /// A decision: fails once this node's lease has ended.
  Result<int64_t> commit_fenced(MetaTransaction transaction);
  Result<int64_t> commit_fenced(JobDecision decision) {
    return commit_fenced(std::move(decision).transaction());
  }
  /// Bytes that a change of the checkpoint to `spec` would write, at most.
  static Result<uint64_t> bytes_to_write(const Checkpoint& checkpoint, const LayoutSpec& spec);

  /// What goes on beside all else: doubts, and what is left of commits that nobody will decide any
  /// more.
  std::optional<StepPool::Time> keep_house(const std::stop_token& stop);

  // job_load.cc
  Result<> load();
  Result<> sync();
  /// What is decided of this checkpoint is known from now on, whatever may be lacking of others.
  Result<> sync_about(const std::string& id);
  Result<Followed> follow();
  std::string what_to_do_about(const std::string& name, const CheckpointRecord& record) const;
  void take_over(Agreed<AttributesInForce> known);
  Result<> save_layout(const std::string& text);
  Result<> want_layout_again();  // changes held
  Result<> save_rules(const std::string& text);
  Result<> remove_rules();
  Result<> pin(std::string_view name, bool pinned);
  Result<CheckpointRecord> load_checkpoint(const std::string& id, int64_t generation,
                                           const std::string& stored_file);
  Result<std::shared_ptr<const StoredState>> load_stored(const Checkpoint& checkpoint,
                                                         const std::string& id,
                                                         const std::string& stored_file);
  std::optional<PlanTexts> load_plan(const std::string& id, const std::string& stored_file);
  Result<ImageRef> open_image(const StoredImage& image, uint64_t bytes);
  Result<> recover_commits();
  void remove_files_of(const CheckpointRecord& record);
  Result<> remove_stale_files(const std::string& id, const std::string& stored_file);
  Result<> remove_damaged_not_in(const std::set<std::string>& ids);
  Result<> remove_damaged(const std::string& id);
  /// Of a checkpoint that was not known before: files and images here that a later decision
  /// replaced. At start also drafts that never came to one.
  Result<> remove_earlier_states(const CheckpointRecord& record, bool drafts_too);
  /// checkpoints/<id>/, marked as a draft until confirm().
  Result<> make_checkpoint_dir(const std::string& id);
  bool has_file(const std::string& id, const std::string& file) const;  // of checkpoints/<id>/
  /// It was decided on: neither its directory nor its images here are drafts any more.
  void confirm(const CheckpointRecord& record);
  /// Fails unless tombstones say that these, which the metadata name no more, were removed.
  Result<> check_removed(const std::vector<std::string>& ids);

  // job_peers.cc
  Result<std::string> answer(std::string_view method, std::string_view request);
  bool is_used_elsewhere(const std::string& id,
                         const std::stop_token& stop);  // on another node a file of it is open, or
                                                        // that node says nothing
  Result<std::string> checkpoint_file(const std::string& id, const std::string& file, size_t limit);
  /// To all nodes. kUnavailable: none of those that live takes them, though `stored`, which they
  /// describe, has images elsewhere; these would be lost with this node.
  /// `decides`: of a checkpoint that is being committed, what its decision will name of this node.
  Result<> give_files(const std::string& id, const std::vector<std::string>& files,
                      const StoredState& stored,
                      const std::optional<MetaTransaction::Compare>& decides = std::nullopt);
  /// Parts whose leader is gone.
  void drop_undecided_parts();

  // job_move.cc
  using Fences = std::vector<MetaTransaction::Compare>;
  /// All nodes that get new images make them, at the same time. `stored`: what the change was
  /// planned of; the checkpoint may have got another since, when another node leads. `fences`: of
  /// those nodes. `epoch`: of who leads; of a commit: 0. On an error nothing of it stays anywhere.
  Result<NodeParts> make_parts(const CheckpointRecord& record, const StoredState& stored,
                               const WantedState& wanted, const ChangePlan& change,
                               Activity& activity, Fences& fences, int64_t epoch,
                               const MetaTransaction::Compare* decides = nullptr);
  void give_up(const CheckpointRecord& record, const NodeParts& parts, int64_t epoch);
  /// What was made has the checksums that were committed. Of copies of some files only what
  /// completes a tensor can be compared: the rest of it is read where it lies, if `known`, that is
  /// the other nodes know the checkpoint.
  Result<> compare_parts(const CheckpointRecord& record, const StoredState& stored,
                         const ChangePlan& change, const NodeParts& parts, bool known);
  Result<PlanPart> make_part(const PlanName& plan, const Checkpoint& checkpoint,
                             const StoredState& stored, const ChangePlan& change,
                             Activity& activity);
  Result<PlanPart> make_part_for(std::string_view request);
  Result<std::vector<StoredImage>> compose(const Checkpoint& checkpoint, const StoredState& stored,
                                           const ChangePlan& change, const NodeParts& parts);

  // job_commit.cc
  using Clock = std::chrono::steady_clock;
  Result<> commit(const std::string& incoming, const std::string& name, Clock::time_point deadline);
  /// The one under way, or a new one; an error: of one that has failed since the last mv, or what
  /// forbids to begin.
  Result<std::shared_ptr<CommitAttempt>> find_attempt(const std::string& incoming,
                                                      const std::string& name,
                                                      Clock::time_point deadline);
  bool withdraw_attempts();  // false: one is waited for, or being decided
  void look_after_attempts();
  void note_committed(const std::string& id);
  void note_refused(const std::string& incoming, const Error& error);
  void write_error_file(const std::string& incoming, const std::string& text);
  void remove_error_file(const std::string& incoming);
  std::string commit_outcome(const std::string& id) const;  // of a commit that this node leads

  // job_reshard.cc
  /// To settle the job, from the moment when this node leads until it does no more.
  struct Attempt {
    CheckpointRef newest;
    Layout wanted;
    int64_t revision = 0;  // of that
    std::unique_ptr<Leadership> leadership;
    std::unique_ptr<Activity> activity;  // what it is at, once there is something to do
    Result<> result = ok();

    int64_t epoch() const { return leadership->epoch(); }
    template <class Settle>
    void go_on(Settle&& settle) {
      try {
        result = settle();
      } catch (const std::exception& error) {  // no memory
        result = make_error(Code::kNoSpace, "{}", error.what());
      }
    }
  };
  /// Carries out next_step() until there is nothing to do now; returns when to look again. Whatever
  /// changes wakes it.
  std::optional<StepPool::Time> carry_on(const std::stop_token& stop);
  bool begin(Attempt& attempt);  // false: another node leads
  void end(Attempt& attempt);
  Result<> settle_newest(Attempt& attempt);
  /// `nodes`: those that shall hold something.
  Result<WantedState> wanted_state(const Checkpoint& checkpoint, const Layout& layout,
                                   std::vector<std::string> nodes) const;
  std::vector<std::string> nodes_in_service() const;  // alive and not drained
  /// `fences`: of the nodes that made new images.
  Result<std::shared_ptr<const StoredState>> move(const CheckpointRecord& record,
                                                  const WantedState& wanted, Attempt& attempt,
                                                  Fences& fences);
  /// kCancelled: something was damaged, and is taken out now: plan anew.
  Result<std::shared_ptr<const StoredState>> move_or_repair(const CheckpointRecord& record,
                                                            const WantedState& wanted,
                                                            Attempt& attempt, Fences& fences);
  /// False: a newer edit or checkpoint came.
  Result<bool> flip(const Attempt& attempt, std::shared_ptr<const StoredState> moved,
                    const Fences& fences);
  void remove_images_not_in(const StoredState& these, const StoredState& those);
  /// `epoch`: of the leader that asked for it.
  void give_up(const CheckpointRecord& record, const StoredState& made, int64_t epoch);
  /// After a decision that failed: at once, or when it is known that it was not made after all.
  void undo_unless_decided(const Error& error, const CheckpointRecord& record,
                           std::shared_ptr<const StoredState> made, int64_t epoch);
  /// The new record of where the bytes lie, as a file that all nodes have, and in the decision; and
  /// the plan beside it.
  Result<> put_stored(CheckpointRecord& record, std::shared_ptr<const StoredState> moved,
                      const PlanTexts& plan, JobDecision& decision);
  /// The decision has come: `record` is what is known from now on. Returns what was before.
  static std::shared_ptr<const StoredState> take_over(KnownJob& known,
                                                      const CheckpointRecord& record,
                                                      KnownJob::PlanRef plan);
  void remove_replaced(const CheckpointRecord& record, const StoredState& before);
  /// Of those that are too many, by name and id, what nobody uses.
  void remove_superfluous(const std::vector<std::pair<std::string, std::string>>& surplus,
                          const std::stop_token& stop);

  // job_older.cc
  Result<> settle_older(const CheckpointRecord& record, Attempt& attempt);
  Result<> settle_one(CheckpointRecord record, Attempt& attempt);
  Result<WantedState> where_it_is(const CheckpointRecord& record, uint32_t replicas,
                                  std::vector<std::string> nodes) const;
  Result<> remove(const std::string& name, bool only_unused);

  // job_verify.cc
  Result<CheckpointRecord> find_record(std::string_view name) const;
  /// `pace`: null: as fast as it goes. `only`: these, of this node's images; none: all.
  Result<std::vector<ImageContent>> read_own_images(const Checkpoint& checkpoint,
                                                    const StoredState& stored, Pace* pace,
                                                    const std::vector<uint32_t>& only = {},
                                                    std::stop_token stop = {}) const;
  Result<ImageContent> read_image(const Checkpoint& checkpoint, const StoredState& stored,
                                  uint32_t number, Pace* pace, std::stop_token stop = {}) const;
  /// The checkpoint with just this stored state. kBusy: it is not, or not yet, known here.
  Result<CheckpointRecord> find_stored(const std::string& id, const std::string& stored_file);
  Result<std::string> answer_examine(const json::object& request, const std::string& id,
                                     const std::string& stored_file);
  Result<Findings> examine(const CheckpointRecord& record, Pace* pace, std::stop_token stop = {});
  /// Of each node these images; none named: all that it holds. After `stop`, no node begins another
  /// batch of them.
  Result<std::vector<ImageContent>> read_images(
      const CheckpointRecord& record, const StoredState& stored,
      const std::map<std::string, std::vector<uint32_t>>& by_node, Pace* pace = nullptr,
      std::stop_token stop = {});
  Result<std::vector<ImageContent>> ask_for_images(const CheckpointRecord& record,
                                                   const StoredState& stored,
                                                   const std::string& node,
                                                   std::vector<uint32_t> images, bool paced,
                                                   const std::stop_token& stop);
  /// Decides that the bytes of `seen` lie in `images` from now on. False: it has changed meanwhile.
  /// `were_damaged`: what was read of the others may be wrong.
  Result<bool> replace_images(const CheckpointRecord& seen, std::vector<StoredImage> images,
                              bool were_damaged = false);
  /// Files of this node that are missing, as after a start on an empty store, or that are back. As
  /// long as other nodes count on them, their plans are other ones than this node's.
  void report_missing_images();

  // job_mend.cc
  /// What was wrong; of that `replaceable` has been mended, or taken out.
  Result<Findings> repair(const std::string& name);
  std::vector<uint32_t> mend(const CheckpointRecord& record, const StoredState& stored,
                             const Findings& found);
  std::vector<uint32_t> mend_own(const Checkpoint& checkpoint, const StoredState& stored,
                                 const std::vector<uint32_t>& damaged_anywhere,
                                 const std::vector<DamagedImage>& bad) const;
  Result<> mend_image(const Checkpoint& checkpoint, const StoredState& stored,
                      const StoredState& others, const DamagedImage& bad) const;
  Result<std::string> answer_mend(const json::object& request, const std::string& id,
                                  const std::string& stored_file);
  Result<> note_mended(const std::string& name, const std::string& id);
  /// Of all checkpoints in to_refresh; false: some of it is to be tried again.
  bool refresh_mended();
  void note_to_refresh(const std::set<std::string>& names);
  Result<> answer_refresh(const std::string& id);
  void refresh_everywhere(
      const std::string& name);  // as far as nodes answer; others do when they hear of the decision
  Result<> look_over(const std::string& name);
};

/// This node's name in StoredImage::node and ImageLayout::node: empty in a cluster of one.
inline std::string node_key(const JobServices& services) {
  return services.cluster != nullptr ? services.cluster->self() : std::string();
}

Error no_node_in_service();

}  // namespace ptc
