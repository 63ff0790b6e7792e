#include "fs/tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "fs/commit_check.h"
#include "fs/nodes/real_node.h"
#include "reshard/job/job_record.h"
#include "store/base/json.h"

namespace ptc {

bool CommitGate::seal(const std::vector<std::string>& keys, const Owner& owner) {
  std::lock_guard lock(mutex_);
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end() && sealed->second != owner)
      return false;
  for (const std::string& key : keys) sealed_.emplace(key, owner);
  return true;
}

void CommitGate::unseal(const std::vector<std::string>& keys, const Owner& owner) {
  std::lock_guard lock(mutex_);
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end() && sealed->second == owner)
      sealed_.erase(sealed);
}

CommitGate::Owner CommitGate::owner_of(std::initializer_list<std::string> keys) const {
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end()) return sealed->second;
  return nullptr;
}

namespace {

constexpr auto kRenameWaits = std::chrono::milliseconds(500);  // for others' file systems

}  // namespace

struct stat CheckpointView::attributes(mode_t mode, std::string_view path) const {
  return virtual_stat(mode, uid, gid, time, InodeHash(inodes).add(path).value());
}

JobView::JobView(Tree& tree, JobRef job, std::string key)
    : tree_(tree),
      job_(std::move(job)),
      key_(std::move(key)),
      layout_("layout.json",
              agreed("layout.json", {.text = [this] { return std::optional(job_->layout_text()); },
                                     .save =
                                         [this](const std::string& t, const User&) {
                                           return say_saved(layout_, save_layout(t), true);
                                         },
                                     .remove = []() -> Result<> { return ok(); }})),
      rules_("rules.json",
             agreed("rules.json", {.text = [this] { return job_->rules_text(); },
                                   .save =
                                       [this](const std::string& t, const User&) {
                                         return say_saved(rules_, job_->save_rules(t), true);
                                       },
                                   .remove = [this] { return job_->remove_rules(); }})),
      source_("dataset/source.json",
              agreed("dataset/source.json",
                     {.text = [this] { return data_set_->source_text(); },
                      .save =
                          [this](const std::string& t, const User& by) {
                            return say_saved(source_, data_set_->save_source(t, by));
                          },
                      .remove = []() -> Result<> { return ok(); },
                      .rename_over =
                          [this](const std::string& t, const User& by) {
                            return say_saved(source_, data_set_->save_source(t, by, kRenameWaits));
                          }})),
      order_("dataset/order.json",
             agreed("dataset/order.json", {.text = [this] { return data_set_->order_text(); },
                                           .save =
                                               [this](const std::string& t, const User&) {
                                                 return say_saved(order_, data_set_->save_order(t));
                                               },
                                           .remove = []() -> Result<> { return ok(); }})),
      consumed_("dataset/consumed",
                agreed("dataset/consumed",
                       {.text = [this] { return std::optional(data_set_->consumed_text()); },
                        .save =
                            [this](const std::string& t, const User&) {
                              return say_saved(consumed_, data_set_->save_consumed(t));
                            },
                        .remove = []() -> Result<> { return ok(); }})),
      account_(tree.quotas().account(job_->name())) {
  const auto texts = [this] {
    return Quotas::Seen{
        .user = directory().st_uid, .amount = {text_bytes_.load(), 0}, .named = false};
  };
  tree.quotas().know_file(account_, this, texts, false);
  tree.quotas().note_nameless(account_, this);
}

JobView::~JobView() {
  const std::shared_lock gate(space_gate());
  tree_.quotas().forget_file(account_, this);
}

FsResult<> JobView::take_text(int64_t more, bool must) {
  // While recount() looks at this number, and then puts what it saw in the place of what was
  // counted, neither changes.
  const std::shared_lock gate(space_gate());
  if (limited()) {
    const uid_t owner = directory().st_uid;
    if (more > 0 && !must) {
      PTC_TRY(tree_.quotas().reserve(account_, owner, {more, 0}));
    } else {
      tree_.quotas().add(account_, owner, {more, 0});
    }
  }
  text_bytes_ += more;
  return ok();
}

EditableFile::Source JobView::agreed(std::string name, EditableFile::Source source) {
  source.attributes = [this, name] { return job_->attributes()->of(name); };
  source.change_attributes = [this, name](const FileAttributes& change) {
    return job_->change_attributes(name, change);
  };
  source.take = [this](int64_t more, bool must) { return take_text(more, must); };
  return source;
}

void JobView::apply_attributes() {
  const auto all = job_->attributes();
  limited_ = tree_.take_limit(job_->name(), *all);
  for (const auto& [name, file] :
       {std::pair("", &files_), {kIncomingName, &incoming_}, {kDataSetName, &data_set_files_}}) {
    const HeldFd held = file->hold();
    const int fd = held.get();
    const FileAttributes wanted = all->of(name);
    struct stat now = {};
    if (wanted.empty() || ::fstat(fd, &now) != 0) continue;
    const uid_t uid = wanted.uid.value_or(now.st_uid);
    const gid_t gid = wanted.gid.value_or(now.st_gid);
    const mode_t mode = wanted.mode.value_or(now.st_mode & 07777);
    // A daemon that is not root has only files of its own.
    const bool given = (uid == now.st_uid && gid == now.st_gid) || ::geteuid() != 0 ||
                       ::fchownat(fd, "", uid, gid, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) == 0;
    const bool changed = mode == (now.st_mode & 07777) ||
                         ::chmod(fmt::format("/proc/self/fd/{}", fd).c_str(), mode) == 0;
    if (!given || !changed) {
      spdlog::error("job '{}': owner {}:{} and mode {:o} of '{}' cannot be had here: {}",
                    job_->name(), uid, gid, mode, name, std::strerror(errno));
    }
  }
  for (const std::string& key :
       {key_, incoming_key(), key_ + "/dataset", key_ + "/dataset/gen", checkpoints_key(*this)})
    if (NodeRef node = tree_.table().find(key)) tree_.drop_attributes(*node);
}

FsResult<> JobView::agree_on(const std::string& name) {
  const HeldFd fd = (name.empty()            ? files_
                     : name == kIncomingName ? incoming_
                                             : data_set_files_)
                        .hold();
  struct stat now = {};
  if (!fd.valid() || ::fstat(fd.get(), &now) != 0) return last_errno();
  const Result<> agreed =
      job_->change_attributes(name, {now.st_uid, now.st_gid, now.st_mode & 07777});
  if (!agreed) apply_attributes();  // as it was
  return as_decided(agreed);
}

Result<JobViewRef> JobView::open(Tree& tree, JobRef job, std::string key) {
  JobViewRef view(new JobView(tree, std::move(job), std::move(key)));
  PTC_TRY(auto files, open_file(AT_FDCWD, view->job_->files_dir(), O_PATH | O_DIRECTORY));
  PTC_TRY(make_directory(files.get(), "incoming", 0755));
  PTC_TRY(auto incoming, open_file(files.get(), "incoming", O_PATH | O_DIRECTORY | O_NOFOLLOW));
  const bool first = ::faccessat(files.get(), "dataset", F_OK, 0) != 0;
  PTC_TRY(make_directory(files.get(), "dataset", 0755));
  PTC_TRY(auto data_set, open_file(files.get(), "dataset", O_PATH | O_DIRECTORY | O_NOFOLLOW));
  struct stat owner = {};
  if (first && ::geteuid() == 0 &&
      (::fstat(files.get(), &owner) != 0 ||
       ::fchownat(data_set.get(), "", owner.st_uid, owner.st_gid, AT_EMPTY_PATH) != 0)) {
    return errno_error(errno, "giving dataset/ to the job's owner");
  }
  view->files_ = HostFile(tree.handles(), std::move(files));
  view->incoming_ = HostFile(tree.handles(), std::move(incoming));
  view->data_set_files_ = HostFile(tree.handles(), std::move(data_set));
  for (EditableFile* file :
       {&view->layout_, &view->rules_, &view->source_, &view->order_, &view->consumed_}) {
    std::string name = file->name();
    std::replace(name.begin(), name.end(), '/', '.');
    file->keep_attributes(view->files_, fmt::format("../{}.attributes", name));
  }
  view->apply_attributes();  // first: from then on texts count, if anything here is limited
  for (EditableFile* file : {&view->layout_, &view->rules_}) (void)file->catch_up();
  view->open_data_set();
  return view;
}

namespace {

/// What jobs/<job>/in_force says.
std::optional<DataParallel> data_parallel_of(std::string_view text) {
  const Result<InForce> in_force = parse_in_force(text);
  if (in_force.has_error()) return std::nullopt;
  return DataParallel{in_force.value().spec.sizes.dp, in_force.value().revision};
}

}  // namespace

void JobView::open_data_set() {
  DataSetOptions options;
  options.job = job_->name();
  options.meta = &job_->meta();
  options.pool = &tree_.data_set_steps();
  options.directory = job_->files_dir() + "/..";
  options.data_roots = tree_.data_roots();
  options.owner = [this] {
    const struct stat owner = directory();
    return user_by_database(owner.st_uid, owner.st_gid);
  };
  options.dp_key = fmt::format("jobs/{}/in_force", job_->name());
  options.dp_of = [](std::string_view text) { return data_parallel_of(text); };
  options.may_decide = [this] { return job_->may_decide(); };
  options.commit = [this](MetaTransaction transaction) {
    return job_->decide(std::move(transaction));
  };
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
      if (error.code() == Code::kInvalidArgument)
        error = std::move(error).with_context(json_place(text, {"dp"}));
      job_->note_refused_save("layout.json", error.message());
      return error;
    }
  }
  return job_->save_layout(text);
}

Result<> JobView::say_saved(const EditableFile& file, Result<> saved, bool said) {
  if (saved) {
    job_->forget_refused_save(file.name());
  } else if (!said || saved.error().code() != Code::kInvalidArgument) {
    job_->note_refused_save(file.name(), saved.error().message());
  }
  return saved;
}

bool JobView::some_checkpoint_has(uint64_t count) const {
  const std::vector<CheckpointRef> all = job_->checkpoints();
  return std::any_of(all.begin(), all.end(),
                     [&](const auto& one) { return one->manifest().consumed == count; });
}

void JobView::catch_up() {
  (void)layout_.catch_up();
  (void)rules_.catch_up();
  touch_directory(files_fd().get());
  if (NodeRef node = tree_.table().find(key_)) tree_.drop_attributes(*node);
}

void JobView::note_data_set_changed() {
  bool gone = false;
  {
    std::lock_guard lock(mutex_);
    if (data_set_ == nullptr) return;  // it is only being opened
  }
  (void)consumed_.catch_up();  // there is always one
  const bool source_saved = source_.catch_up(), order_saved = order_.catch_up();
  {
    std::lock_guard lock(mutex_);
    std::vector<ShownGenerationRef> now;
    for (const uint64_t number : data_set_->generations())
      now.push_back(data_set_->generation(number));
    if (now == generations_ && !source_saved && !order_saved) return;
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
  PTC_TRY(make_directory(files_fd().get(), directory));
  return fmt::format("{}/{}", directory, scratch_files_.fetch_add(1));
}

std::string JobView::incoming_key() const {
  return fmt::format("{}/incoming/{}", key_, incoming_generation_.load());
}

struct stat JobView::directory() const {
  struct stat result = {};
  ::fstat(files_fd().get(), &result);
  return result;
}

FsResult<HostFile> JobView::copy_of(const HeldFd& fd) const {
  UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return last_errno();
  return HostFile(tree_.handles(), std::move(copy));
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

void touch_directory(int fd) {
  // Not the kernel's own "now": two changes may meet in one tick of that clock.
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[2] = {{0, UTIME_OMIT}, now};
  ::utimensat(fd, "", times, AT_EMPTY_PATH);
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
  handles_.start(root_dir);
  for (const JobRef& job : store_->jobs())
    if (take_limit(job->name(), *job->attributes())) recount(*job);
  return ok();
}

void Tree::detach() {
  root_.reset();
  table_.forget_all();
  errands_.wait();          // they use the store
  decltype(views_) ending;  // destroyed without the lock
  std::lock_guard lock(views_mutex_);
  ending.swap(views_);
}

void Tree::set_kernel_cache(KernelCache* cache) {
  std::lock_guard content_lock(content_mutex_);
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
  JobViewRef removed;  // destroyed without the lock
  auto view = [&]() -> Result<JobViewRef> {
    std::lock_guard lock(views_mutex_);
    JobRef job = store_->find(name);
    auto found = views_.find(key);
    if (found != views_.end()) {
      if (found->second->job_ref() == job) return found->second;
      removed = std::move(found->second);  // perhaps made again
      views_.erase(found);
      quotas_.detach(key);
    }
    if (job == nullptr) return JobViewRef();
    PTC_TRY(auto made, JobView::open(*this, job, fmt::format("j{}", next_view_++)));
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
  std::lock_guard lock(mutex_);
  if (auto known = share_.lock()) return known;
  const auto share = tree.take_descriptor(user);
  if (!share) return nullptr;
  share_ = share.value();
  return share.value();
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

void Tree::space_changed(const std::string& job_name) {
  const JobRef job = store_ == nullptr ? nullptr : store_->find(job_name);
  if (job != nullptr) recount(*job);
}

void Tree::images_removed(const std::string& job_name) {
  {
    std::lock_guard lock(cache_mutex_);
    if (cache_ == nullptr) return;
  }
  auto found = job(job_name);
  if (found && found.value() != nullptr) found.value()->let_go_of_removed();
}

namespace {

/// What is below a directory, hard links once. What goes meanwhile is not counted.
void count_space(int directory, bool top, std::set<ino_t>& seen, Quotas::ByUser& by_user) {
  UniqueFd fd(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::unique_ptr<DIR, int (*)(DIR*)> stream(fd.valid() ? ::fdopendir(fd.get()) : nullptr,
                                             &::closedir);
  if (stream == nullptr) return;
  (void)fd.release();  // the stream's
  const std::string here = fmt::format("/proc/self/fd/{}", ::dirfd(stream.get()));
  if (struct stat stat = {}; top && ::fstat(::dirfd(stream.get()), &stat) == 0)
    by_user[stat.st_uid].bytes += xattr_bytes(here + "/.");
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    struct stat stat = {};
    if (name == "." || name == ".." ||
        ::fstatat(::dirfd(stream.get()), entry->d_name, &stat, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    const bool own = top && (name == kIncomingName || name == kDataSetName);
    if (own) by_user[stat.st_uid].bytes += xattr_bytes(here + "/" + entry->d_name);
    if (!own && (S_ISDIR(stat.st_mode) || stat.st_nlink < 2 || seen.insert(stat.st_ino).second)) {
      by_user[stat.st_uid].bytes += stat.st_blocks * 512 + xattr_bytes(here + "/" + entry->d_name);
      ++by_user[stat.st_uid].files;
    }
    if (!S_ISDIR(stat.st_mode)) continue;
    const UniqueFd below(::openat(::dirfd(stream.get()), entry->d_name,
                                  O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (below.valid()) count_space(below.get(), false, seen, by_user);
  }
}

}  // namespace

bool Tree::take_limit(const std::string& job, const JobAttributes& attributes) {
  const std::string quota = attributes.of("").quota.value_or("");
  const auto limit = QuotaLimit::parse(quota);
  quotas_.set_job_limit(job, quota.empty() || !limit ? std::nullopt : std::optional(limit.value()));
  return quotas_.limits(job);
}

void Tree::recount(Job& job) {
  if (!quotas_.limits(job.name())) return;
  quotas_.recount(job.name(), [&job] {
    Quotas::Counted found;
    std::set<ino_t> seen;
    if (const UniqueFd top(::open(job.files_dir().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
        top.valid())
      count_space(top.get(), true, seen, found.outside);
    for (const CheckpointRef& checkpoint : job.checkpoints())
      for (const StoredImage& image : checkpoint->stored()->images)
        if (image.image != nullptr && image.image->is_here())
          found.images.push_back({checkpoint->manifest().uid,
                                  static_cast<int64_t>(image.image->bytes()), image.image});
    return found;
  });
}

void Tree::attributes_changed(const std::string& job_name) {
  // Who has not looked at the job yet applies them when somebody does.
  if (JobViewRef view = known_view(job_name)) view->apply_attributes();
  const JobRef job = store_ == nullptr ? nullptr : store_->find(job_name);
  if (job != nullptr && take_limit(job_name, *job->attributes())) recount(*job);
}

void Tree::data_set_changed(const std::string& job_name) {
  // Who has not looked at the job yet reads the metadata when somebody does.
  if (JobViewRef view = known_view(job_name)) view->data_set().catch_up();
}

Result<> Tree::contents_mended(const std::string& job_name, const std::string& name) {
  JobViewRef view;
  {
    std::lock_guard lock(views_mutex_);
    if (const auto found = views_.find(job_name); found != views_.end()) view = found->second;
  }
  const std::shared_ptr<CheckpointView> checkpoint =
      view != nullptr ? view->checkpoint(name) : nullptr;
  if (checkpoint == nullptr) return ok();  // nobody has looked at it
  // What the kernel asks for again comes from what is right already.
  std::vector<NodeRef> nodes = table_.under(checkpoint_key(*checkpoint));
  std::erase_if(nodes, [](const NodeRef& node) { return !node->has_content(); });
  PTC_TRY(gathered_.refresh(checkpoint->key + "/"));
  std::lock_guard lock(content_mutex_);
  for (const NodeRef& node : nodes)
    if (cache_ != nullptr) cache_->drop_content(*node);
  return ok();
}

Result<std::unique_ptr<Seal>> Tree::seal(const std::string& job_name, const std::string& incoming,
                                         GivesWay gives_way) {
  {
    std::lock_guard lock(cache_mutex_);
    if (cache_ == nullptr) return std::unique_ptr<Seal>();  // not mounted: nobody reaches the files
  }
  PTC_TRY(auto view, job(job_name));
  if (view == nullptr) return make_error(Code::kNotFound, "there is no job '{}'", job_name);
  auto check = std::make_unique<CommitCheck>(std::move(view), incoming, std::move(gives_way));
  PTC_TRY(check->prepare());
  return std::unique_ptr<Seal>(std::move(check));
}

void Tree::forget_old() {
  listings_.forget_old();
  recent_sets_.forget_old();
}

void Tree::names_changed() {
  std::lock_guard lock(cache_mutex_);
  if (cache_ != nullptr) cache_->expire_names();
}

JobViewRef Tree::known_view(const std::string& job_name) {
  std::lock_guard lock(views_mutex_);
  const auto found = views_.find(job_name);
  return found != views_.end() ? found->second : nullptr;
}

void Tree::jobs_changed() {
  // The view of one, if there is any, goes when somebody looks for it, which may be never.
  for (const std::string& name : quotas_.jobs())
    if (store_ != nullptr && store_->find(name) == nullptr) quotas_.settle(quotas_.detach(name));
  std::lock_guard lock(cache_mutex_);
  if (cache_ == nullptr) return;
  touch_directory(root_fd());
  cache_->drop_attributes(root());
  cache_->expire_names();
}

void Tree::job_changed(const std::string& job_name) {
  if (JobViewRef view = known_view(job_name)) view->catch_up();
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
  recount(view.job());
  // Times first: by them the kernel knows that what it has listed is old.
  touch_directory(view.files_fd().get());
  view.note_checkpoints_changed();
  std::vector<NodeRef> nodes;
  for (const std::string& key : {view.key(), checkpoints_key(view)})
    if (NodeRef node = table_.find(key)) nodes.push_back(std::move(node));
  if (auto checkpoint = view.checkpoint(name)) {
    // The same names and bytes, but which of them take memory (st_blocks) has changed.
    for (NodeRef& node : table_.under(checkpoint_key(*checkpoint)))
      nodes.push_back(std::move(node));
  }
  std::lock_guard lock(cache_mutex_);
  if (cache_ == nullptr) return;
  for (const NodeRef& node : nodes) cache_->drop_attributes(*node);
}

}  // namespace ptc
