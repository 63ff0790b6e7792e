#include "fs/nodes/checkpoint/checkpoints_dir.h"

#include <memory>
#include <utility>

#include "fs/nodes/checkpoint/checkpoint_dir.h"
#include "fs/nodes/job/incoming_dir.h"

namespace ptc {

FsResult<NodeRef> CheckpointsDir::make(const JobViewRef& job) {
  return job->tree().table().intern(std::make_shared<CheckpointsDir>(job));
}

FsResult<struct stat> CheckpointsDir::attributes() {
  struct stat directory = job_->directory();
  auto checkpoints = job_->job().checkpoints();
  timespec time = later(directory.st_mtim, job_->checkpoints_changed());
  for (const CheckpointRef& checkpoint : checkpoints) {
    int64_t ns = checkpoint->manifest().time_ns;
    time = later(time, {ns / 1000000000, ns % 1000000000});
  }
  struct stat stat =
      virtual_stat(directory.st_mode, directory.st_uid, directory.st_gid, time, inode_of(key()));
  stat.st_nlink = 2 + checkpoints.size();
  return stat;
}

FsResult<NodeRef> CheckpointsDir::lookup(const std::string& name) {
  auto view = job_->checkpoint(name);
  if (view == nullptr) return Errno{ENOENT};
  return job_->tree().table().intern(std::make_shared<CheckpointDir>(job_, std::move(view)));
}

FsResult<std::vector<DirEntry>> CheckpointsDir::list() {
  std::vector<DirEntry> entries;
  for (const CheckpointRef& checkpoint : job_->job().checkpoints()) {
    auto view = job_->checkpoint(checkpoint->name());
    if (view == nullptr) continue;  // removed meanwhile
    entries.push_back({checkpoint->name(), S_IFDIR, view->attributes(S_IFDIR, "").st_ino});
  }
  return entries;
}

FsResult<> CheckpointsDir::take(RealNode& parent, const std::string& name,
                                const std::string& target_name, unsigned flags,
                                std::chrono::milliseconds waits) {
  if (&parent.job() != job_.get()) return Errno{EXDEV};
  if (dynamic_cast<IncomingDir*>(&parent) == nullptr) return Errno{EPERM};
  if ((flags & RENAME_EXCHANGE) != 0) return Errno{EINVAL};
  const auto view = job_->checkpoint(target_name);
  if (auto committed = as_decided(job_->job().commit(name, target_name, waits)); !committed)
    return of_rename(committed.error());
  // It was there already: decided after a rename before this one had given up. For the kernel what
  // it found by that name is replaced now, and dead; by another node it finds it anew.
  if (view != nullptr)
    if (const NodeRef replaced = job_->tree().table().find(checkpoint_key(*view)))
      job_->tree().table().displace(*replaced);
  job_->hidden().show("current");
  return ok();
}

FsResult<> CheckpointsDir::remove_directory(const std::string& name) {
  auto view = job_->checkpoint(name);
  if (view == nullptr) return Errno{ENOENT};
  if (!CheckpointDir::all_hidden(*view)) return Errno{ENOTEMPTY};
  auto remove = [job = job_, name, id = view->checkpoint->manifest().id] {
    const FsResult<> removed = as_decided(job->job().remove_checkpoint(name, id));
    (void)job->checkpoint(name);  // drops the view
    return removed;
  };
  return job_->tree().errands().ask(checkpoint_key(*view), "rmdir", remove);
}

}  // namespace ptc
