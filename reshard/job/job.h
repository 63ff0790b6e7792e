// One job: its layout, its checkpoints, and the reshard that runs in the background.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/job/checkpoint.h"
#include "reshard/job/cluster.h"
#include "reshard/job/job_numbers.h"
#include "reshard/job/removed_checkpoints.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// What a job needs from its surroundings. All outlive it.
struct JobServices {
  MetaClient* meta;
  ImageStore* images;
  Executor* executor;
  SharedResults* results;
  RemovedCheckpoints* removed;
  std::string node;  // this node's name
  Cluster* cluster = nullptr;  // null: a cluster of one
};

/// Somebody who shows the job to the world and must hear when what it shows has changed.
struct JobListener {
  virtual ~JobListener() = default;
  /// A checkpoint is gone. Called with the job locked, so that nobody sees the new state before this
  /// returns: must not wait, nor call the job.
  virtual void names_changed() = 0;
  /// What lies under checkpoints/<name>/layouts/ is materialised otherwise, or the checkpoint came or
  /// went. Called after that has happened.
  virtual void checkpoint_changed(const std::string& job, const std::string& checkpoint) = 0;
  /// Images of the job are not in the store any more; whoever still holds such a file keeps its memory.
  virtual void images_removed(const std::string& /*job*/) {}
  /// Another node decided something about the job's data set. Returns when that is shown here.
  virtual void data_set_changed(const std::string& /*job*/) {}
};

/// Threads: any. Calls that change something are serialised per job; reading never waits for them.
class Job {
 public:
  ~Job();

  const std::string& name() const { return name_; }
  /// Directory of the host with the job's ordinary files: what is written beside layout.json, and
  /// incoming/. Owner, mode and times of it are those of the job directory.
  const std::string& files_dir() const { return files_dir_; }
  /// Beside files_dir(), for files in the making; emptied at each start.
  static constexpr const char* kScratchDir = "scratch";

  /// layout.json as last accepted.
  std::string layout_text() const;
  /// Takes an edit: parses, checks against model, rules, nodes and free memory; records it durably
  /// under the next revision and starts the reshard. Same content: nothing happens. Refused:
  /// kInvalidArgument; status.json says why until the next edit.
  Result<> save_layout(const std::string& text);

  /// rules.json, if the job has one.
  std::optional<std::string> rules_text() const;
  Result<> save_rules(const std::string& text);
  Result<> remove_rules();
  /// Says in status.json why what was to become layout.json or rules.json was not even read.
  void note_refused_save(const std::string& file, const std::string& why);

  std::string status_json() const;
  JobNumbers numbers() const;  // what status.json and plan.json say in numbers, and counts
  std::string plan_json() const;  // "{}" before the first plan
  std::string plan_svg() const;   // the same as a picture

  /// Where `current` points, relative to the job directory; nullopt while there is no checkpoint.
  std::optional<std::string> current_target() const;

  std::vector<CheckpointRef> checkpoints() const;  // by time of commit
  CheckpointRef find_checkpoint(std::string_view name) const;

  /// The spec that a directory name under layouts/ means: canonical names, and the custom ones this
  /// job has used. kNotFound for names that are no layout of this model.
  Result<LayoutSpec> find_layout(const Checkpoint& checkpoint, std::string_view name) const;
  /// Names under layouts/ that are materialised now.
  std::vector<std::string> materialised_layouts(const Checkpoint& checkpoint) const;

  /// mv incoming/<incoming> checkpoints/<name>: SPEC §4. On success the bytes belong to the
  /// checkpoint and incoming/<incoming> is gone. On an error nothing was changed; incoming/<incoming>.error
  /// and status.json say why.
  Result<> commit(const std::string& incoming, const std::string& name);
  /// Says there why a commit was not even begun.
  void note_refused(const std::string& incoming, const Error& error);
  /// A file of incoming/ was closed after writing: read its header and hash it in the background, so
  /// that commit() need not. `path` is relative to incoming/.
  void note_closed(const std::string& path);

  /// Refused while the checkpoint is pinned.
  Result<> remove_checkpoint(std::string_view name);
  /// A pinned checkpoint is removed by nobody: not by `keep`, not by rm. Durable when this returns.
  Result<> pin_checkpoint(std::string_view name, bool pinned);
  bool is_pinned(std::string_view checkpoint) const;

  /// What changing to `layout_text` would move, as plan.json; changes nothing.
  Result<std::string> dry_run(const std::string& layout_text) const;
  /// Every node reads every byte it stores of a checkpoint, and checksums are compared. kCorrupt names the
  /// damaged copies, and tensors of which none is right.
  Result<std::string> verify(std::string_view checkpoint) const;
  /// The same; then damaged copies go, if others have all that is in them, and are made anew from these in
  /// the background. kCorrupt: not all of the damage could be mended so.
  Result<std::string> repair(std::string_view checkpoint);

  /// Bytes of its checkpoints that lie on a node, within reach or not.
  uint64_t bytes_on(std::string_view node) const;
  /// The first rank that layout.json wants on the node.
  std::optional<uint64_t> rank_on(std::string_view node) const;
  /// What would come to each of the others if `node` were to hold nothing, added to `bytes`.
  Result<> add_bytes_without(const std::string& node, std::map<std::string, uint64_t>& bytes) const;

  /// Until no reshard is running or pending; for tests.
  void wait_settled();
  bool is_settled() const;

  /// Takes over what other nodes decided, and who is there. Called after every change of the metadata
  /// under jobs/<job>, and of the nodes. kUnavailable: not all of it could be had; call it again.
  Result<> sync();
  /// For what else belongs to the job and is agreed on: its keys begin with "jobs/<job>/", and a decision
  /// fails once this node's lease has ended.
  MetaClient& meta() const;
  Result<> may_decide() const;  // kUnavailable while this node is cut off; answers at once
  Result<int64_t> decide(MetaTransaction transaction);
  /// When it returns, the other nodes show what was decided about the data set (tell.h).
  void tell_data_set_changed() const;
  /// Spec and revision of the layout in force, as the value of jobs/<job>/in_force has them.
  static std::optional<std::pair<LayoutSpec, int64_t>> in_force_of(std::string_view value);
  /// What another node asks of this job; see job_peers.cc for the methods.
  Result<std::string> answer(std::string_view method, std::string_view request);

 private:
  friend class JobStore;
  struct Impl;
  Job(std::string name, std::string dir, JobServices services, JobListener* listener);
  /// Reads what the metadata and the directory say; finishes or takes back a half-done commit.
  Result<> load();
  /// The job was removed: stops it, and its images go. What is left is its directory.
  void forget();
  /// Images that this job needs; nullopt when that is not known (a checkpoint is damaged).
  std::optional<std::vector<ImageId>> images_in_use() const;
  /// Nothing can be committed from now on; kBusy while something is.
  Result<> close();
  void reopen();
  /// Starts the threads. Not before all jobs are loaded.
  void start();
  void stop();

  std::string name_;
  std::string files_dir_;
  std::unique_ptr<Impl> impl_;
};
using JobRef = std::shared_ptr<Job>;

}  // namespace ptc
