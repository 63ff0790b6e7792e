#include "fs/tree.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "fs/nodes/real_node.h"
#include "store/base/json.h"

namespace ptc {

void CommitGate::seal(const std::vector<std::string>& keys) {
  std::lock_guard lock(mutex_);
  sealed_.insert(keys.begin(), keys.end());
}

void CommitGate::unseal(const std::vector<std::string>& keys) {
  std::lock_guard lock(mutex_);
  for (const std::string& key : keys) sealed_.erase(key);
}

struct stat CheckpointView::attributes(mode_t mode, std::string_view path) const {
  return virtual_stat(mode, uid, gid, time, InodeHash(inodes).add(path).value());
}

JobView::JobView(Tree& tree, JobRef job, std::string key)
    : tree_(tree),
      job_(std::move(job)),
      key_(std::move(key)),
      layout_("layout.json", {.text = [this] { return std::optional(job_->layout_text()); },
                              .save = [this](const std::string& t) { return save_layout(t); },
                              .remove = []() -> Result<> { return ok(); }}),
      rules_("rules.json", {.text = [this] { return job_->rules_text(); },
                            .save = [this](const std::string& t) { return job_->save_rules(t); },
                            .remove = [this] { return job_->remove_rules(); }}),
      source_("dataset/source.json", {.text = [this] { return data_set_->source_text(); },
                                      .save = [this](const std::string& t) { return data_set_->save_source(t); },
                                      .remove = []() -> Result<> { return ok(); }}),
      order_("dataset/order.json", {.text = [this] { return data_set_->order_text(); },
                                    .save = [this](const std::string& t) { return data_set_->save_order(t); },
                                    .remove = []() -> Result<> { return ok(); }}),
      consumed_("dataset/consumed", {.text = [this] { return std::optional(data_set_->consumed_text()); },
                                     .save = [this](const std::string& t) { return data_set_->save_consumed(t); },
                                     .remove = []() -> Result<> { return ok(); }}) {}

Result<JobViewRef> JobView::open(Tree& tree, JobRef job, std::string key) {
  JobViewRef view(new JobView(tree, std::move(job), std::move(key)));
  PTC_TRY(view->files_fd_, open_file(AT_FDCWD, view->job_->files_dir(), O_PATH | O_DIRECTORY));
  PTC_TRY(make_directory(view->files_fd_.get(), "incoming", 0755));
  PTC_TRY(view->incoming_fd_,
          open_file(view->files_fd_.get(), "incoming", O_PATH | O_DIRECTORY | O_NOFOLLOW));
  const bool first = ::faccessat(view->files_fd_.get(), "dataset", F_OK, 0) != 0;
  PTC_TRY(make_directory(view->files_fd_.get(), "dataset", 0755));
  PTC_TRY(view->data_set_fd_,
          open_file(view->files_fd_.get(), "dataset", O_PATH | O_DIRECTORY | O_NOFOLLOW));
  const struct stat owner = view->directory();
  if (first && ::geteuid() == 0 &&
      ::fchownat(view->data_set_fd_.get(), "", owner.st_uid, owner.st_gid, AT_EMPTY_PATH) != 0) {
    return errno_error(errno, "giving dataset/ to the job's owner");
  }
  for (EditableFile* file : {&view->layout_, &view->rules_, &view->source_, &view->order_, &view->consumed_}) {
    std::string name = file->name();
    std::replace(name.begin(), name.end(), '/', '.');
    file->keep_attributes(view->files_fd_.get(), fmt::format("../{}.attributes", name));
  }
  view->open_data_set();
  return view;
}

namespace {

/// What jobs/<job>/in_force says.
std::optional<DataParallel> data_parallel_of(std::string_view text) {
  const auto in_force = Job::in_force_of(text);
  if (!in_force) return std::nullopt;
  return DataParallel{in_force->first.sizes.dp, in_force->second};
}

}  // namespace

void JobView::open_data_set() {
  DataSetOptions options;
  options.job = job_->name();
  options.meta = &job_->meta();
  options.directory = job_->files_dir() + "/..";
  options.dp_key = fmt::format("jobs/{}/in_force", job_->name());
  options.dp_of = [](std::string_view text) { return data_parallel_of(text); };
  options.may_decide = [this] { return job_->may_decide(); };
  options.commit = [this](MetaTransaction transaction) { return job_->decide(std::move(transaction)); };
  options.checkpoint_has = [this](uint64_t count) { return some_checkpoint_has(count); };
  options.changed = [this] { note_data_set_changed(); };
  options.decided = [this] { job_->tell_data_set_changed(); };
  auto opened = DataSet::open(std::move(options));
  std::lock_guard lock(mutex_);  // note_data_set_changed() may be called already
  data_set_ = std::move(opened);
}

/// A layout of another dp must suit the data set, too, where that is now.
Result<> JobView::save_layout(const std::string& text) {
  const Result<Layout> wanted = Layout::parse(text);
  if (wanted && text != job_->layout_text() && job_->may_decide()) {
    const Result<> fits = data_set_->check_dp(wanted.value().spec.sizes.dp);
    if (!fits) {
      Error error = fits.error();
      if (error.code() == Code::kInvalidArgument) error = std::move(error).with_context(json_place(text, {"dp"}));
      job_->note_refused_save("layout.json", error.message());
      return error;
    }
  }
  return job_->save_layout(text);
}

bool JobView::some_checkpoint_has(uint64_t count) const {
  const std::vector<CheckpointRef> all = job_->checkpoints();
  return std::any_of(all.begin(), all.end(), [&](const auto& one) { return one->manifest().consumed == count; });
}

void JobView::note_data_set_changed() {
  bool gone = false;
  {
    std::lock_guard lock(mutex_);
    if (data_set_ == nullptr) return;  // it is only being opened
    std::vector<ShownGenerationRef> now;
    for (const uint64_t number : data_set_->generations()) now.push_back(data_set_->generation(number));
    if (now == generations_) return;
    const auto still = [&](const ShownGenerationRef& one) {
      return std::find(now.begin(), now.end(), one) != now.end();
    };
    gone = !std::all_of(generations_.begin(), generations_.end(), still);
    std::erase_if(generation_keys_, [&](const auto& entry) { return !still(entry.second.first); });
    generations_ = std::move(now);
  }
  touch_data_set();
  if (gone) tree_.names_changed();
}

void JobView::touch_data_set() {
  data_set_changed_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
  for (const char* name : {"/dataset", "/dataset/gen"})
    if (NodeRef node = tree_.table().find(key_ + name)) tree_.drop_attributes(*node);
}

timespec JobView::data_set_changed() const {
  const int64_t ns = data_set_changed_ns_.load();
  return {ns / 1000000000, ns % 1000000000};
}

std::string JobView::generation_key(const ShownGenerationRef& generation) {
  std::lock_guard lock(mutex_);
  const auto [found, is_new] = generation_keys_.try_emplace(generation.get(), generation, 0);
  if (is_new) found->second.second = next_generation_key_++;
  return fmt::format("{}/dataset/gen/{}", key_, found->second.second);
}

Result<std::string> JobView::scratch_path() {
  const std::string directory = std::string("../") + Job::kScratchDir;
  PTC_TRY(make_directory(files_fd_.get(), directory));
  return fmt::format("{}/{}", directory, scratch_files_.fetch_add(1));
}

std::string JobView::incoming_key() const {
  return fmt::format("{}/incoming/{}", key_, incoming_generation_.load());
}

struct stat JobView::directory() const {
  struct stat result = {};
  ::fstat(files_fd_.get(), &result);
  return result;
}

timespec JobView::checkpoints_changed() const {
  int64_t ns = checkpoints_changed_ns_.load();
  return {ns / 1000000000, ns % 1000000000};
}

void JobView::note_checkpoints_changed() {
  checkpoints_changed_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::system_clock::now().time_since_epoch())
                                .count();
}

std::shared_ptr<CheckpointView> JobView::checkpoint(const std::string& name) {
  std::lock_guard lock(mutex_);
  CheckpointRef checkpoint = job_->find_checkpoint(name);
  auto found = checkpoints_.find(name);
  if (found != checkpoints_.end()) {
    if (found->second->checkpoint == checkpoint) return found->second;
    checkpoints_.erase(found);
  }
  if (checkpoint == nullptr) return nullptr;
  auto view = std::make_shared<CheckpointView>();
  const Manifest& manifest = checkpoint->manifest();
  view->checkpoint = checkpoint;
  view->key = fmt::format("{}/c/{}", key_, manifest.id);
  view->uid = manifest.uid;
  view->gid = manifest.gid;
  view->time = {manifest.time_ns / 1000000000, manifest.time_ns % 1000000000};
  // The time is part of it, so that a later checkpoint of the same name has other inodes.
  view->inodes.add(fmt::format("{}.{}/{}/", view->time.tv_sec, view->time.tv_nsec, name));
  checkpoints_.emplace(name, view);
  return view;
}

std::string checkpoints_key(const JobView& job) { return job.key() + "/checkpoints"; }
std::string checkpoint_key(const CheckpointView& checkpoint) { return checkpoint.key; }

Tree::Tree(uint64_t gathered_bytes)
    : started_(std::chrono::steady_clock::now()),
      gathered_(gathered_bytes, std::thread::hardware_concurrency()) {}

Tree::~Tree() { root_.reset(); }

Result<> Tree::attach(JobStore* store, const std::string& root_dir) {
  store_ = store;
  PTC_TRY(make_directory(AT_FDCWD, root_dir, 0755));
  PTC_TRY(root_fd_, open_file(AT_FDCWD, root_dir, O_PATH | O_DIRECTORY | O_NOFOLLOW));
  return ok();
}

void Tree::detach() {
  root_.reset();
  table_.forget_all();
  std::lock_guard lock(views_mutex_);
  views_.clear();
}

void Tree::set_kernel_cache(KernelCache* cache) {
  std::lock_guard lock(cache_mutex_);
  cache_ = cache;
  can_expire_names_ = cache != nullptr && cache->can_expire_names();
}

void Tree::drop_attributes(const Node& node) {
  std::lock_guard lock(cache_mutex_);
  if (cache_ != nullptr) cache_->drop_attributes(node);
}

Result<JobViewRef> Tree::job(std::string_view name) {
  std::string key(name);
  std::lock_guard lock(views_mutex_);
  JobRef job = store_->find(name);
  auto found = views_.find(key);
  if (found != views_.end()) {
    if (found->second->job_ref() == job) return found->second;
    views_.erase(found);  // removed, perhaps made again
  }
  if (job == nullptr) return JobViewRef();
  PTC_TRY(auto view, JobView::open(*this, job, fmt::format("j{}", next_view_++)));
  views_.emplace(std::move(key), view);
  return view;
}

void JobView::note_committed(const std::shared_ptr<RealNode>& file) {
  std::lock_guard lock(mutex_);
  committed_.push_back(file);
}

void JobView::let_go_of_removed() {
  std::vector<std::shared_ptr<RealNode>> ending;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  std::erase_if(committed_, [&](const std::weak_ptr<RealNode>& file) {
    ending.push_back(file.lock());
    return ending.back() == nullptr || ending.back()->let_go_if_removed();
  });
}

void Tree::images_removed(const std::string& job_name) {
  {
    std::lock_guard lock(cache_mutex_);
    if (cache_ == nullptr) return;
  }
  auto found = job(job_name);
  if (found && found.value() != nullptr) found.value()->let_go_of_removed();
}

void Tree::data_set_changed(const std::string& job_name) {
  JobViewRef view;
  {
    std::lock_guard lock(views_mutex_);
    if (const auto found = views_.find(job_name); found != views_.end()) view = found->second;
  }
  // Who has not looked at the job yet reads the metadata when somebody does.
  if (view != nullptr) view->data_set().catch_up();
}

void Tree::names_changed() {
  std::lock_guard lock(cache_mutex_);
  if (cache_ != nullptr) cache_->expire_names();
}

void Tree::job_removed() {
  ::utimensat(root_fd(), "", nullptr, AT_EMPTY_PATH);
  drop_attributes(root());
  names_changed();
}

void Tree::checkpoint_changed(const std::string& job_name, const std::string& name) {
  {
    // Not mounted yet, or not any more: a reshard may be resumed before there is a store to ask.
    std::lock_guard lock(cache_mutex_);
    if (cache_ == nullptr) return;
  }
  auto found = job(job_name);
  if (!found || found.value() == nullptr) return;
  JobView& view = *found.value();
  // Times first: by them the kernel knows that what it has listed is old.
  ::utimensat(view.files_fd(), "", nullptr, AT_EMPTY_PATH);
  view.note_checkpoints_changed();
  std::vector<NodeRef> nodes;
  for (const std::string& key : {view.key(), checkpoints_key(view)})
    if (NodeRef node = table_.find(key)) nodes.push_back(std::move(node));
  if (auto checkpoint = view.checkpoint(name)) {
    // The same names and bytes, but which of them take memory (st_blocks) has changed.
    for (NodeRef& node : table_.under(checkpoint_key(*checkpoint))) nodes.push_back(std::move(node));
  }
  std::lock_guard lock(cache_mutex_);
  if (cache_ == nullptr) return;
  for (const NodeRef& node : nodes) cache_->drop_attributes(*node);
}

}  // namespace ptc
