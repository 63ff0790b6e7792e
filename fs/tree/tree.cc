#include "fs/tree/tree.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "fs/tree/commit_check.h"
#include "fs/tree/real_node.h"
#include "store/base/mutex.h"
#include "store/base/walk_tree.h"

namespace ptc {

Tree::Tree(uint64_t gathered_bytes)
    : started_(std::chrono::steady_clock::now()),
      gathered_(gathered_bytes, std::thread::hardware_concurrency()) {}

Tree::~Tree() { root_.reset(); }

Result<> Tree::attach(JobStore* store, const std::string& root_dir) {
  store_ = store;
  PTC_TRY(make_directory(AT_FDCWD, root_dir, 0755));
  PTC_TRY(root_fd_, open_file(AT_FDCWD, root_dir, O_PATH | O_DIRECTORY | O_NOFOLLOW));
  handles_.start(root_dir);
  for (const JobRef& job : store_->jobs())
    if (take_limit(job->name(), *job->attributes())) recount(*job);
  return ok();
}

void Tree::detach() {
  page_files_.stop();
  gathered_.stop();
  root_.reset();
  table_.forget_all();
  errands_.wait();          // they use the store
  decltype(views_) ending;  // destroyed without the lock
  MutexLock lock(views_mutex_);
  ending.swap(views_);
}

void Tree::set_kernel_cache(KernelCache* cache) {
  MutexLock content_lock(content_mutex_);
  MutexLock lock(cache_mutex_);
  cache_ = cache;
  can_expire_names_ = cache != nullptr && cache->can_expire_names();
}

void Tree::drop_attributes(const Node& node) {
  MutexLock lock(cache_mutex_);
  if (cache_ != nullptr) cache_->drop_attributes(node);
}

Result<JobViewRef> Tree::job(std::string_view name) {
  std::string key(name);
  JobViewRef removed;  // destroyed without the lock
  auto view = [&]() -> Result<JobViewRef> {
    MutexLock lock(views_mutex_);
    JobRef job = store_->find(name);
    auto found = views_.find(key);
    if (found != views_.end()) {
      if (found->second->job_ref() == job) return found->second;
      removed = std::move(found->second);  // perhaps made again
      views_.erase(found);
      quotas_.detach(key);
    }
    if (job == nullptr) return JobViewRef();
    // By which the job is known also to a later process; of another view of the same, a new one.
    std::string view_key = "j" + job->id();
    if (!view_keys_.insert(view_key).second)
      view_key = fmt::format("{}.{}", view_key, next_view_++);
    PTC_TRY(auto made, JobView::open(*this, job, std::move(view_key)));
    views_.emplace(std::move(key), made);
    return made;
  }();
  if (removed != nullptr) quotas_.settle(removed->account());
  return view;
}

FsResult<DescriptorShareRef> Tree::take_descriptor(uid_t user) {
  auto share = DescriptorShare::take(user, root_fd_.get());
  if (share || share.error().value != EMFILE) return share;
  gathered_.drop_unused();
  return DescriptorShare::take(user, root_fd_.get());
}

DescriptorShareRef OpenerShare::of(Tree& tree, uid_t user) {
  MutexLock lock(mutex_);
  if (auto known = share_.lock()) return known;
  const auto share = tree.take_descriptor(user);
  if (!share) return nullptr;
  share_ = share.value();
  return share.value();
}

void Tree::space_changed(const std::string& job_name) {
  const JobRef job = store_ == nullptr ? nullptr : store_->find(job_name);
  if (job != nullptr) recount(*job);
}

void Tree::images_removed(const std::string& job_name) {
  {
    MutexLock lock(cache_mutex_);
    if (cache_ == nullptr) return;
  }
  auto found = job(job_name);
  if (found && found.value() != nullptr) found.value()->let_go_of_removed();
}

namespace {

/// What is below a job's directory, hard links once. What goes meanwhile is not counted.
void count_space(int top, const std::string& job, Quotas::ByUser& by_user) {
  const auto path_of = [](int fd, const char* name) {
    return fmt::format("/proc/self/fd/{}/{}", fd, name);
  };
  struct stat top_facts = {};
  if (::fstat(top, &top_facts) == 0) {
    by_user[top_facts.st_uid].bytes += xattr_bytes(path_of(top, "."));
    ++by_user[top_facts.st_uid].files;
  }
  std::set<ino_t> seen;
  bool at_top = true;  // a directory's own entries come before what is below them
  const auto count = [&](int dir, const char* name, const struct stat& facts) {
    if (at_top) {
      struct stat here = {};
      at_top = ::fstat(dir, &here) == 0 && here.st_ino == top_facts.st_ino;
    }
    QuotaAmount& sum = by_user[facts.st_uid];
    const bool own = at_top && (std::string_view(name) == kIncomingName ||
                                std::string_view(name) == kDataSetName);
    if (own) {
      sum.bytes += xattr_bytes(path_of(dir, name));
    } else if (S_ISDIR(facts.st_mode) || facts.st_nlink < 2 || seen.insert(facts.st_ino).second) {
      sum.bytes += facts.st_blocks * 512 + xattr_bytes(path_of(dir, name));
      ++sum.files;
    }
    return true;
  };
  const Result<> counted = walk_tree(top, count);
  if (counted.has_error())
    spdlog::warn("job '{}': not all that it takes could be counted: {}", job,
                 counted.error().message());
}

}  // namespace

bool Tree::take_limit(const std::string& job, const JobAttributes& attributes) {
  const std::string quota = attributes.of("").quota.value_or("");
  const auto limit = QuotaLimit::parse(quota);
  quotas_.set_job_limit(job, quota.empty() || !limit ? std::nullopt : std::optional(limit.value()),
                        attributes.of("").uid.value_or(0));
  return quotas_.limits(job);
}

void Tree::recount(Job& job) {
  if (!quotas_.limits(job.name())) return;
  quotas_.recount(job.name(), [&job] {
    Quotas::Counted found;
    if (const UniqueFd top(::open(job.files_dir().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
        top.valid())
      count_space(top.get(), job.name(), found.outside);
    for (const CheckpointRef& checkpoint : job.checkpoints()) {
      const std::shared_ptr<const StoredState> stored = checkpoint->stored();
      for (const StoredImage& image : stored->images)
        if (image.image != nullptr && image.image->is_here())
          found.images.push_back({checkpoint->manifest().uid,
                                  static_cast<int64_t>(image.image->bytes()), image.image});
    }
    return found;
  });
}

void Tree::attributes_changed(const std::string& job_name) {
  // Who has not looked at the job yet applies them when somebody does.
  if (JobViewRef view = known_view(job_name)) view->apply_attributes();
  const JobRef job = store_ == nullptr ? nullptr : store_->find(job_name);
  if (job != nullptr && take_limit(job_name, *job->attributes()) && quotas_.is_due(job_name))
    recount(*job);
}

void Tree::text_opens(const std::string& job_name, const std::string& file) {
  if (JobViewRef view = known_view(job_name)) view->conceal_refusal(file);
}

void Tree::data_set_changed(const std::string& job_name) {
  // Who has not looked at the job yet reads the metadata when somebody does.
  if (JobViewRef view = known_view(job_name)) view->data_set().catch_up();
}

void Tree::drop_contents(const std::vector<NodeRef>& nodes) {
  for (const NodeRef& node : nodes)
    if (cache_ != nullptr) cache_->drop_content(*node);
}

Result<> Tree::contents_mended(const std::string& job_name, const std::string& name) {
  // Of what an earlier process has shown the kernel may have bytes, too.
  for (const uint64_t id : table_.not_found_yet()) (void)table_.at(id);
  JobViewRef view;
  {
    MutexLock lock(views_mutex_);
    if (const auto found = views_.find(job_name); found != views_.end()) view = found->second;
  }
  const std::shared_ptr<CheckpointView> checkpoint =
      view != nullptr ? view->checkpoint(name) : nullptr;
  if (checkpoint == nullptr || !checkpoint->shown) return ok();  // nobody has looked at it
  // What the kernel asks for again comes from what is right already.
  std::vector<NodeRef> nodes = table_.under(checkpoint_key(*checkpoint));
  std::erase_if(nodes, [](const NodeRef& node) { return !node->has_content(); });
  PTC_TRY(gathered_.refresh(checkpoint->key + "/"));
  MutexLock lock(content_mutex_);
  drop_contents(nodes);
  return ok();
}

Result<std::unique_ptr<Seal>> Tree::seal(const std::string& job_name, const std::string& incoming,
                                         GivesWay gives_way) {
  {
    MutexLock lock(cache_mutex_);
    if (cache_ == nullptr) return std::unique_ptr<Seal>();  // not mounted: nobody reaches the files
  }
  PTC_TRY(auto view, job(job_name));
  if (view == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", job_name);
  auto check = std::make_unique<CommitCheck>(std::move(view), incoming, std::move(gives_way));
  PTC_TRY(check->prepare());
  return std::unique_ptr<Seal>(std::move(check));
}

namespace {

/// Of the directories of a job that is being removed.
class JobSeal final : public Seal {
 public:
  explicit JobSeal(JobViewRef view)
      : view_(std::move(view)),
        keys_{view_->key(), view_->incoming_key(), view_->key() + "/dataset"},
        owner_(std::make_shared<const GivesWay>()) {}
  ~JobSeal() override { view_->gate().unseal(keys_, owner_); }
  bool seal() { return view_->gate().seal(keys_, owner_); }
  void committed() override {}

 private:
  const JobViewRef view_;
  const std::vector<std::string> keys_;
  const CommitGate::Owner owner_;
};

}  // namespace

Result<std::unique_ptr<Seal>> Tree::seal_job(const std::string& job_name) {
  {
    MutexLock lock(cache_mutex_);
    if (cache_ == nullptr) return std::unique_ptr<Seal>();  // not mounted: nobody reaches the files
  }
  PTC_TRY(auto view, job(job_name));
  if (view == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", job_name);
  auto seal = std::make_unique<JobSeal>(std::move(view));
  if (!seal->seal()) return make_error(Code::kBusy, "job {} is being committed to", job_name);
  return std::unique_ptr<Seal>(std::move(seal));
}

void Tree::forget_old() {
  listings_.forget_old();
  recent_sets_.forget_old();
}

void Tree::names_changed() {
  MutexLock lock(cache_mutex_);
  if (cache_ != nullptr) cache_->expire_names();
}

JobViewRef Tree::known_view(const std::string& job_name) {
  MutexLock lock(views_mutex_);
  const auto found = views_.find(job_name);
  return found != views_.end() ? found->second : nullptr;
}

void Tree::jobs_changed() {
  // Of those without a view.
  for (const std::string& name : quotas_.jobs())
    if (store_ != nullptr && store_->find(name) == nullptr) quotas_.settle(quotas_.detach(name));
  MutexLock lock(cache_mutex_);
  if (cache_ == nullptr) return;
  touch_directory(root_fd());
  cache_->drop_attributes(root());
  cache_->expire_names();
}

void Tree::job_removed(const std::string& job_name) {
  // Nobody may look for it ever again, and its view holds all that was known of it.
  if (known_view(job_name) != nullptr) (void)job(job_name);
}

void Tree::job_changed(const std::string& job_name) {
  if (JobViewRef view = known_view(job_name)) view->catch_up();
}

void Tree::checkpoint_changed(const std::string& job_name, const std::string& name) {
  {
    // Not mounted yet, or not any more: a reshard may be resumed before there is a store to ask.
    MutexLock lock(cache_mutex_);
    if (cache_ == nullptr) return;
  }
  auto found = job(job_name);
  if (!found || found.value() == nullptr) return;
  JobView& view = *found.value();
  recount(view.job());
  // Times first: by them the kernel knows that what it has listed is old.
  touch_directory(view.files_fd().get());
  view.note_checkpoints_changed();
  std::vector<NodeRef> nodes;
  for (const std::string& key : {view.key(), checkpoints_key(view)})
    if (NodeRef node = table_.find(key)) nodes.push_back(std::move(node));
  if (const auto checkpoint = view.checkpoint(name); checkpoint != nullptr && checkpoint->shown) {
    // The same names and bytes, but which of them take memory (st_blocks) has changed.
    for (NodeRef& node : table_.under(checkpoint_key(*checkpoint)))
      nodes.push_back(std::move(node));
  }
  MutexLock lock(cache_mutex_);
  if (cache_ == nullptr) return;
  for (const NodeRef& node : nodes) cache_->drop_attributes(*node);
}

}  // namespace ptc
