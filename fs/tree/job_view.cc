#include "fs/tree/job_view.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fs/tree/real_node.h"
#include "fs/tree/tree.h"
#include "reshard/job/job_record.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {

bool CommitGate::seal(const std::vector<std::string>& keys, const Owner& owner) {
  MutexLock lock(mutex_);
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end() && sealed->second != owner)
      return false;
  for (const std::string& key : keys) sealed_.emplace(key, owner);
  return true;
}

void CommitGate::unseal(const std::vector<std::string>& keys, const Owner& owner) {
  MutexLock lock(mutex_);
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end() && sealed->second == owner)
      sealed_.erase(sealed);
  unsealed_.notify_all();
}

CommitGate::Owner CommitGate::owner_of(std::initializer_list<std::string> keys) const {
  for (const std::string& key : keys)
    if (const auto sealed = sealed_.find(key); sealed != sealed_.end()) return sealed->second;
  return nullptr;
}

namespace {

constexpr auto kRenameWaits = std::chrono::milliseconds(500);  // for others' file systems

FileAttributes changes_in(const AttributeChange& change) {
  FileAttributes changed;
  if (change.uid) changed.uid = *change.uid;
  if (change.gid) changed.gid = *change.gid;
  if (change.mode) changed.mode = *change.mode & 07777;
  return changed;
}

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
                                         [this](const std::string& t, const TextSave& how) {
                                           return say_saved(layout_, save_layout(t, how), true);
                                         },
                                     .remove = []() -> Result<> { return ok(); }})),
      rules_("rules.json",
             agreed("rules.json", {.text = [this] { return job_->rules_text(); },
                                   .save =
                                       [this](const std::string& t, const TextSave& how) {
                                         const auto save = [&](const auto& at_most) {
                                           return job_->save_rules(t, at_most);
                                         };
                                         return say_saved(rules_, save_at_most(rules_, how, save),
                                                          true);
                                       },
                                   .remove = [this] { return job_->remove_rules(); },
                                   .remove_if =
                                       [this](const std::string& text) {
                                         const Result<> removed = job_->remove_rules(text);
                                         catch_up();  // no request of the kernel's may wait for it
                                         return removed;
                                       }})),
      source_("dataset/source.json",
              agreed("dataset/source.json",
                     {.text = [this] { return data_set_->source_text(); },
                      .save =
                          [this](const std::string& t, const TextSave& how) {
                            return say_saved(source_, save_source(t, how, DataSet::kCheckingTakes));
                          },
                      .remove = []() -> Result<> { return ok(); },
                      .rename_over =
                          [this](const std::string& t, const TextSave& how) {
                            return say_saved(source_, save_source(t, how, kRenameWaits));
                          }})),
      order_("dataset/order.json",
             agreed("dataset/order.json",
                    {.text = [this] { return data_set_->order_text(); },
                     .save =
                         [this](const std::string& t, const TextSave& how) {
                           const auto save = [&](const auto& at_most) {
                             return data_set_->save_order(t, committed_with(at_most));
                           };
                           return say_saved(order_, save_at_most(order_, how, save));
                         },
                     .remove = []() -> Result<> { return ok(); }})),
      consumed_("dataset/consumed",
                agreed("dataset/consumed",
                       {.text = [this] { return std::optional(data_set_->consumed_text()); },
                        .save =
                            [this](const std::string& t, const TextSave& how) {
                              const auto save = [&](const auto& at_most) {
                                return data_set_->save_consumed(t, committed_with(at_most));
                              };
                              return say_saved(consumed_, save_at_most(consumed_, how, save));
                            },
                        .remove = []() -> Result<> { return ok(); }})),
      account_(tree.quotas().account(job_->name())) {
  const auto texts = [this] {
    return Quotas::Seen{.user = text_owner(), .amount = {text_bytes_.load(), 0}, .named = false};
  };
  tree.quotas().know_file(account_, this, texts, false);
  tree.quotas().note_alone(account_, this);
}

JobView::~JobView() {
  const SharedLock gate(space_gate());
  tree_.quotas().forget_file(account_, this);
}

FsResult<> JobView::take_text(int64_t more, bool must) {
  // While recount() looks at this number, and then puts what it saw in the place of what was
  // counted, neither changes.
  const SharedLock gate(space_gate());
  if (limited()) {
    const uid_t owner = text_owner();
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
    return agree_on(name, change);
  };
  source.narrow = [this, name](mode_t mode) -> FsResult<std::optional<NarrowedMode>> {
    const auto narrowed = job_->narrow_mode(name, mode);
    if (!narrowed) return as_decided(Result<>(narrowed.error())).error();
    return narrowed.value();
  };
  source.open_to = [this, name](mode_t mode, const std::string& text, const auto& narrowed) {
    const Result<> opened = open_text(name, mode, text, narrowed);
    const bool is_another = !opened && opened.error().code() == Code::kConflict;
    return is_another ? FsResult<>(ok()) : as_decided(opened);
  };
  source.conceal_refusal = [this, name] { conceal_refusal(name); };
  source.take = [this](int64_t more, bool must) { return take_text(more, must); };
  return source;
}

void JobView::conceal_refusal(const std::string& name) {
  const std::string instead = kNotToldToAll;
  job_->conceal_refused_save(name, instead);
  const std::string below = std::string(kDataSetName) + "/";
  if (name.starts_with(below) && data_set_ != nullptr)
    data_set_->conceal_refused(name.substr(below.size()), name + ": " + instead);
}

void JobView::conceal_opened(const std::string& name, const AttributeChange& change) {
  const auto before = job_->attributes();
  JobAttributes after = *before;
  after.update(name, changes_in(change));
  for (const std::string& text : after.opened_since(*before)) conceal_refusal(text);
}

void JobView::apply_attributes() {
  MutexLock one(applying_);
  const auto all = job_->attributes();
  if (const auto before = std::exchange(applied_, all)) {
    for (const std::string& text : all->opened_since(*before)) conceal_refusal(text);
    for (const EditableFile* file : {&layout_, &rules_, &source_, &order_, &consumed_}) {
      const mode_t then = before->of(file->name()).mode.value_or(kTextMode);
      const mode_t now = all->of(file->name()).mode.value_or(kTextMode);
      if ((then & ~now & 0444) != 0) file->note_narrowed();
    }
  }
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

FsResult<> JobView::agree_on(const std::string& name, const AttributeChange& change) {
  if (!change.mode && !change.uid && !change.gid) return ok();
  // Not as fstat shows it: what is agreed on already may be applied just now.
  const FsResult<> agreed = agree_on(name, changes_in(change));
  if (!agreed) apply_attributes();  // as it was, also where that goes on
  return agreed;
}

FsResult<> JobView::agree_on(const std::string& name, const FileAttributes& change) {
  JobAttributes asked;
  asked.update(name, change);
  return tree_.errands().ask(key_ + "/attributes", asked.to_text(),
                             [view = shared_from_this(), name, change] {
                               return as_decided(view->job().change_attributes(name, change));
                             });
}

Result<JobViewRef> JobView::open(Tree& tree, JobRef job, std::string key) {
  JobViewRef view(new JobView(tree, std::move(job), std::move(key)));
  view->hidden_.keep_in(tree.live_state(), view->key_);
  view->data_set_comes_ = tree.live_state() != nullptr && tree.live_state()->goes_on();
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
  MutexLock lock(mutex_);  // note_data_set_changed() may be called already
  data_set_ = std::move(opened);
}

/// A layout of another dp must suit the data set, too, where that is now.
Result<> JobView::save_layout(const std::string& text, const TextSave& how) {
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
  return save_at_most(layout_, how,
                      [&](const auto& at_most) { return job_->save_layout(text, at_most); });
}

Result<> JobView::save_source(const std::string& text, const TextSave& how,
                              std::chrono::milliseconds wait) {
  return save_at_most(source_, how, [&](const auto& at_most) {
    return data_set_->save_source(text, how.by, wait, committed_with(at_most));
  });
}

/// Its mode was narrowed before; and again, where somebody has opened it since.
Result<> JobView::save_at_most(
    const EditableFile& file, const TextSave& how,
    const std::function<Result<>(const std::optional<Job::AtMost>&)>& save) {
  constexpr int kMostTries = 20;
  if (!how.mode) return save(std::nullopt);
  for (int tries = 0;; ++tries) {
    bool lets_more = false;
    Result<> saved = save(Job::AtMost{file.name(), *how.mode, &lets_more});
    if (saved || !lets_more || tries == kMostTries) return saved;
    PTC_TRY(auto narrowed, job_->narrow_mode(file.name(), *how.mode));
    if (narrowed && how.narrowed != nullptr) *how.narrowed = std::move(narrowed);
  }
}

DataSet::Commit JobView::committed_with(const std::optional<Job::AtMost>& at_most) {
  if (!at_most) return {};
  return [this, at_most](const MetaTransaction& transaction) {
    return job_->decide(transaction, at_most);
  };
}

Result<> JobView::open_text(const std::string& name, mode_t mode, const std::string& text,
                            const std::optional<NarrowedMode>& narrowed) {
  const std::string below = std::string(kDataSetName) + "/";
  if (!name.starts_with(below)) return job_->open_text(name, mode, text, narrowed);
  return data_set_->decide_beside(name.substr(below.size()), text,
                                  [&](const MetaTransaction& if_so) -> Result<int64_t> {
                                    PTC_TRY(job_->open_text(name, mode, if_so, narrowed));
                                    return 0;
                                  });
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
    MutexLock lock(mutex_);
    if (data_set_ == nullptr) return;  // it is only being opened
  }
  (void)consumed_.catch_up();  // there is always one
  const bool source_saved = source_.catch_up(), order_saved = order_.catch_up();
  {
    MutexLock lock(mutex_);
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

void JobView::await_data_set() {
  constexpr std::chrono::seconds kComesWithin{5};  // an index that is true still is there sooner
  if (!data_set_comes()) return;
  data_set_->wait_shown(kComesWithin);
  data_set_comes_ = false;
}

std::string JobView::generation_key(const ShownGenerationRef& generation, uint64_t identity) {
  MutexLock lock(mutex_);
  const auto [found, is_new] = generation_keys_.try_emplace(generation.get(), generation, "");
  if (is_new) {
    const uint64_t before = generation_keys_given_[identity]++;
    found->second.second =
        before == 0 ? fmt::format("{:x}", identity) : fmt::format("{:x}.{}", identity, before);
  }
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

uid_t JobView::text_owner() const {
  struct stat stat = {};
  if (::fstat(files_fd().get(), &stat) == 0) text_owner_ = stat.st_uid;
  return text_owner_;
}

struct stat JobView::owner_of_text(std::initializer_list<const EditableFile*> files) const {
  struct stat result = directory();
  // Those that are agreed on, which the directory may have a moment sooner or later than what was
  // refused is concealed from them. A daemon that is not root has only files of its own.
  const FileAttributes agreed = ::geteuid() == 0 ? job_->attributes()->of("") : FileAttributes();
  result.st_uid = agreed.uid.value_or(result.st_uid);
  result.st_gid = agreed.gid.value_or(result.st_gid);
  result.st_mode = S_IFREG | 0444;
  for (const EditableFile* file : files)
    result.st_mode &= S_IFMT | 0400 | file->mode_for_group(result.st_gid);
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
  MutexLock lock(mutex_);
  CheckpointRef checkpoint = job_->find_checkpoint(name);
  auto found = checkpoints_.find(name);
  std::shared_ptr<CheckpointView> before;
  if (found != checkpoints_.end()) {
    if (found->second->checkpoint == checkpoint) return found->second;
    before = std::move(found->second);
    checkpoints_.erase(found);
  }
  if (checkpoint == nullptr) return nullptr;
  auto view = std::make_shared<CheckpointView>();
  const Manifest& manifest = checkpoint->manifest();
  view->checkpoint = checkpoint;
  view->hidden.keep_in(tree_.live_state(), fmt::format("{}/c/{}", key_, manifest.id));
  view->key = fmt::format("{}/c/{}", key_, manifest.id);
  if (before != nullptr && before->key == view->key) view->shown = before->shown.load();
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

void JobView::note_committed(const std::shared_ptr<RealNode>& file) {
  MutexLock lock(mutex_);
  committed_.push_back(file);
}

void JobView::let_go_of_removed() {
  std::vector<std::shared_ptr<RealNode>> ending;  // destroyed without the lock
  MutexLock lock(mutex_);
  std::erase_if(committed_, [&](const std::weak_ptr<RealNode>& file) {
    ending.push_back(file.lock());
    return ending.back() == nullptr || ending.back()->let_go_if_removed();
  });
}

}  // namespace ptc
