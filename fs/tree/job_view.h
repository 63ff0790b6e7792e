// One job, and its checkpoints, as this mount shows them: what it remembers about them beyond what
// the store knows, and the texts that users edit in them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dataset/run/data_set.h"
#include "fs/tree/editable_file.h"
#include "fs/tree/host_file.h"
#include "fs/tree/node.h"
#include "fs/tree/quota.h"
#include "fs/tree/whiteouts.h"
#include "reshard/node/job_store.h"
#include "store/base/mutex.h"

namespace ptc {

class RealNode;
class Tree;

/// Keeps writers and a commit apart. A file that is being committed cannot be opened for writing,
/// nor a directory changed, unless the commit gives way; a file that is open (or mapped) for
/// writing cannot be committed. Threads: any.
class CommitGate {
 public:
  /// Of one commit: whom to ask.
  using Owner = std::shared_ptr<const GivesWay>;
  /// Runs `change`, which opens the file with this node key for writing, or changes the directories
  /// with these; EBUSY while one of them is sealed, and stays so for a moment: of a commit that was
  /// refused other nodes hear after the answer, which may have reached this caller before them. A
  /// few may wait for that moment, no more: each does so on a thread that others need.
  template <class Change>
  auto unless_sealed(std::initializer_list<std::string> keys, Change change) -> decltype(change()) {
    constexpr int kOwners = 4;  // one after another may have sealed it
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    for (int asked = 0; asked < kOwners; ++asked) {
      Owner owner;
      {
        MutexLock lock(mutex_);
        owner = owner_of(keys);
        if (owner == nullptr) return change();
      }
      if (*owner && (*owner)()) continue;
      MutexLock lock(mutex_);
      const Turn turn(waiting_, waiting_in_all_jobs_);
      if (!turn.granted()) break;
      if (!unsealed_.wait_until(mutex_, until,
                                [&]() PTC_REQUIRES(mutex_) { return owner_of(keys) != owner; }))
        break;
    }
    return Errno{EBUSY};
  }
  /// false: another commit has sealed one of them.
  bool seal(const std::vector<std::string>& keys, const Owner& owner);
  void unseal(const std::vector<std::string>& keys, const Owner& owner);

 private:
  Owner owner_of(std::initializer_list<std::string> keys) const PTC_REQUIRES(mutex_);

  /// One of those who wait, unless there are as many as may.
  class Turn {
   public:
    Turn(std::atomic<int>& here, std::atomic<int>& in_all) : here_(here), in_all_(in_all) {
      const int mine = ++here_, of_all = ++in_all_;
      granted_ = mine <= kMostHere && of_all <= kMostInAll;
    }
    ~Turn() {
      --here_;
      --in_all_;
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    bool granted() const { return granted_; }

   private:
    static constexpr int kMostHere = 4, kMostInAll = 8;
    std::atomic<int>& here_;
    std::atomic<int>& in_all_;
    bool granted_;
  };

  static inline std::atomic<int> waiting_in_all_jobs_ = 0;  // of this process
  std::atomic<int> waiting_ = 0;
  Mutex mutex_;
  ConditionVariable unsealed_;
  std::unordered_map<std::string, Owner> sealed_ PTC_GUARDED_BY(mutex_);
};

/// One checkpoint as this mount shows it.
struct CheckpointView {
  CheckpointRef checkpoint;
  std::string key;   // prefix of its nodes' keys; never used twice
  Whiteouts hidden;  // paths relative to the checkpoint
  uid_t uid = 0;
  gid_t gid = 0;
  timespec time = {};
  InodeHash inodes;  // of its root, from which those of all paths are reckoned
  /// It has, or had, nodes: somebody has looked at it here. Else none need be looked for.
  std::atomic<bool> shown = false;

  /// stat of something in it; `path` is relative to the checkpoint.
  struct stat attributes(mode_t mode, std::string_view path) const;
  /// The path of the node with this key.
  std::string_view path_of(std::string_view node_key) const {
    return node_key.size() <= key.size() ? "" : node_key.substr(key.size() + 1);
  }
};

// Directories of a job that have attributes of their own (JobAttributes).
inline constexpr const char* kIncomingName = "incoming";
inline constexpr const char* kDataSetName = "dataset";

/// One job as this mount shows it. Lives while a node of it does.
class JobView : public std::enable_shared_from_this<JobView> {
 public:
  /// Errors: the job's files cannot be opened.
  static Result<std::shared_ptr<JobView>> open(Tree& tree, JobRef job, std::string key);
  ~JobView();

  Tree& tree() const { return tree_; }
  Job& job() const { return *job_; }
  const JobRef& job_ref() const { return job_; }
  const std::string& key() const { return key_; }  // prefix of its nodes' keys; never used twice
  HeldFd files_fd() const { return files_.hold(); }
  HeldFd incoming_fd() const { return incoming_.hold(); }
  /// stat of the directory of the user's files: owner and mode of the job.
  struct stat directory() const;
  /// The same for what is made of these files, or quotes what was refused of them: the job's owner
  /// reads it, and who may read each of them.
  struct stat owner_of_text(std::initializer_list<const EditableFile*> files) const;
  FsResult<HostFile> copy_of(const HeldFd& fd) const;

  /// Gives the job's directories the owners and modes that are agreed on.
  void apply_attributes();
  /// What was refused of this text is quoted no more, for others may read it than before.
  void conceal_refusal(const std::string& name);
  /// The same of all texts that `change` of a directory of this name would open to others. For
  /// before this directory has it here, which is before it is agreed on.
  void conceal_opened(const std::string& name, const AttributeChange& change);
  /// What `change` says of them, which this directory has here, is agreed on from then on; what it
  /// does not say another node may be changing. On an error it is taken back.
  FsResult<> agree_on(const std::string& name, const AttributeChange& change);
  /// The same of what no directory has; bounded as a rename is (Errands::ask).
  FsResult<> agree_on(const std::string& name, const FileAttributes& change);

  /// Whether space in it is limited, and so counted. While it changes, this gate is held, shared:
  /// by some within gate(), and by others around it. So nobody who waits for it alone (a recount)
  /// may keep out those who share it, and glibc's does not.
  bool limited() const { return limited_.load(std::memory_order_relaxed); }
  SharedMutex& space_gate() { return Quotas::gate(account_); }
  const Quotas::Account& account() const { return account_; }

  std::shared_ptr<CheckpointView> checkpoint(const std::string& name);
  /// The last time a checkpoint came, went, or was materialised otherwise.
  timespec checkpoints_changed() const;
  void note_checkpoints_changed();

  EditableFile& layout() { return layout_; }
  EditableFile& rules() { return rules_; }

  DataSet& data_set() const { return *data_set_; }
  /// It is not yet as an earlier process, whose mount goes on, has shown it.
  bool data_set_comes() const { return data_set_comes_.load(std::memory_order_relaxed); }
  /// Waits for that, for a while.
  void await_data_set();
  HeldFd data_set_fd() const {
    return data_set_files_.hold();
  }  // of the user's own files in dataset/
  EditableFile& source() { return source_; }
  EditableFile& order() { return order_; }
  EditableFile& consumed() { return consumed_; }
  /// Others may have changed layout.json or rules.json: the kernel lists this directory anew.
  void catch_up();
  /// The last time a generation, or a text of the data set, came or went.
  timespec data_set_changed() const;
  /// That is now, and the kernel forgets what it knows of dataset/ and gen/.
  void touch_data_set();
  /// Prefix of the keys of its nodes, never used for another. `identity`: of its bytes, by which a
  /// later process has the same key for it.
  std::string generation_key(const ShownGenerationRef& generation, uint64_t identity);

  Whiteouts& hidden() { return hidden_; }  // names of the job directory
  CommitGate& gate() { return gate_; }
  /// The file is part of a checkpoint now. The kernel may know it by the name it was written under
  /// for as long as it likes: once its image is removed, the node lets go of it.
  void note_committed(const std::shared_ptr<RealNode>& file);
  void let_go_of_removed();

  /// A name of its own, relative to files_fd(), for a file in the making: where no user and no
  /// commit looks. What a crash leaves there goes at the next start.
  Result<std::string> scratch_path();
  /// incoming/ that was removed and made again is another inode for the kernel: the removed one may
  /// still be somebody's working directory.
  std::string incoming_key() const;
  void renew_incoming() { incoming_generation_.fetch_add(1); }

 private:
  JobView(Tree& tree, JobRef job, std::string key);
  void open_data_set();
  EditableFile::Source agreed(std::string name, EditableFile::Source source);
  FsResult<> take_text(int64_t more, bool must);
  /// Whose texts are counted: also once the directory is gone, so that they go from where they are.
  uid_t text_owner() const;
  Result<> save_layout(const std::string& text, const TextSave& how);
  Result<> save_source(const std::string& text, const TextSave& how,
                       std::chrono::milliseconds wait);
  Result<> save_at_most(const EditableFile& file, const TextSave& how,
                        const std::function<Result<>(const std::optional<Job::AtMost>&)>& save);
  DataSet::Commit committed_with(const std::optional<Job::AtMost>& at_most);
  Result<> open_text(const std::string& name, mode_t mode, const std::string& text,
                     const std::optional<NarrowedMode>& narrowed);
  /// Says in status.json whether and why `file` was refused; `said`: the job has said so of what is
  /// not accepted.
  Result<> say_saved(const EditableFile& file, Result<> saved, bool said = false);
  bool some_checkpoint_has(uint64_t consumed) const;
  void note_data_set_changed();
  Tree& tree_;
  const JobRef job_;
  const std::string key_;
  HostFile files_, incoming_, data_set_files_;
  EditableFile layout_, rules_, source_, order_, consumed_;
  Whiteouts hidden_;
  CommitGate gate_;
  const Quotas::Account account_;
  Mutex applying_;  // before all others: what is agreed on later is applied later
  std::shared_ptr<const JobAttributes> applied_ PTC_GUARDED_BY(applying_);  // null: none yet
  std::atomic<int64_t> text_bytes_{0};  // that texts and drafts are counted with
  mutable std::atomic<uid_t> text_owner_{0};
  std::atomic<bool> limited_{false};
  std::atomic<int64_t> checkpoints_changed_ns_{0};  // since the epoch
  std::atomic<uint64_t> scratch_files_{0}, incoming_generation_{0};
  Mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<CheckpointView>> checkpoints_
      PTC_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<RealNode>> committed_ PTC_GUARDED_BY(mutex_);
  std::vector<ShownGenerationRef> generations_ PTC_GUARDED_BY(mutex_);  // as last told of
  std::unordered_map<const ShownGeneration*, std::pair<ShownGenerationRef, std::string>>
      generation_keys_ PTC_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, uint64_t> generation_keys_given_
      PTC_GUARDED_BY(mutex_);  // by identity
  std::atomic<int64_t> data_set_changed_ns_{0};
  std::atomic<bool> data_set_comes_{false};
  std::unique_ptr<DataSet> data_set_;  // last: its threads use all of the above
};
using JobViewRef = std::shared_ptr<JobView>;

/// The directory changes now, though no system call changed it: what the kernel has listed of it is
/// old.
void touch_directory(int fd);

/// Keys of the fixed nodes of a job.
std::string checkpoints_key(const JobView& job);
std::string checkpoint_key(const CheckpointView& checkpoint);

}  // namespace ptc
