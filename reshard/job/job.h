// One job: its layout, its checkpoints, and the reshard that runs in the background.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/cluster/cluster.h"
#include "reshard/cluster/node_reports.h"
#include "reshard/exec/executor.h"
#include "reshard/intake/seal.h"
#include "reshard/job/file_pieces.h"
#include "reshard/job/job_attributes.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/removed_checkpoints.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"
#include "store/base/step_pool.h"
#include "store/image/image_store.h"
#include "store/meta/meta_client.h"

namespace ptc {

class Pace;

/// What a job needs from its surroundings. All outlive it.
/// This node's store, as it began.
struct OwnStore {
  std::string id;  // empty: of one that is alone
  // Keys by which this store said, before its start, what it had staged, and those of former stores
  // of this node.
  std::set<std::string> said, lost;
};

struct JobServices {
  MetaClient* meta;
  ImageStore* images;
  Executor* executor;
  SharedResults* results;
  RemovedCheckpoints* removed;
  NodeReports* reports;
  StepPool* reshards;                            // runs what a job does in the background
  StepPool* hashing;                             // and reads what was closed
  std::string node;                              // this node's name
  Cluster* cluster;                              // a LoneNode where there are no others
  Pace* pace = nullptr;                          // of what is looked over in the background
  std::function<void()> mending_wanted = [] {};  // Job::see_to_damage() is to be called soon
  /// Waits, two seconds at most, until what others decided and who came or went by now is taken
  /// over; false: it was already.
  std::function<bool()> catch_up = [] { return false; };
  PieceSizes pieces = {};                          // of files that nodes give each other
  bool reads_damaged = false;                      // also what is known to be wrong
  std::shared_ptr<const OwnStore> own_store = {};  // null: nothing is known of it
};

/// Why a save was refused, once others may read the text who could not then.
inline constexpr const char* kNotToldToAll =
    "what was refused is not for all to read who may read this file, and so is not told";

/// Somebody who shows the job to the world and must hear when what it shows has changed.
struct JobListener {
  virtual ~JobListener() = default;
  /// A checkpoint is gone. Called with the job locked, so that nobody sees the new state before
  /// this returns: must not wait, nor call the job.
  virtual void names_changed() = 0;
  /// Other nodes made or removed jobs. Called after that has happened here, and while no job is
  /// made or removed; must not call the store, but to find a job.
  virtual void jobs_changed() {}
  /// It is not found any more, whoever removed it. Called as jobs_changed().
  virtual void job_removed(const std::string& /*job*/) {}
  /// Another node saved or removed layout.json or rules.json, or what is in force. Called after
  /// that is so here, with the job locked against changes: must not change it.
  virtual void job_changed(const std::string& /*job*/) {}
  /// What lies under checkpoints/<name>/layouts/ is materialised otherwise, or the checkpoint came
  /// or went. Called after that has happened.
  virtual void checkpoint_changed(const std::string& job, const std::string& checkpoint) = 0;
  /// Beside its incoming directories something came or went that nobody wrote through the mount.
  virtual void space_changed(const std::string& /*job*/) {}
  /// Images of the job are not in the store any more; whoever still holds such a file keeps its
  /// memory.
  virtual void images_removed(const std::string& /*job*/) {}
  /// A text is about to be opened to somebody who could not read it.
  virtual void text_opens(const std::string& /*job*/, const std::string& /*file*/) {}
  /// Owners or modes that are agreed on have changed, here or on another node.
  virtual void attributes_changed(const std::string& /*job*/) {}
  /// Bytes that were damaged where they lie have been mended, on whatever node: what was kept of
  /// earlier reads is to be read anew. Returns when readers here, of files that are open or mapped,
  /// too, see the right ones.
  virtual Result<> contents_mended(const std::string& /*job*/, const std::string& /*checkpoint*/) {
    return ok();
  }
  /// Seals incoming/<incoming>, of a commit led here or elsewhere (seal.h).
  virtual Result<std::unique_ptr<Seal>> seal(const std::string& /*job*/,
                                             const std::string& /*incoming*/,
                                             GivesWay /*gives_way*/) {
    return std::unique_ptr<Seal>();
  }
  /// Nothing comes into the job's directories that users may write as long as the seal lives: it is
  /// being removed. Called while no job is made or removed.
  virtual Result<std::unique_ptr<Seal>> seal_job(const std::string& /*job*/) {
    return std::unique_ptr<Seal>();
  }
  /// Another node decided something about the job's data set. Returns when that is shown here.
  virtual void data_set_changed(const std::string& /*job*/) {}
};

/// Decisions of others that were taken over.
struct Followed {
  /// Files that describe a checkpoint and that could not be had: kUnavailable, or kNotFound where
  /// all nodes that are there say that they have them not.
  std::optional<Error> lacking = std::nullopt;
  /// Of which checkpoints, by id: those are as they were. All else was taken over.
  std::set<std::string> without = {};
  /// Nothing was taken over: first these are to be had of other nodes.
  std::vector<NamedFile> to_fetch = {};
};

/// Threads: any. Calls that change something are serialised per job; reading never waits for them.
class Job {
 public:
  ~Job();

  const std::string& name() const { return name_; }
  /// Another job of this name, before or after it, has another.
  const std::string& id() const { return id_; }
  /// Directory of the host with the job's ordinary files: what is written beside layout.json, and
  /// incoming/. Owner, mode and times of it are those of the job directory.
  const std::string& files_dir() const { return files_dir_; }
  /// Beside files_dir(), for files in the making; emptied at each start.
  static constexpr const char* kScratchDir = "scratch";

  /// A text's save rests on its file letting no more than this mode, on all nodes. Where it lets
  /// more: kUnavailable, and so it says here.
  struct AtMost {
    std::string name;
    uint32_t mode;
    bool* lets_more;
  };
  /// layout.json as last accepted.
  std::string layout_text() const;
  /// Takes an edit: parses, checks against model, rules, nodes and free memory; records it durably
  /// under the next revision and starts the reshard. Same content: nothing happens. Refused:
  /// kInvalidArgument; status.json says why until the next edit.
  Result<> save_layout(const std::string& text, const std::optional<AtMost>& at_most = {});
  /// Layout::parse(), with the rules that it speaks of; kInvalidArgument: this job has none such.
  Result<Layout> read_layout(const std::string& text) const;

  /// Owners and modes as agreed on, as far as this node knows.
  std::shared_ptr<const JobAttributes> attributes() const;
  /// Changes those of one name, on all nodes. Durable when this returns.
  Result<> change_attributes(const std::string& name, const FileAttributes& change);
  /// Its mode lets no more than this from now on. nullopt: nor did it before.
  Result<std::optional<NarrowedMode>> narrow_mode(const std::string& name, uint32_t mode);
  /// layout.json or rules.json has this mode, if it still is this text; else kConflict. So it is
  /// where somebody decided about its mode or owner after it was `narrowed`.
  Result<> open_text(const std::string& name, uint32_t mode, const std::string& text,
                     const std::optional<NarrowedMode>& narrowed = std::nullopt);
  /// The same of another text, which is as it was if what `if_so` compares is.
  Result<> open_text(const std::string& name, uint32_t mode, const MetaTransaction& if_so,
                     const std::optional<NarrowedMode>& narrowed = std::nullopt);

  /// rules.json, if the job has one.
  std::optional<std::string> rules_text() const;
  Result<> save_rules(const std::string& text, const std::optional<AtMost>& at_most = {});
  /// `only`: if they still are this text; kConflict: they are not.
  Result<> remove_rules(const std::optional<std::string>& only = std::nullopt);
  /// Says in status.json why a file of the job was not saved, until forget_refused_save() or the
  /// next edit. Refusals by save_layout() and save_rules() are said there already.
  void note_refused_save(const std::string& file, const std::string& why);
  void forget_refused_save(const std::string& file);
  /// Where it says why this file was not saved: says `why` instead.
  void conceal_refused_save(const std::string& file, const std::string& why);

  std::string status_json() const;
  /// The reshard that runs, on all nodes together, as far as they have said so; and what of it this
  /// node does.
  std::optional<ReshardProgress> progress() const;
  std::optional<ReshardProgress> own_progress() const;
  JobNumbers numbers() const;     // what status.json and plan.json say in numbers, and counts
  std::string plan_json() const;  // "{}" before the first plan
  std::string plan_svg() const;   // the same as a picture
  /// What has happened to it, as this node knows: JSON, a line an event (job_events.h).
  std::string events_text() const;

  /// Where `current` points, relative to the job directory; nullopt while there is no checkpoint.
  std::optional<std::string> current_target() const;

  std::vector<CheckpointRef> checkpoints() const;  // by time of commit
  std::vector<std::string> unreadable()
      const;  // names of those that are agreed on and cannot be shown here
  CheckpointRef find_checkpoint(std::string_view name) const;

  /// The spec that a directory name under layouts/ means: canonical names, and the custom ones this
  /// job has used. kNotFound for names that are no layout of this model.
  Result<LayoutSpec> find_layout(const Checkpoint& checkpoint, std::string_view name) const;
  /// Names under layouts/ that are materialised now.
  std::vector<std::string> materialised_layouts(const Checkpoint& checkpoint) const;

  /// mv incoming/<incoming> checkpoints/<name>: SPEC §4. On success the bytes belong to the
  /// checkpoint and incoming/<incoming> is gone. On an error nothing was changed;
  /// incoming/<incoming>.error and status.json say why. EAGAIN: it takes longer than `patience`,
  /// and goes on; the same call again does, too (commit_attempt.h).
  Result<> commit(const std::string& incoming, const std::string& name,
                  std::chrono::milliseconds patience = std::chrono::milliseconds::max());
  /// A file of incoming/ was closed after writing: read its header and hash it in the background,
  /// so that commit() need not. `path` is relative to incoming/.
  void note_closed(const std::string& path);
  /// A directory was moved to `path` there.
  void note_moved_in(const std::string& path);
  /// Somebody has opened a file of the user's for writing, by whatever name, or closes it: what was
  /// hashed of it is forgotten. Call it before the first byte can be written.
  void note_writer(uint64_t inode);
  /// A file of the user's has lost its last name.
  void note_gone(uint64_t inode) { note_writer(inode); }

  /// Refused while the checkpoint is pinned. `id`: which one, of those that have the name one after
  /// another; empty: the one that this node knows by it when it is called, or, where it knows none,
  /// when it has heard of all. kNotFound: there is none, or another, which stays.
  Result<> remove_checkpoint(std::string_view name, std::string_view id = {});
  /// A pinned checkpoint is removed by nobody: not by `keep`, not by rm. Durable when this returns.
  /// `id`: as above.
  Result<> pin_checkpoint(std::string_view name, bool pinned, std::string_view id = {});
  bool is_pinned(std::string_view checkpoint) const;

  /// What changing to `layout_text` would move, as plan.json; changes nothing.
  Result<std::string> dry_run(const std::string& layout_text) const;
  /// Every node reads every byte it stores of a checkpoint, and checksums are compared. kCorrupt
  /// names the damaged copies, and tensors of which none is right; kUnavailable: what is left of
  /// some is on nodes that do not answer; kCancelled: `stop` was asked for.
  Result<std::string> verify(std::string_view checkpoint, std::stop_token stop = {}) const;
  /// The same; then damaged copies are mended, if others have all that is in them, and whoever has
  /// one open or mapped sees the right bytes when this returns, on every node that answers.
  /// kCorrupt: not all of the damage could be mended so.
  Result<std::string> repair(std::string_view checkpoint);

  // For the Scrubber.
  struct ToLookOver {
    std::string checkpoint;
    int64_t last_ns = 0;  // 0: never
  };
  /// Of the checkpoints that this node sees to, the one that was looked over longest ago. What was
  /// committed since then was read for that.
  std::optional<ToLookOver> next_to_look_over(int64_t since_ns) const;
  /// verify() at leisure (Pace), and repair() where something is found; status.json says so.
  Result<> look_over(const std::string& checkpoint);
  /// Another node has.
  void note_looked_over(const std::string& id, std::string_view text, int64_t meta_revision);
  /// Mends what verify() found and other copies have right, and sees to caches here that may hold
  /// what was mended. False: not all could be done, call it again.
  bool see_to_damage();
  uint64_t stored_bytes_here() const;

  /// Bytes of its checkpoints that lie on a node, within reach or not.
  uint64_t bytes_on(std::string_view node) const;
  /// Bytes of copies that `replicas` asks for and that this node cannot reach.
  uint64_t missing_copy_bytes() const;
  /// The first rank that layout.json wants on the node.
  std::optional<uint64_t> rank_on(std::string_view node) const;
  /// What would come to each of the others if `node` were to hold nothing, added to `bytes`.
  Result<> add_bytes_without(const std::string& node, std::map<MemoryPlace, uint64_t>& bytes) const;

  /// Until no reshard is running or pending; for tests.
  void wait_settled();
  bool is_settled() const;

  /// Takes over what other nodes decided, and who is there. Called after every change of the
  /// metadata under jobs/<job>, and of the nodes. kUnavailable: not all of it could be had; call it
  /// again.
  Result<> sync();
  /// The same; an error says that something of it was not carried out.
  Result<Followed> follow();
  /// The same for who holds locks of its own: what is to be had of other nodes first is said
  /// (Followed::to_fetch), then fetched without them, and it is called again.
  Result<Followed> follow_with(const FetchedFiles& fetched);
  /// The same where its keys are what they were when it followed last, and the same nodes are in
  /// service: only who is there, and the agreement store is asked nothing.
  Result<Followed> follow_nodes_with(const FetchedFiles& fetched);
  void fetch(const std::vector<NamedFile>& files, FetchedFiles& fetched);
  /// What is known follows from the job's keys and who is there: nothing is damaged, nor taken for
  /// a commit that another leads.
  bool follows_keys_alone() const;
  /// These nodes were there when it followed last.
  bool has_followed(const std::vector<std::string>& alive) const;
  /// For what else belongs to the job and is agreed on: its keys begin with "jobs/<job>/", and a
  /// decision fails once this node's lease has ended.
  MetaClient& meta() const;
  Result<> may_decide() const;  // kUnavailable while this node is cut off; answers at once
  Result<int64_t> decide(MetaTransaction transaction);
  Result<int64_t> decide(const MetaTransaction& transaction, const std::optional<AtMost>& at_most);
  /// When it returns, the other nodes show what was decided about the data set (tell.h).
  void tell_data_set_changed() const;
  /// What another node asks of this job; job_peers.h has what is in a request.
  Result<std::string> answer(PeerMethod method, std::string_view request);

 private:
  friend class JobStore;
  friend class AgreementFollower;
  friend class StoreContents;
  struct Impl;
  Job(std::string name, std::string id, std::string dir, JobServices services,
      JobListener* listener);
  /// Reads what the metadata and the directory say; finishes or takes back a half-done commit.
  Result<> load();
  /// The same, as follow_with(): returns what is to be fetched, and is called again.
  Result<std::vector<NamedFile>> load_with(const FetchedFiles& fetched);
  /// The job was removed, and is not found any more: stops it, and its images go. What is left is
  /// its directory.
  void forget();
  /// Directories below checkpoints/ that no decision seen here names, nor a tombstone: found at
  /// start, and kept.
  std::vector<std::string> kept() const;
  /// Images that this job needs; nullopt when that is not known (a checkpoint is damaged).
  std::optional<std::vector<ImageId>> images_in_use() const;
  /// Nothing can be committed from now on; kBusy while something is.
  Result<> close();
  void reopen();
  /// Starts what is done in the background. Not before all jobs are loaded.
  void start();
  void stop();

  std::string name_, id_;
  std::string files_dir_;
  std::unique_ptr<Impl> impl_;
};
using JobRef = std::shared_ptr<Job>;

}  // namespace ptc
