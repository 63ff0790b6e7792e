#include "fs/nodes/root_dir.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "fs/nodes/dot_ptc.h"
#include "fs/nodes/job/job_dir.h"

namespace ptc {
namespace {

constexpr const char* kDotPtc = ".ptc";

}  // namespace

void RootDir::touch() const { touch_directory(tree_.root_fd()); }

FsResult<struct stat> RootDir::attributes() {
  struct stat stat = {};
  if (::fstat(tree_.root_fd(), &stat) != 0) return last_errno();
  stat.st_ino = 1;
  stat.st_nlink = 3 + tree_.store().job_count();
  return stat;
}

FsResult<> RootDir::set_attributes(const AttributeChange& change, Handle*) {
  int fd = tree_.root_fd();
  if ((change.uid || change.gid) &&
      ::fchownat(fd, "", change.uid.value_or(-1), change.gid.value_or(-1), AT_EMPTY_PATH) != 0) {
    return last_errno();
  }
  if (change.mode &&
      ::chmod(fmt::format("/proc/self/fd/{}", fd).c_str(), *change.mode & 07777) != 0) {
    return last_errno();
  }
  if (change.access_time || change.modify_time) {
    const timespec omit{0, UTIME_OMIT};
    timespec times[2] = {change.access_time.value_or(omit), change.modify_time.value_or(omit)};
    if (::utimensat(fd, "", times, AT_EMPTY_PATH) != 0) return last_errno();
  }
  return ok();
}

FsResult<NodeRef> RootDir::lookup(const std::string& name) {
  if (name == kDotPtc) return make_dot_ptc(tree_);
  PTC_TRY(auto view, as_fs(tree_.job(name)));
  if (view == nullptr) return Errno{ENOENT};
  return JobDir::make(view);
}

FsResult<std::vector<DirEntry>> RootDir::list() {
  std::vector<DirEntry> entries{{kDotPtc, S_IFDIR, inode_of(kDotPtc)}};
  for (const JobRef& job : tree_.store().jobs()) {
    struct stat stat = {};
    if (::stat(job->files_dir().c_str(), &stat) != 0) continue;  // removed meanwhile
    entries.push_back({job->name(), S_IFDIR, stat.st_ino});
  }
  return entries;
}

FsResult<NodeRef> RootDir::make_directory(const Caller& caller, const std::string& name,
                                          mode_t mode) {
  if (name == kDotPtc) return Errno{EEXIST};
  if (tree_.store().find(name) != nullptr) return Errno{EEXIST};
  if (!tree_.quotas().has_room(caller.uid, {0, 1})) return Errno{EDQUOT};
  PTC_TRY(auto root, attributes());
  // The new job's directories belong to whoever made it.
  const gid_t gid = (root.st_mode & S_ISGID) != 0 ? root.st_gid : caller.gid;
  JobAttributes attributes;
  for (const char* directory : {"", kIncomingName, kDataSetName})
    attributes.update(directory, {caller.uid, gid, mode & 07777});
  // Meanwhile the kernel has the directory locked, and who lists it waits, too.
  auto create = [&](std::chrono::milliseconds waits) -> FsResult<> {
    const auto created = tree_.store().create_job(name, attributes, waits);
    if (created) return ok();
    spdlog::warn("job '{}' was not created: {}", name, created.error().message());
    return Errno{to_errno_of_decision(created.error())};
  };
  PTC_TRY(tree_.patience().spent(caller.uid, create));
  PTC_TRY(auto view, as_fs(tree_.job(name)));
  if (view == nullptr) return Errno{EIO};
  touch();
  tree_.recount(view->job());
  spdlog::info("job '{}' created by uid {}", name, caller.uid);
  return JobDir::make(view);
}

FsResult<> RootDir::remove_directory(const std::string& name) {
  if (name == kDotPtc) return Errno{EPERM};
  PTC_TRY(auto view, as_fs(tree_.job(name)));
  if (view == nullptr) return Errno{ENOENT};
  auto remove = [&](std::chrono::milliseconds waits) -> FsResult<> {
    const auto removed = tree_.store().remove_job(name, false, view->job().id(), waits);
    if (removed) return ok();
    if (removed.error().code() == Code::kBusy) return Errno{ENOTEMPTY};
    spdlog::warn("job '{}' was not removed: {}", name, removed.error().message());
    return Errno{to_errno_of_decision(removed.error())};
  };
  PTC_TRY(tree_.patience().spent(view->directory().st_uid, remove));
  (void)tree_.job(name);  // drops the view
  touch();
  spdlog::info("job '{}' removed", name);
  return ok();
}

}  // namespace ptc
