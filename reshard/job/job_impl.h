// The inside of a Job, shared by job.cc (edits), job_status.cc, job_commit.cc (commit and removal),
// job_reshard.cc (the background thread) and job_older.cc (checkpoints beside the newest).
//
// Who decides what: `changes` is held while a decision is made and written to the metadata, and only
// for that moment: hashing and moving bytes happen outside of it, on snapshots, and the decision then
// checks (in memory and, by the transaction's compares, in the metadata) that what it was based on
// still holds. `mutex` guards the state in memory, and is held for no longer than it takes to read or
// write it. Lock order: changes, mutex.
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

#include "reshard/job/change.h"
#include "reshard/job/commit.h"
#include "reshard/job/examine.h"
#include "reshard/job/job.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/plan_report.h"
#include "store/base/json.h"

namespace ptc {

struct CheckpointRecord {
  CheckpointRef checkpoint;
  std::string id;           // directory under checkpoints/
  int64_t sequence = 0;     // order of commits; of those on two nodes at the same time, the names'
  int64_t generation = 0;   // of where its bytes lie
  std::string stored;       // file below it that says so: of one decision, and no other has the name
  bool pinned = false;
  int64_t meta_revision = 0;
};

/// What a node made of a plan: its own images.
struct PlanPart {
  std::string plan;  // PlanName::digest
  std::vector<std::pair<uint32_t, std::string>> images;  // target → image
  std::vector<std::pair<uint32_t, std::string>> copies;  // ChangePlan::copies → image
  struct Sum {
    uint32_t tensor;
    Box box;
    Checksum sum;
  };
  std::vector<Sum> sums;  // of all arrays in the images, and of kept ones

  std::string to_text() const;
  static Result<PlanPart> from_text(std::string_view text);
};

/// A plan that several nodes carry out, as they name it to each other: equal where all of it is.
struct PlanName {
  std::string id;      // of the checkpoint
  std::string digest;  // of the request for a part of it, and of its files
};

using NodeParts = std::vector<std::pair<std::string, PlanPart>>;  // by node

struct Job::Impl {
  Impl(Job* owner, std::string job_dir, JobServices job_services, JobListener* job_listener)
      : job(owner), dir(std::move(job_dir)), services(job_services), listener(job_listener) {}

  // --- constant ---
  Job* job;
  std::string dir;  // jobs/<job>
  JobServices services;
  JobListener* listener;

  std::mutex changes;

  // --- guarded by mutex ---
  mutable std::mutex mutex;
  std::condition_variable_any changed;
  std::string layout_text;
  Layout layout;
  int64_t revision = 0;
  int64_t layout_meta_revision = 0;
  struct InForce {
    LayoutSpec spec;
    int64_t revision = 0;
    std::optional<std::string> current;  // checkpoint
    int64_t meta_revision = 0;
  } in_force;
  std::optional<std::string> rules_text;
  std::map<std::string, CheckpointRecord, std::less<>> checkpoints;
  std::map<std::string, LayoutSpec, std::less<>> custom_specs;  // by name
  struct Running {
    std::string checkpoint, from, to, phase;
    uint64_t bytes_total = 0;
    std::shared_ptr<std::atomic<uint64_t>> bytes_done;
    std::chrono::steady_clock::time_point started;
    std::stop_source stop;
  };
  std::optional<Running> running;
  bool stopping = false;
  unsigned commits_in_flight = 0;
  bool closed = false;  // being removed: nothing may be committed any more
  std::map<std::string, std::string> damaged;  // checkpoint → why it could not be loaded
  std::set<std::string, std::less<>> damaged_ids;
  struct LastReshard {
    std::string checkpoint, from, to;
    TransferPlan::Totals totals;
    double seconds = 0;
  };
  std::optional<LastReshard> last_reshard;
  JobCounts counts;
  PlanTexts last_plan;  // carried out, on whatever node
  int64_t last_plan_revision = 0;  // of the decision with which it was
  std::optional<PlanTexts> running_plan;  // that this node leads
  const PlanTexts& shown_plan() const { return running_plan ? *running_plan : last_plan; }  // mutex held
  struct LastError {
    std::string what;
    int64_t time_ns = 0;
  };
  std::optional<LastError> last_error;
  // A reshard of this checkpoint to this revision failed; not tried again until either changes,
  // or the layout is saved again.
  struct Failed {
    int64_t revision;
    std::string checkpoint;
  };
  std::optional<Failed> failed;
  bool look = false;  // nodes or copies changed: something may be to do although all is settled
  std::chrono::steady_clock::time_point others_first{};  // until then another node may do it
  bool at_work = false;  // the reshard thread works on it
  std::vector<std::string> alive;  // nodes, as the stored states know them
  std::vector<std::string> drained;  // nodes that shall hold nothing (drain.h)
  /// By checkpoint id: a part made here that no decision names yet, and of which plan.
  struct FinishedPart {
    std::string plan;
    PlanPart part;
    int64_t epoch;  // of the leader that asked for it last
  };
  std::map<std::string, FinishedPart> finished_parts;
  /// By checkpoint id: what has come of the images that this node makes, for nodes that take it from here.
  struct Arrivals {
    std::string digest;
    std::map<std::pair<uint32_t, uint64_t>, std::string> windows;  // (target, begin) → image
    bool ended = false;
  };
  std::map<std::string, Arrivals> arrivals;
  /// Grows with each leader, in the whole cluster: one that was stopped, and is no leader any more, gets
  /// nothing done where a later one has been heard of.
  std::atomic<int64_t> leader_epoch{0};
  /// What this node has taken out of incoming/ for a commit that another node leads, by its id.
  struct Taken {
    std::string incoming, from;
    MetaTransaction::Compare fence;  // of the node that leads, which its decision names
    std::vector<std::string> images;
  };
  std::map<std::string, Taken> taken;
  std::deque<std::string> to_hash;  // closed files, relative to incoming/
  std::string hashing;              // the name in incoming/ of which a file is being hashed
  std::stop_source hash_stop;       // ends that

  std::stop_source commit_stop;  // hashing for a commit ends with the job
  HashCache hashes;
  std::jthread reshard_thread, hash_thread;  // last: they use all of the above

  std::mutex part_mutex;  // one part of a plan is made at a time; before `mutex`

  // --- helpers ---
  std::string meta_key(std::string_view what) const;
  std::string leader_key() const { return "leaders/" + job->name(); }
  std::string checkpoint_dir(std::string_view id) const;
  const CheckpointRecord* latest() const;      // mutex held
  uint64_t bytes_on(std::string_view node) const;  // mutex held: of images, within reach or not
  bool settled() const;                        // mutex held: nothing to do for the reshard thread
  bool at_rest() const { return settled() && !running && !look && !at_work; }  // mutex held
  JobState state() const;                      // mutex held
  void set_error(const std::string& what);     // takes mutex
  void forget_error(std::string_view beginning);  // mutex held: if it begins so
  Result<> check_layout(const std::string& text, const Layout& wanted) const;
  /// A decision: fails once this node's lease has ended.
  Result<int64_t> commit_fenced(MetaTransaction transaction);
  /// Bytes that a change of the checkpoint to `spec` would write, at most.
  static Result<uint64_t> bytes_to_write(const Checkpoint& checkpoint, const LayoutSpec& spec);
  static std::string in_force_text(const InForce& value);
  static std::string record_text(const CheckpointRecord& record);

  // job_load.cc
  struct MetaState;
  Result<MetaState> read_meta();
  Result<> load();
  Result<> sync();
  Result<> save_layout(const std::string& text);
  Result<> want_layout_again();  // changes held
  Result<CheckpointRecord> load_checkpoint(const std::string& id, int64_t generation,
                                           const std::string& stored_file);
  Result<std::shared_ptr<const StoredState>> load_stored(const Checkpoint& checkpoint,
                                                         const std::string& id,
                                                         const std::string& stored_file);
  std::optional<PlanTexts> load_plan(const std::string& id, const std::string& stored_file);
  Result<ImageRef> open_image(const StoredImage& image, uint64_t bytes);  // takes mutex
  Result<> recover_commits();
  void remove_files_of(const CheckpointRecord& record);
  Result<> remove_stale_files(const std::string& id, const std::string& stored_file);

  // job_peers.cc
  Result<std::string> answer(std::string_view method, std::string_view request);
  Result<std::string> ask(const std::string& node, std::string_view method, std::string body,
                          std::stop_token stop = {});
  std::vector<std::string> other_nodes() const;
  bool is_used_elsewhere(const std::string& id, const std::stop_token& stop);  // on another node a file of it is open, or that node says nothing
  Result<std::string> checkpoint_file(const std::string& id, const std::string& file, size_t limit);
  /// To all nodes. kUnavailable: none of those that live takes them, though `stored`, which they describe, has images
  /// elsewhere; these would be lost with this node.
  Result<> give_files(const std::string& id, const std::vector<std::string>& files, const StoredState& stored);
  /// Unless a leader of a later epoch wants it. Takes mutex.
  void drop_part(const std::string& id, int64_t epoch = std::numeric_limits<int64_t>::max());
  /// Parts whose leader is gone.
  void drop_undecided_parts();

  // job_take.cc
  Result<bool> take_directory(const std::string& id, const std::string& incoming);  // false: none here
  void put_back(const std::string& id, const std::string& incoming);
  Result<std::string> answer_take(std::string_view method, const json::object& request,
                                  const std::string& id, std::string_view rest);
  void untake(const std::string& id);
  Result<std::set<std::string>> given_up_elsewhere();
  void settle_taken(const std::set<std::string>& given_up);

  // plan_relays.cc
  class PlanRelays;
  Result<std::string> answer_arrived(const json::object& request, const std::string& id);

  // job_move.cc
  using Fences = std::vector<MetaTransaction::Compare>;
  /// All nodes that get new images make them, at the same time. `fences`: of those nodes. On an error
  /// nothing of it stays anywhere.
  Result<NodeParts> make_parts(const CheckpointRecord& record, const WantedState& wanted, const ChangePlan& change,
                               std::atomic<uint64_t>& bytes_done, std::stop_token stop, Fences& fences);
  void give_up(const CheckpointRecord& record, const NodeParts& parts);
  Result<PlanPart> make_part(const PlanName& plan, const Checkpoint& checkpoint, const StoredState& stored,
                             const ChangePlan& change, std::atomic<uint64_t>& bytes_done,
                             std::stop_token stop);
  Result<PlanPart> make_part_for(std::string_view request);
  Result<std::vector<StoredImage>> compose(const Checkpoint& checkpoint, const StoredState& stored, const ChangePlan& change,
                                           const NodeParts& parts);

  // job_commit.cc
  Result<> commit(const std::string& incoming, const std::string& name);
  Result<> take_and_commit(const std::string& incoming, const std::string& name);
  /// What other nodes have of the checkpoint. They were asked after `fence` was read.
  struct TakenElsewhere {
    FilesElsewhere files;
    MetaTransaction::Compare fence;
  };
  Result<std::vector<TakenElsewhere>> take_elsewhere(const std::string& id, const std::string& incoming,
                                                     const MetaTransaction::Compare& own);
  /// `fences`: what else the decision is to name.
  Result<> commit_taken(int taken_fd, const std::vector<TakenElsewhere>& elsewhere, Fences fences,
                        const std::string& label, const std::string& id, const std::string& name);
  Result<std::shared_ptr<const StoredState>> make_copies(const CheckpointRecord& record,
                                                         std::vector<MetaTransaction::Compare>& fences);
  void note_refused(const std::string& incoming, const Error& error);
  void write_error_file(const std::string& incoming, const std::string& text);
  void hash_loop(std::stop_token stop);
  void stop_hashing(const std::string& incoming);  // takes mutex

  // job_reshard.cc
  void reshard_loop(std::stop_token stop);
  Result<> settle(const CheckpointRef& checkpoint, const Layout& wanted, int64_t wanted_revision);
  bool lead();  // false: another node does
  void stop_leading();
  void name_leader(MetaTransaction& transaction) const;  // a decision of the one that leads
  /// `nodes`: those that shall hold something.
  Result<WantedState> wanted_state(const Checkpoint& checkpoint, const Layout& layout,
                                   std::vector<std::string> nodes) const;
  std::vector<std::string> nodes_in_service() const;  // alive and not drained; takes mutex
  /// `fences`: of the nodes that made new images.
  Result<std::shared_ptr<const StoredState>> move(const CheckpointRecord& record,
                                                  const WantedState& wanted, std::stop_token stop,
                                                  Fences& fences);
  /// kCancelled: something was damaged, and is taken out now: plan anew.
  Result<std::shared_ptr<const StoredState>> move_or_repair(const CheckpointRecord& record,
                                                            const WantedState& wanted,
                                                            std::stop_token stop, Fences& fences);
  Result<bool> flip(const CheckpointRef& checkpoint, const LayoutSpec& wanted,
                    int64_t wanted_revision, std::shared_ptr<const StoredState> moved,
                    const Fences& fences);
  void remove_images_not_in(const StoredState& these, const StoredState& those);
  void give_up(const CheckpointRecord& record, const StoredState& made);
  /// The new record of where the bytes lie, as a file that all nodes have, and in the transaction; and
  /// the plan beside it.
  Result<> put_stored(CheckpointRecord& record, const StoredState& moved, const PlanTexts& plan,
                      MetaTransaction& transaction);
  /// The decision has come: `record` is what is known from now on. Mutex held. Returns what was before.
  std::shared_ptr<const StoredState> take_over(const CheckpointRecord& record,
                                               std::shared_ptr<const StoredState> moved,
                                               PlanTexts plan);
  void remove_replaced(const CheckpointRecord& record, const StoredState& before);
  void remove_superfluous(const std::stop_token& stop);  // `keep`

  // job_older.cc
  Result<> settle_older(const Layout& wanted);
  Result<> settle_one(CheckpointRecord record, uint32_t replicas);
  Result<WantedState> where_it_is(const CheckpointRecord& record, uint32_t replicas,
                                  std::vector<std::string> nodes) const;
  Result<> remove(const std::string& name, bool only_unused);

  // job_verify.cc
  Result<CheckpointRecord> find_record(std::string_view name) const;
  Result<std::vector<ImageContent>> read_own_images(const Checkpoint& checkpoint,
                                                    const StoredState& stored) const;
  Result<std::string> answer_examine(const std::string& id, const std::string& stored_file);
  Result<Findings> examine(const CheckpointRecord& record);
  /// Decides that the bytes of `seen` lie in `images` from now on. False: it has changed meanwhile.
  Result<bool> replace_images(const CheckpointRecord& seen, std::vector<StoredImage> images);
  /// Files of this node that are missing, as after a start on an empty store, or that are back. As long as
  /// other nodes count on them, their plans are other ones than this node's.
  void report_missing_images();
  /// What is wrong; of that `replaceable` has been taken out.
  Result<Findings> repair(const std::string& name);
};

/// This node's name in StoredImage::node and ImageLayout::node: empty in a cluster of one.
inline std::string node_key(const JobServices& services) {
  return services.cluster != nullptr ? services.cluster->self() : std::string();
}

/// Bytes of a checkpoint as it is stored now.
uint64_t stored_bytes(const Checkpoint& checkpoint);

Error no_node_in_service();

/// The file with the plan that led to this stored state; empty: it was a commit.
std::string plan_file_of(const std::string& stored_file);

/// 16 hexadecimal digits, never used twice.
Result<std::string> random_id();

/// Nanoseconds since the epoch.
int64_t now_ns();

}  // namespace ptc
