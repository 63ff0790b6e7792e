// layout.json, rules.json, and those of dataset/: files whose content is accepted or refused as a
// whole.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "fs/tree/errands.h"
#include "fs/tree/errno.h"
#include "fs/tree/host_file.h"
#include "fs/tree/node.h"
#include "reshard/job/job_attributes.h"
#include "store/base/mutex.h"

namespace ptc {

/// `mode` for a file of the group `other`: who is of that was one of the others.
mode_t mode_for_group(mode_t mode, gid_t group, gid_t other);

/// How a text is saved.
struct TextSave {
  User by;
  std::optional<mode_t> mode = {};  // of the file by then; until it is opened further, at most
  std::optional<NarrowedMode>* narrowed = nullptr;  // by a save that finds that it lets more
};

/// One such file of one job, for as long as the mount lives. Every handle that may write keeps a
/// draft of its own; readers see the accepted text; a draft is offered when its handle is closed or
/// synced. A refused draft stays with its handle, which may mend it.
/// Threads: any. No lock is held while a text is offered.
class EditableFile {
 public:
  struct Source {
    std::function<std::optional<std::string>()> text;  // nullopt: there is no such file
    std::function<Result<>(const std::string&, const TextSave&)> save;
    std::function<Result<>()> remove;  // what unlink means
    /// Saves by a rename; left out: as `save`. kConflict: what it waits for goes on, and the same
    /// rename again goes on with it.
    std::function<Result<>(const std::string&, const TextSave&)> rename_over = {};
    /// As `remove`, if it still is this text, else kConflict; left out where nothing is decided by
    /// that.
    std::function<Result<>(const std::string&)> remove_if = {};
    /// Owner and mode, where these are agreed on; left out: they are kept beside the times.
    std::function<FileAttributes()> attributes = {};
    std::function<FsResult<>(const FileAttributes&)> change_attributes = {};
    /// The mode lets no more than this, on all nodes, however long it takes: not from a request
    /// that the kernel has locks for.
    std::function<FsResult<std::optional<NarrowedMode>>(mode_t)> narrow = {};
    /// Has this mode, if it still is this text, and if nobody decided about its mode or owner after
    /// it was narrowed, where that is given.
    std::function<FsResult<>(mode_t, const std::string& text, const std::optional<NarrowedMode>&)>
        open_to = {};
    /// A text was refused that fewer may read than this file: why, is said without quoting it.
    std::function<void()> conceal_refusal = {};
    /// Texts and drafts take so much more memory, or less; EDQUOT, unless they `must`. Called with
    /// locks held.
    std::function<FsResult<>(int64_t more, bool must)> take = {};
  };
  /// A longer draft is EFBIG; parsers take no more.
  static constexpr uint64_t kMaxBytes = 1 << 20;
  /// Of all drafts together: more is EDQUOT.
  static constexpr int64_t kMostDraftBytes = 16 << 20;
  static constexpr size_t kMostDrafts = 4096;

  EditableFile(std::string name, Source source);

  const std::string& name() const { return name_; }  // relative to the job
  /// The accepted text; empty where there is none.
  std::string text() const;
  std::optional<std::string> accepted() const { return source_.text(); }
  /// Whether its name shows: there is a text, or somebody is writing the first.
  bool exists() const;

  /// Offers a text. EINVAL when refused; the job says why in status.json.
  FsResult<> save(const std::string& text, const User& by) {
    return save(text, TextSave{by}, source_.save);
  }
  /// As a rename does, in a thread of its own: whoever asks `waits` for so long at most. EAGAIN: it
  /// goes on, and the same again goes on with it; it may come to its end without that. Until then
  /// that thread holds `owner`, which owns this object, and may be the last that does.
  /// The file has the moved one's `mode` then.
  FsResult<> rename_over(const std::string& text, mode_t mode, const User& by, Errands& errands,
                         std::shared_ptr<void> owner, std::chrono::milliseconds waits) {
    return by_rename({.text = text, .was = {}, .by = by, .mode = mode & 0777}, errands,
                     std::move(owner), waits);
  }
  /// The same of what a rename to elsewhere does here, where the text that was taken along is
  /// `was`: as remove(), but another text stays: EAGAIN.
  FsResult<> rename_away(const std::string& was, const User& by, Errands& errands,
                         std::shared_ptr<void> owner, std::chrono::milliseconds waits) {
    return source_.remove_if ? by_rename({.text = {}, .was = was, .by = by, .mode = {}}, errands,
                                         std::move(owner), waits)
                             : remove();
  }
  FsResult<> remove();
  /// Whether the text is another than at the last call, and was not saved here: then it has changed
  /// now.
  bool catch_up();

  /// From now on a file of the host has the times (and mode and owner, where nothing else says
  /// them), so that they last; the first change makes it. Until then they are as the owner of
  /// `directory`, which outlives this object, would expect.
  void keep_attributes(const HostFile& directory, std::string path);
  struct stat attributes(const struct stat& directory, ino_t inode) const;
  /// Whom it lets read and write, said of a file of this group (`of_job`: that of the job's
  /// directory, which this file has unless another is agreed on).
  mode_t mode_for_group(gid_t of_job) const;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle);

  /// Whom the mode before let in may be about to read what is for fewer: the kernel asked for the
  /// mode, and asks for the text next.
  void note_narrowed() const { narrowed_ = std::chrono::steady_clock::now(); }
  bool was_just_narrowed() const {
    return std::chrono::steady_clock::now() - narrowed_.load() < kJust;
  }

  /// A handle for open(2) flags. The handle holds `owner`, which owns this object. What is written
  /// through it is saved by `caller`, whoever closes it. EDQUOT, EMFILE: there are too many drafts.
  FsResult<std::unique_ptr<Handle>> open(const Caller& caller, int flags,
                                         std::shared_ptr<void> owner) {
    return open(caller, flags, std::nullopt, std::move(owner));
  }
  /// The same by O_CREAT: the name shows meanwhile. The mode is the text's, once that is saved.
  FsResult<std::unique_ptr<Handle>> create(const Caller& caller, int flags, mode_t mode,
                                           std::shared_ptr<void> owner) {
    return open(caller, flags, std::optional(mode & 0777), std::move(owner));
  }

 private:
  friend class EditHandle;
  struct Draft {
    std::string text;
    bool created = false;             // the name did not exist before
    std::optional<mode_t> mode = {};  // that it was created with, until that is agreed on
    bool truncated = false;           // emptied, and nothing written since it was opened
    bool written = false;             // changed since it was last accepted
    bool offered = false;             // and refused as it is now
    int64_t counted = 0;              // bytes
    KeptDraft* kept = nullptr;        // where all of it is written down, too
  };
  using Drafts = std::list<Draft>;
  /// The kernel holds locks of the whole mount while somebody waits for it.
  struct Rename {
    const std::optional<std::string> text;  // none: it is removed from here
    const std::string was;                  // what was, then
    const User by;
    const std::optional<mode_t> mode;        // of the file that is moved over this one
    std::optional<FsResult<>> outcome = {};  // guarded by renames_mutex_, as the next
    std::chrono::steady_clock::time_point ended{};
    const std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
  };
  FsResult<> by_rename(Rename asked, Errands& errands, std::shared_ptr<void> owner,
                       std::chrono::milliseconds waits);
  void carry_out(Rename& rename);

  static constexpr std::chrono::seconds kBaseLasts{10}, kJust{5};
  FsResult<std::unique_ptr<Handle>> open(const Caller& caller, int flags,
                                         std::optional<mode_t> created,
                                         std::shared_ptr<void> owner);
  using Offer = std::function<Result<>(const std::string&, const TextSave&)>;
  /// Of a file that has the mode `how` says; nullopt: the one that is here.
  FsResult<> save_as(const std::string& text, const TextSave& how, const Offer& offer);
  mode_t agreed_mode() const {
    return source_.attributes ? source_.attributes().mode.value_or(kTextMode) : kTextMode;
  }
  /// As it shows here: while texts are saved, what both the old and the new one let.
  mode_t mode() const {
    const mode_t agreed = agreed_mode();
    MutexLock lock(mutex_);
    return agreed & let_by_saves();
  }
  class ModeOfSave;
  mode_t let_by_saves() const PTC_REQUIRES(mutex_);
  bool change_mode_of_drafts(mode_t mode);
  FsResult<> save(const std::string& text, const TextSave& how, const Offer& offer);
  bool has_base() const PTC_REQUIRES(mutex_);
  FsResult<> resize(Draft& draft, uint64_t size) PTC_REQUIRES(mutex_);
  void end(Drafts::iterator draft) PTC_REQUIRES(mutex_);
  /// After a change; of the text only what is behind `from`.
  void write_down(const Draft& draft, uint64_t from) const PTC_REQUIRES(mutex_);
  FsResult<> take(int64_t more, bool must) {
    return source_.take ? source_.take(more, must) : FsResult<>(ok());
  }
  /// The accepted text has this size now.
  FsResult<> count_text(uint64_t size, bool must);
  HeldFd attributes_dir() const;
  FsResult<> make_attributes_file() const;
  size_t hash_of_text() const;
  void note_time() const;  // of a change, which is now

  const std::string name_;
  const Source source_;
  Mutex renames_mutex_;
  ConditionVariable rename_ended_;
  std::shared_ptr<Rename> rename_
      PTC_GUARDED_BY(renames_mutex_);  // under way, or nobody has heard how it ended
  mutable Mutex mutex_;
  int64_t draft_bytes_ PTC_GUARDED_BY(mutex_) = 0;  // counted
  int64_t text_bytes_ PTC_GUARDED_BY(mutex_) = 0;
  std::weak_ptr<const std::string> read_
      PTC_GUARDED_BY(mutex_);             // what readers have open, for the next one
  Drafts drafts_ PTC_GUARDED_BY(mutex_);  // of handles that may write, newest change first
  std::multiset<mode_t> saves_ PTC_GUARDED_BY(mutex_);  // that change the mode: both of each
  std::optional<std::string> base_
      PTC_GUARDED_BY(mutex_);  // after truncate(2) by path: what the next writer begins
  std::chrono::steady_clock::time_point base_since_
      PTC_GUARDED_BY(mutex_);  // with, unless it comes too late
  std::optional<size_t> seen_
      PTC_GUARDED_BY(mutex_);  // hash of the text when it was last looked at
  const HostFile* attributes_dir_ = nullptr;
  std::string attributes_path_;
  const timespec made_;
  mutable std::atomic<std::chrono::steady_clock::time_point> narrowed_{};
};

}  // namespace ptc
