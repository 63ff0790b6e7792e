// rename(2) out of a real directory: a plain one, a save of layout.json, or a commit.
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>

#include "fs/tree/real_node.h"
#include "fs/tree/tree.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

/// Within a directory only that is locked; else the kernel holds locks of the whole mount.
FsResult<> holding_locks(const Caller& caller, const RealNode& parent, const RealNode& target,
                         const std::function<FsResult<>(std::chrono::milliseconds)>& wait) {
  if (parent.key() == target.key()) return wait(QueuePatience::kMost);
  return parent.job().tree().patience().spent(caller.uid, wait);
}

/// An editor's file replaces layout.json: its content is offered; accepted, it is gone, and those
/// may read layout.json whom it let.
FsResult<> save_over(const Caller& caller, RealNode& parent, const std::string& name,
                     const RealNode& target, EditableFile& file, const JobViewRef& view) {
  PTC_TRY(const HeldFd directory, parent.held());
  UniqueFd fd(
      ::openat(directory.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  auto refuse = [&](int error, const std::string& what) {
    parent.job().job().note_refused_save(file.name(), fmt::format("{} is {}", name, what));
    return Errno{error};
  };
  if (!fd.valid() && errno == ELOOP)
    return refuse(kRenameRefused, "a symbolic link; save the file that it leads to");
  if (!fd.valid()) return last_errno();
  struct stat stat = {};
  if (::fstat(fd.get(), &stat) != 0) return last_errno();
  if (S_ISDIR(stat.st_mode)) return Errno{EISDIR};
  if (!S_ISREG(stat.st_mode)) return refuse(kRenameRefused, "no regular file");
  if (static_cast<uint64_t>(stat.st_size) > EditableFile::kMaxBytes)
    return refuse(EFBIG, fmt::format("longer than {} bytes", EditableFile::kMaxBytes));
  std::string text(static_cast<size_t>(stat.st_size), '\0');
  if (!read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0)) return Errno{EIO};
  // The file keeps its owner and group.
  const struct stat now = file.attributes(parent.job().directory(), 0);
  const mode_t mode = mode_for_group(stat.st_mode & 0777, stat.st_gid, now.st_gid);
  const auto save = [&](std::chrono::milliseconds waits) {
    return file.rename_over(text, mode, caller.user(), view->tree().errands(), view, waits);
  };
  const auto saved = holding_locks(caller, parent, target, save);
  if (!saved) return of_rename(saved.error());
  return parent.RealNode::unlink(name);
}

/// layout.json is moved away, as for a backup: the accepted text, as a real file. The layout stays
/// in force; only its name is gone until somebody writes it again. rules.json goes, which is
/// decided: where that takes long, EAGAIN, and the file is there already under its new name, so
/// that nothing is lost whatever comes of it.
FsResult<> move_away(const Caller& caller, RealNode& parent, EditableFile& file, RealNode& target,
                     const std::string& target_name, unsigned flags) {
  // Of this text or of one before; what both let is right for either.
  const mode_t let = file.attributes(parent.job().directory(), 0).st_mode;
  // Where an earlier one was EAGAIN it may be gone by now, and is not to be moved once more.
  const std::optional<std::string> accepted = file.accepted();
  if (!accepted && !file.exists()) return Errno{ENOENT};
  const std::string text = accepted.value_or("");
  const HeldFd files = parent.job().files_fd();
  const int job_dir = files.get();
  PTC_TRY(const HeldFd target_dir, target.held());
  PTC_TRY(auto scratch, as_fs(parent.job().scratch_path()));
  auto moved = [&]() -> FsResult<> {
    PTC_TRY(auto fd, as_fs(open_file(job_dir, scratch, O_WRONLY | O_CREAT | O_EXCL)));
    PTC_TRY(as_fs(write_exactly(fd.get(), std::as_bytes(std::span(text)), 0)));
    struct stat owner = file.attributes(parent.job().directory(), 0);
    timespec times[2] = {owner.st_atim, owner.st_mtim};
    if ((::geteuid() == 0 && ::fchown(fd.get(), owner.st_uid, owner.st_gid) != 0) ||
        ::fchmod(fd.get(), owner.st_mode & let & 0777) != 0 || ::futimens(fd.get(), times) != 0) {
      return last_errno();
    }
    Quotas& quotas = parent.job().tree().quotas();
    const Quotas::Account& account = parent.job().account();
    const SharedLock gate(parent.job().space_gate());
    struct stat made = {};
    if (::fstat(fd.get(), &made) != 0) return last_errno();
    const QuotaAmount space =
        parent.job().limited() ? QuotaAmount{made.st_blocks * 512, 1} : QuotaAmount{};
    PTC_TRY(quotas.reserve(account, made.st_uid, space));
    const FsResult<> renamed = target.change([&] {
      return ::renameat2(job_dir, scratch.c_str(), target_dir.get(), target_name.c_str(), flags) ==
             0;
    });
    if (!renamed) quotas.add(account, made.st_uid, {-space.bytes, -space.files});
    return renamed;
  }();
  if (!moved) {
    ::unlinkat(job_dir, scratch.c_str(), 0);
    return moved;
  }
  const JobViewRef view = parent.job().shared_from_this();
  Tree& tree = view->tree();
  const auto move = [&](std::chrono::milliseconds waits) {
    return file.rename_away(text, caller.user(), tree.errands(), view, waits);
  };
  const auto away = holding_locks(caller, parent, target, move);
  if (!away) {
    // The kernel takes it that nothing has changed.
    touch_directory(target_dir.get());
    tree.drop_attributes(target);
    return away;
  }
  if (file.exists()) parent.job().hidden().hide_until_shown(file.name());
  return ok();
}

}  // namespace

FsResult<> RealNode::rename(const Caller& caller, const std::string& name, Node& target_parent,
                            const std::string& target_name, unsigned flags) {
  if ((flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE)) != 0) return Errno{EINVAL};
  if (auto* other = dynamic_cast<RenameTarget*>(&target_parent))
    return job_->tree().patience().spent(caller.uid, [&](std::chrono::milliseconds waits) {
      return other->take(*this, name, target_name, flags, waits);
    });
  auto* target = dynamic_cast<RealNode*>(&target_parent);
  if (target == nullptr) return Errno{target_parent.immutable() ? EROFS : EPERM};
  if (target->job_ != job_) return Errno{EXDEV};
  if (reserved(name) || target->reserved(target_name)) return Errno{EPERM};

  EditableFile* from = editable(name);
  EditableFile* to = target->editable(target_name);
  if (from != nullptr || to != nullptr) {
    if (from == to) return ok();
    if ((flags & RENAME_EXCHANGE) != 0) return Errno{EINVAL};
    if (from != nullptr && to != nullptr) return Errno{EPERM};
    if (from != nullptr) {
      PTC_TRY(const HeldFd directory, target->held());
      return target->take_away(directory, target_name, [&] {
        return move_away(caller, *this, *from, *target, target_name, flags);
      });
    }
    bool there = to->exists() && !job_->hidden().hidden(to->name());
    if (there && (flags & RENAME_NOREPLACE) != 0) return Errno{EEXIST};
    PTC_TRY(save_over(caller, *this, name, *target, *to, job_));
    job_->hidden().show(to->name());
    return ok();
  }

  PTC_TRY(const HeldFd source_dir, held());
  PTC_TRY(const HeldFd target_dir, target->held());
  auto rename_now = [&]() -> FsResult<> {
    if (::renameat2(source_dir.get(), name.c_str(), target_dir.get(), target_name.c_str(), flags) !=
        0) {
      return last_errno();
    }
    return ok();
  };
  PTC_TRY(target->take_away(target_dir, target_name, [&] {
    return job_->gate().unless_sealed({key(), target->key()}, rename_now);
  }));
  // What was written under a temporary name is complete now.
  const UniqueFd moved = target->note_moved(target_dir, target_name);
  if (moved.valid()) note_written(moved.get());
  if ((flags & RENAME_EXCHANGE) != 0)
    if (const UniqueFd back = note_moved(source_dir, name); back.valid()) note_written(back.get());
  return ok();
}

}  // namespace ptc
