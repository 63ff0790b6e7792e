#include "fs/tree/editable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "fs/tree/live_state.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

timespec now() {
  timespec result;
  ::clock_gettime(CLOCK_REALTIME, &result);
  return result;
}

size_t copy_out(const std::string& text, std::span<std::byte> out, uint64_t offset) {
  if (offset >= text.size()) return 0;
  size_t size = std::min<size_t>(out.size(), text.size() - offset);
  std::memcpy(out.data(), text.data() + offset, size);
  return size;
}

class ReadHandle : public Handle {
 public:
  explicit ReadHandle(std::shared_ptr<const std::string> text) : text_(std::move(text)) {}
  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    return copy_out(*text_, out, offset);
  }
  std::optional<std::string_view> text_of_open() const override { return *text_; }

 private:
  const std::shared_ptr<const std::string> text_;
};

/// What of a text, or a draft of one, counts: nobody is kept from saving a small one.
int64_t over(uint64_t size) {
  constexpr int64_t kFree = 4096;
  return std::max<int64_t>(0, static_cast<int64_t>(size) - kFree);
}

}  // namespace

/// A handle that may write: owns one entry of EditableFile::drafts_.
class EditHandle : public Handle {
 public:
  EditHandle(std::shared_ptr<void> owner, EditableFile& file, EditableFile::Drafts::iterator draft,
             User user, int flags)
      : owner_(std::move(owner)),
        file_(file),
        draft_(draft),
        user_(std::move(user)),
        append_((flags & O_APPEND) != 0),
        may_read_((flags & O_ACCMODE) == O_RDWR) {}
  bool is_agreed_on() const override { return true; }
  bool can_reopen() const override { return false; }
  bool keep_draft(KeptDraft& kept, bool again) override {
    MutexLock lock(file_.mutex_);
    draft_->kept = &kept;
    if (!again) {
      file_.write_down(*draft_, 0);
      return true;
    }
    if (!file_.resize(*draft_, std::min<uint64_t>(kept.bytes, EditableFile::kMaxBytes)))
      return false;
    std::memcpy(draft_->text.data(), kept.text, draft_->text.size());
    const auto has = [&](KeptDraft::Flag flag) { return (kept.flags & flag) != 0; };
    draft_->created = has(KeptDraft::kCreated);
    draft_->truncated = has(KeptDraft::kTruncated);
    draft_->written = has(KeptDraft::kWritten);
    draft_->offered = has(KeptDraft::kOffered);
    draft_->mode = has(KeptDraft::kHasMode) ? std::optional<mode_t>(kept.mode) : std::nullopt;
    goes_on_ = true;
    if (draft_->written || draft_->truncated)
      file_.drafts_.splice(file_.drafts_.begin(), file_.drafts_, draft_);
    return true;
  }
  void discard() override {
    MutexLock lock(file_.mutex_);
    draft_->created = draft_->truncated = draft_->written = false;
    file_.write_down(*draft_, draft_->text.size());
  }

  ~EditHandle() override {
    bool offer;
    {
      MutexLock lock(file_.mutex_);
      offer = draft_->truncated || (draft_->written && !draft_->offered);
    }
    // Emptied and never written: that, too, was a save. Whoever closed it cannot be told any more.
    try {
      if (offer) (void)offer_draft();
    } catch (const std::exception&) {  // no memory: the accepted text stays
    }
    MutexLock lock(file_.mutex_);
    file_.end(draft_);
  }

  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    if (!may_read_) return Errno{EBADF};
    MutexLock lock(file_.mutex_);
    return copy_out(draft_->text, out, offset);
  }

  FsResult<size_t> write(std::span<const std::byte> data, uint64_t offset) override {
    MutexLock lock(file_.mutex_);
    std::string& text = draft_->text;
    // What is written first may be what an earlier process has appended, and told nobody.
    const bool is_there = std::exchange(goes_on_, false) && append_ &&
                          offset + data.size() == text.size() &&
                          std::memcmp(text.data() + offset, data.data(), data.size()) == 0;
    if (append_ && !is_there) offset = text.size();
    if (offset > EditableFile::kMaxBytes || data.size() > EditableFile::kMaxBytes - offset) {
      return Errno{EFBIG};
    }
    const uint64_t from = std::min<uint64_t>(offset, text.size());
    if (text.size() < offset + data.size()) {
      PTC_TRY(file_.resize(*draft_, offset + data.size()));
    }
    std::memcpy(text.data() + offset, data.data(), data.size());
    changed();
    file_.write_down(*draft_, from);
    return data.size();
  }

  FsResult<> truncate(uint64_t size) override {
    if (size > EditableFile::kMaxBytes) return Errno{EFBIG};
    MutexLock lock(file_.mutex_);
    const uint64_t from = std::min<uint64_t>(size, draft_->text.size());
    PTC_TRY(file_.resize(*draft_, size));
    if (size == 0) {
      draft_->truncated = true;
      draft_->written = false;  // a save in progress: what follows is its text
    } else {
      changed();
    }
    file_.write_down(*draft_, from);
    return ok();
  }

  FsResult<> flush() override {
    {
      MutexLock lock(file_.mutex_);
      if (!draft_->written) return ok();
    }
    return offer_draft();
  }
  FsResult<> sync(bool) override { return flush(); }

 private:
  void changed() PTC_REQUIRES(file_.mutex_) {
    draft_->written = true;
    draft_->offered = draft_->truncated = false;
    file_.drafts_.splice(file_.drafts_.begin(), file_.drafts_, draft_);
  }

  FsResult<> offer_draft() {
    std::string text;
    std::optional<mode_t> mode;
    {
      MutexLock lock(file_.mutex_);
      text = draft_->text;
      mode = draft_->mode;
      draft_->offered = true;
      file_.write_down(*draft_, text.size());
    }
    PTC_TRY(file_.save_as(text, {user_, mode}, file_.source_.save));
    MutexLock lock(file_.mutex_);
    if (draft_->mode == mode) draft_->mode.reset();
    if (draft_->text == text) draft_->written = draft_->truncated = draft_->created = false;
    file_.write_down(*draft_, draft_->text.size());
    return ok();
  }

  const std::shared_ptr<void> owner_;
  EditableFile& file_;
  const EditableFile::Drafts::iterator draft_;
  const User user_;
  const bool append_;
  const bool may_read_;
  bool goes_on_ PTC_GUARDED_BY(file_.mutex_) = false;  // of an earlier process, so far
};

/// While it lives the file lets no more than this.
class EditableFile::ModeOfSave {
 public:
  ModeOfSave(EditableFile& file, mode_t both) : file_(file) {
    MutexLock lock(file_.mutex_);
    own_ = file_.saves_.insert(both);
    file_.note_narrowed();
  }
  ~ModeOfSave() {
    file_.note_narrowed();
    MutexLock lock(file_.mutex_);
    file_.saves_.erase(own_);
  }
  ModeOfSave(const ModeOfSave&) = delete;
  ModeOfSave& operator=(const ModeOfSave&) = delete;

 private:
  EditableFile& file_;
  std::multiset<mode_t>::iterator own_;
};

EditableFile::EditableFile(std::string name, Source source)
    : name_(std::move(name)), source_(std::move(source)), made_(now()) {}

std::string EditableFile::text() const { return source_.text().value_or(std::string()); }

bool EditableFile::exists() const {
  if (source_.text()) return true;
  MutexLock lock(mutex_);
  return std::any_of(drafts_.begin(), drafts_.end(), [](const Draft& d) { return d.created; });
}

FsResult<> EditableFile::save(const std::string& text, const TextSave& how, const Offer& offer) {
  std::optional<std::string> before = source_.text();
  PTC_TRY(count_text(std::max(text.size(), before ? before->size() : 0), false));
  const Result<> saved_now = offer(text, how);
  (void)count_text(saved_now ? text.size() : before ? before->size() : 0, true);
  PTC_TRY(as_decided(saved_now));
  if (before != text) note_time();
  const size_t saved = hash_of_text();
  MutexLock lock(mutex_);
  seen_ = saved;
  base_.reset();
  return ok();
}

FsResult<> EditableFile::by_rename(Rename asked, Errands& errands, std::shared_ptr<void> owner,
                                   std::chrono::milliseconds waits) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kKept = std::chrono::seconds(60);
  constexpr std::chrono::milliseconds kHurry{300}, kJustBegun{50};
  const Clock::time_point begun = Clock::now(), until = begun + waits;
  for (;;) {
    const bool same_now = source_.text() == asked.text;
    MutexLock lock(renames_mutex_);
    std::shared_ptr<Rename> one = rename_;
    if (one == nullptr) {
      one = rename_ = std::make_shared<Rename>(asked);
      try {
        errands.start([this, one, owner] { carry_out(*one); });
      } catch (const std::exception&) {  // no thread, no memory
        rename_.reset();
        return Errno{EAGAIN};
      }
    }
    const auto has_ended = [&] { return one->outcome.has_value(); };
    // Who has little time looks, once it has had its own: others may stand in a queue behind him.
    const Clock::time_point seen =
        waits > kHurry ? until : std::min(until, one->begun + kJustBegun);
    if (!rename_ended_.wait_until(renames_mutex_, seen, has_ended)) return Errno{EAGAIN};
    if (rename_ == one) rename_.reset();
    const bool asked_for = one->text == asked.text && one->was == asked.was &&
                           one->by == asked.by && one->mode == asked.mode;
    // Of one that ended while nobody waited, this may be long ago.
    const bool still_so =
        one->ended >= begun || (*one->outcome ? same_now : begun - one->ended < kKept);
    if (asked_for && still_so) return *one->outcome;
  }
}

void EditableFile::carry_out(Rename& rename) {
  FsResult<> outcome = Errno{ENOMEM};
  try {
    outcome = rename.text ? save_as(*rename.text, {rename.by, rename.mode},
                                    source_.rename_over ? source_.rename_over : source_.save)
                          : as_decided(source_.remove_if(rename.was));
  } catch (const std::exception&) {  // no memory
  }
  MutexLock lock(renames_mutex_);
  rename.outcome = outcome;
  rename.ended = std::chrono::steady_clock::now();
  rename_ended_.notify_all();
}

/// At no time, on no node, is the new text read by whom it is closed to, nor the old one, nor why
/// it was refused: all nodes know the narrower mode, then the text, then the wider mode. Each of
/// these decisions rests on the one before, so that texts that are saved at the same moment do not
/// get each other's.
FsResult<> EditableFile::save_as(const std::string& text, const TextSave& how, const Offer& offer) {
  if (!how.mode || !source_.narrow) return save(text, how, offer);
  const ModeOfSave meanwhile(*this, *how.mode);
  const std::optional<std::string> old_text = source_.text();
  const mode_t before = agreed_mode();
  std::optional<NarrowedMode> narrowed;
  if ((before & ~*how.mode) != 0) {
    PTC_TRY(narrowed, source_.narrow(*how.mode));
  }
  const auto saved = save(text, {how.by, how.mode, &narrowed}, offer);
  // What somebody else has narrowed he may open again.
  const bool stays = narrowed || (*how.mode & kTextMode) == kTextMode;
  if (saved && stays && agreed_mode() == *how.mode) return saved;
  if (saved) return source_.open_to(*how.mode, text, std::nullopt);
  // It goes on, or may be in force; or whoever may read this reads why, and no others.
  if (saved.error().value == EAGAIN || !old_text) return saved;
  if (((before | agreed_mode()) & ~*how.mode & 0444) != 0 && source_.conceal_refusal)
    source_.conceal_refusal();
  if (narrowed) (void)source_.open_to(narrowed->before, *old_text, narrowed);
  return saved;
}

mode_t EditableFile::let_by_saves() const {
  mode_t all = 07777;
  for (const mode_t both : saves_) all &= both;
  return all;
}

mode_t EditableFile::mode_for_group(gid_t of_job) const {
  const gid_t group = source_.attributes ? source_.attributes().gid.value_or(of_job) : of_job;
  return ptc::mode_for_group(mode(), group, of_job);
}

mode_t mode_for_group(mode_t mode, gid_t group, gid_t other) {
  return group == other ? mode : (mode & ~0070) | (mode & 0007) << 3;
}

/// False: nobody is making it anew.
bool EditableFile::change_mode_of_drafts(mode_t mode) {
  MutexLock lock(mutex_);
  bool any = false;
  for (Draft& draft : drafts_) {
    if (!draft.mode) continue;
    draft.mode = mode & 0777;
    write_down(draft, draft.text.size());
    any = true;
  }
  return any;
}

bool EditableFile::catch_up() {
  (void)count_text(text().size(), true);
  const size_t now = hash_of_text();
  {
    MutexLock lock(mutex_);
    const std::optional<size_t> before = std::exchange(seen_, now);
    if (!before || *before == now) return false;
  }
  // What is gone has no time; where its job is, nothing may be made beside what is being removed.
  if (source_.text()) note_time();
  return true;
}

FsResult<> EditableFile::count_text(uint64_t size, bool must) {
  MutexLock lock(mutex_);
  PTC_TRY(take(over(size) - text_bytes_, must));
  text_bytes_ = over(size);
  return ok();
}

FsResult<> EditableFile::resize(Draft& draft, uint64_t size) {
  const int64_t more = over(size) - draft.counted;
  if (more > 0 && draft_bytes_ + more > kMostDraftBytes) return Errno{EDQUOT};
  PTC_TRY(take(more, false));
  draft.counted += more;
  draft_bytes_ += more;
  draft.text.resize(size);
  return ok();
}

void EditableFile::write_down(const Draft& draft, uint64_t from) const {
  if (draft.kept == nullptr) return;
  KeptDraft& kept = *draft.kept;
  from = std::min<uint64_t>(from, draft.text.size());
  std::memcpy(kept.text + from, draft.text.data() + from, draft.text.size() - from);
  kept.bytes = static_cast<uint32_t>(draft.text.size());
  kept.mode = draft.mode.value_or(0);
  kept.flags = (draft.created ? KeptDraft::kCreated : 0u) |
               (draft.truncated ? KeptDraft::kTruncated : 0u) |
               (draft.written ? KeptDraft::kWritten : 0u) |
               (draft.offered ? KeptDraft::kOffered : 0u) | (draft.mode ? KeptDraft::kHasMode : 0u);
}

void EditableFile::end(Drafts::iterator draft) {
  (void)take(-draft->counted, true);
  draft_bytes_ -= draft->counted;
  drafts_.erase(draft);
}

size_t EditableFile::hash_of_text() const {
  const std::optional<std::string> text = source_.text();
  return text ? std::hash<std::string>()(*text) : 0;
}

void EditableFile::note_time() const {
  if (!make_attributes_file()) return;
  const timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
  ::utimensat(attributes_dir().get(), attributes_path_.c_str(), times, 0);
}

bool EditableFile::has_base() const {
  return base_ && std::chrono::steady_clock::now() - base_since_ < kBaseLasts;
}

FsResult<> EditableFile::remove() { return as_decided(source_.remove()); }

struct stat EditableFile::attributes(const struct stat& directory, ino_t inode) const {
  const std::optional<std::string> accepted = source_.text();
  const bool is_there = accepted.has_value();
  uint64_t size = is_there ? accepted->size() : 0;
  MutexLock lock(mutex_);
  // While it is being written, its size is that of the newest draft: O_APPEND and SEEK_END need it.
  if (!drafts_.empty() && (drafts_.front().written || drafts_.front().truncated)) {
    size = drafts_.front().text.size();
  } else if (has_base()) {
    size = base_->size();
  }
  struct stat result =
      virtual_stat(S_IFREG | kTextMode, directory.st_uid, directory.st_gid, made_, inode);
  struct stat kept = {};
  if (::fstatat(attributes_dir().get(), attributes_path_.c_str(), &kept, AT_SYMLINK_NOFOLLOW) ==
      0) {
    result.st_mode = S_IFREG | (kept.st_mode & 07777);
    if (!source_.attributes) {
      result.st_uid = kept.st_uid;
      result.st_gid = kept.st_gid;
    }
    result.st_atim = kept.st_atim;
    result.st_mtim = kept.st_mtim;
    result.st_ctim = kept.st_ctim;
  }
  if (source_.attributes) {
    const FileAttributes agreed = source_.attributes();
    result.st_uid = agreed.uid.value_or(result.st_uid);
    result.st_gid = agreed.gid.value_or(result.st_gid);
    if (agreed.mode) result.st_mode = S_IFREG | *agreed.mode;
    result.st_mode &= S_IFMT | let_by_saves();
    for (const Draft& draft : drafts_)
      if (draft.mode)
        result.st_mode = S_IFREG | (is_there ? result.st_mode & *draft.mode : *draft.mode);
  }
  result.st_size = static_cast<off_t>(size);
  result.st_blocks = static_cast<blkcnt_t>((size + 511) / 512);
  return result;
}

FsResult<> EditableFile::set_attributes(const AttributeChange& change, Handle* handle) {
  if (change.size) {
    if (*change.size > kMaxBytes) return Errno{EFBIG};
    if (handle != nullptr) {
      PTC_TRY(handle->truncate(*change.size));
    } else {
      std::string accepted = text();
      MutexLock lock(mutex_);
      // By path: the editor writes next, through a handle it has or one it is about to open.
      if (drafts_.empty()) {
        if (*change.size != accepted.size()) {
          base_ = std::move(accepted);
          base_->resize(*change.size);
          base_since_ = std::chrono::steady_clock::now();
        }
      } else {
        const uint64_t from = std::min<uint64_t>(*change.size, drafts_.front().text.size());
        PTC_TRY(resize(drafts_.front(), *change.size));
        drafts_.front().truncated = *change.size == 0;
        drafts_.front().written = *change.size != 0;
        write_down(drafts_.front(), from);
      }
    }
  }
  bool ids_or_mode = change.mode || change.uid || change.gid;
  if (ids_or_mode && source_.change_attributes) {
    FileAttributes agreed{change.uid, change.gid, change.mode};
    if (agreed.mode) {
      *agreed.mode &= 07777;
      // The text in force, if there is one, is another: it is opened to nobody.
      if (change_mode_of_drafts(*agreed.mode)) {
        *agreed.mode &= mode();
        if (!source_.text() || *agreed.mode == mode()) agreed.mode.reset();
      }
    }
    if (!agreed.empty()) {
      PTC_TRY(source_.change_attributes(agreed));
    }
    ids_or_mode = false;
  }
  if (!ids_or_mode && !change.access_time && !change.modify_time) return ok();
  PTC_TRY(make_attributes_file());
  const timespec omit{0, UTIME_OMIT};
  const timespec times[2] = {change.access_time.value_or(omit), change.modify_time.value_or(omit)};
  const char* path = attributes_path_.c_str();
  const HeldFd directory = attributes_dir();
  if ((ids_or_mode && (change.uid || change.gid) &&
       ::fchownat(directory.get(), path, change.uid.value_or(-1), change.gid.value_or(-1),
                  AT_SYMLINK_NOFOLLOW) != 0) ||
      (ids_or_mode && change.mode &&
       ::fchmodat(directory.get(), path, *change.mode & 07777, 0) != 0) ||
      ::utimensat(directory.get(), path, times, AT_SYMLINK_NOFOLLOW) != 0) {
    return last_errno();
  }
  return ok();
}

HeldFd EditableFile::attributes_dir() const {
  return attributes_dir_ != nullptr ? attributes_dir_->hold() : HeldFd(UniqueFd());
}

void EditableFile::keep_attributes(const HostFile& directory, std::string path) {
  attributes_dir_ = &directory;
  attributes_path_ = std::move(path);
}

FsResult<> EditableFile::make_attributes_file() const {
  const HeldFd dir = attributes_dir();
  UniqueFd fd(
      ::openat(dir.get(), attributes_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    if (errno == EEXIST) return ok();
    return last_errno();
  }
  struct stat directory = {};
  const timespec times[2] = {made_, made_};
  if (::fstat(dir.get(), &directory) != 0 || ::futimens(fd.get(), times) != 0 ||
      (::geteuid() == 0 && ::fchown(fd.get(), directory.st_uid, directory.st_gid) != 0) ||
      ::fchmod(fd.get(), 0644) != 0) {
    return last_errno();
  }
  return ok();
}

FsResult<std::unique_ptr<Handle>> EditableFile::open(const Caller& caller, int flags,
                                                     std::optional<mode_t> created,
                                                     std::shared_ptr<void> owner) {
  std::string accepted = text();
  if ((flags & O_ACCMODE) == O_RDONLY) {
    MutexLock lock(mutex_);
    auto shown = read_.lock();
    if (shown == nullptr || *shown != accepted)
      read_ = shown = std::make_shared<const std::string>(std::move(accepted));
    return std::unique_ptr<Handle>(std::make_unique<ReadHandle>(std::move(shown)));
  }
  User user = caller.user();
  MutexLock lock(mutex_);
  if (drafts_.size() >= kMostDrafts) return Errno{EMFILE};
  Draft draft;
  draft.created = created.has_value();
  if (source_.attributes) draft.mode = created;
  if (has_base()) {
    draft.text = std::move(*base_);
    draft.truncated = draft.text.empty();
    draft.written = !draft.truncated;
    base_.reset();
  } else {
    draft.text = std::move(accepted);
  }
  if (created || (flags & O_TRUNC) != 0) {
    draft.text.clear();
    draft.truncated = true;
    draft.written = false;
  }
  PTC_TRY(resize(draft, draft.text.size()));
  drafts_.push_front(std::move(draft));
  return std::unique_ptr<Handle>(std::make_unique<EditHandle>(
      std::move(owner), *this, drafts_.begin(), std::move(user), flags));
}

}  // namespace ptc
