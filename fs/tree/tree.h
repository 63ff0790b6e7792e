// What all nodes of a mount share: the store below, the node table, the views of jobs, and how the
// kernel is told of changes.
#pragma once

#include <atomic>
#include <boost/json/object.hpp>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dataset/run/data_set.h"
#include "fs/tree/editable_file.h"
#include "fs/tree/errands.h"
#include "fs/tree/file_set_source.h"
#include "fs/tree/gather_cache.h"
#include "fs/tree/host_file.h"
#include "fs/tree/job_view.h"
#include "fs/tree/listings.h"
#include "fs/tree/node_table.h"
#include "fs/tree/page_files.h"
#include "fs/tree/passthrough.h"
#include "fs/tree/queue_patience.h"
#include "fs/tree/quota.h"
#include "fs/tree/stats.h"
#include "fs/tree/whiteouts.h"
#include "reshard/node/job_store.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {

/// Tells the kernel to drop what it caches; FuseSession implements it.
///
/// Never one name: for that the kernel takes the lock of its directory, which an operation that
/// waits for this daemon may hold. A daemon that is killed in such a moment could not even die: its
/// thread would wait for the operation, and the operation for the daemon. So all names expire
/// together, by a counter. No call waits, but drop_content().
struct KernelCache {
  virtual ~KernelCache() = default;
  virtual void drop_attributes(const Node& node) = 0;
  /// Its bytes, too: the next read asks for them, a mapping's also. This one waits for reads of
  /// them that are under way; so it is for what hardly ever happens, and for a thread that no
  /// request waits for.
  virtual void drop_content(const Node& node) = 0;
  /// Every name is looked up again when it is next used; what it then stands for may be the same.
  virtual void expire_names() = 0;
  /// Whether this kernel can do that. Names that may go are not to be cached where it cannot.
  virtual bool can_expire_names() const = 0;
};

/// Threads: any. Outlives all nodes. Order: construct, open the store with it as listener,
/// attach().
class Tree : public JobListener {
 public:
  /// `gathered_bytes`: how much memory files that are computed on read may take.
  explicit Tree(uint64_t gathered_bytes = 0);
  ~Tree() override;

  Quotas& quotas() { return quotas_; }
  /// They are waited for by detach(). What they hold may be the last of a view.
  Errands& errands() { return errands_; }
  QueuePatience& patience() { return patience_; }
  /// Counts what the job has here anew, if that is limited.
  void recount(Job& job);
  /// Whether it is from now on.
  bool take_limit(const std::string& job, const JobAttributes& attributes);

  /// Directories below which data sets must lie; before the first job is looked at. None: anywhere.
  void set_data_roots(std::vector<std::string> roots) { data_roots_ = std::move(roots); }
  const std::vector<std::string>& data_roots() const { return data_roots_; }
  /// How the daemon was started, for .ptc/daemon.json; before anything is mounted. No secrets:
  /// names of files that have them at most.
  void set_options(json::object options) { options_ = std::move(options); }
  const json::object& options() const { return options_; }
  /// `root_dir`: a directory that keeps owner, mode and times of the mount's root.
  Result<> attach(JobStore* store, const std::string& root_dir);
  /// Lets go of every view, so that the store can be closed. After the session has ended.
  void detach();
  /// From now on changes are told to `cache`; null: no more, and none is under way.
  void set_kernel_cache(KernelCache* cache);
  void set_root(NodeRef root) { root_ = std::move(root); }
  /// Where what must outlive this process is written down; before anything is mounted. It outlives
  /// the tree's views.
  void set_live_state(LiveState* state) { live_state_ = state; }
  LiveState* live_state() const { return live_state_; }

  JobStore& store() const { return *store_; }
  int root_fd() const { return root_fd_.get(); }
  Node& root() const { return *root_; }
  NodeTable& table() { return table_; }
  Passthrough& passthrough() { return passthrough_; }
  GatherCache& gathered() { return gathered_; }
  PageFiles& page_files() { return page_files_; }
  Listings& listings() { return listings_; }
  RecentSets& recent_sets() { return recent_sets_; }
  /// Now and then: what was computed for somebody who looks no more goes.
  void forget_old();
  Stats& stats() { return stats_; }
  const FileHandles& handles() const { return handles_; }
  /// For a file that `user` opens. EMFILE.
  FsResult<DescriptorShareRef> take_descriptor(uid_t user);
  StepPool& data_set_steps() { return data_set_steps_; }
  std::chrono::steady_clock::time_point started() const { return started_; }

  /// The view of a job; null when there is no such job.
  Result<JobViewRef> job(std::string_view name);
  /// The same, if anybody has looked at it yet: else null, for the kernel knows nothing of it.
  JobViewRef known_view(const std::string& job);
  /// As KernelCache's; false when nothing is mounted.
  bool can_expire_names() const { return can_expire_names_.load(std::memory_order_relaxed); }
  void drop_attributes(const Node& node);
  // JobListener.
  void names_changed() override;
  /// Also of jobs removed here, by others than the kernel.
  void jobs_changed() override;
  void job_removed(const std::string& job) override;
  void job_changed(const std::string& job) override;
  void checkpoint_changed(const std::string& job, const std::string& checkpoint) override;
  void space_changed(const std::string& job) override;
  void images_removed(const std::string& job) override;
  void text_opens(const std::string& job, const std::string& file) override;
  void attributes_changed(const std::string& job) override;
  void data_set_changed(const std::string& job) override;
  Result<> contents_mended(const std::string& job, const std::string& checkpoint) override;
  Result<std::unique_ptr<Seal>> seal_job(const std::string& job) override;
  Result<std::unique_ptr<Seal>> seal(const std::string& job, const std::string& incoming,
                                     GivesWay gives_way) override;

 private:
  /// cache_ is not set then: only with both mutexes held, which the compiler cannot be told.
  void drop_contents(const std::vector<NodeRef>& nodes)
      PTC_REQUIRES(content_mutex_) PTC_NO_THREAD_SAFETY_ANALYSIS;

  JobStore* store_ = nullptr;
  LiveState* live_state_ = nullptr;
  UniqueFd root_fd_;
  FileHandles handles_;
  NodeRef root_;  // set before the mount, gone before the table
  json::object options_;
  const std::chrono::steady_clock::time_point started_;
  NodeTable table_;
  Passthrough passthrough_;
  GatherCache gathered_;
  PageFiles page_files_;
  std::vector<std::string> data_roots_;
  Quotas quotas_;
  QueuePatience patience_;
  Listings listings_;
  RecentSets recent_sets_;
  Stats stats_;
  StepPool data_set_steps_{8,
                           "ptcfs-dataset"};  // of all jobs' data sets, which wait for the metadata
  Mutex views_mutex_;
  uint64_t next_view_ PTC_GUARDED_BY(views_mutex_) = 1;
  std::unordered_set<std::string> view_keys_ PTC_GUARDED_BY(views_mutex_);  // ever given
  std::unordered_map<std::string, JobViewRef> views_ PTC_GUARDED_BY(views_mutex_);
  Mutex content_mutex_;  // held while content is dropped, for which requests are answered;
                         // before cache_mutex_
  Mutex cache_mutex_;
  KernelCache* cache_ PTC_GUARDED_BY(cache_mutex_) =
      nullptr;  // set with both held: either is enough to read it
  std::atomic<bool> can_expire_names_{false};
  Errands errands_;  // last: they use all of the above
};

/// Of a file whose opens share a descriptor, and can do without: it counts for the first of those
/// who have it open. Threads: any.
class OpenerShare {
 public:
  /// Null: there is none for him.
  DescriptorShareRef of(Tree& tree, uid_t user);

 private:
  Mutex mutex_;
  std::weak_ptr<DescriptorShare> share_ PTC_GUARDED_BY(mutex_);
};

inline constexpr const char* kRootKey = "root";

}  // namespace ptc
