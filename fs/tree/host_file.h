// A file of the host that is known for long and used now and then.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <memory>
#include <string>

#include "fs/tree/errno.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {

/// A descriptor (O_PATH) while it is used.
class HeldFd {
 public:
  explicit HeldFd(UniqueFd own) : own_(std::move(own)), fd_(own_.get()) {}
  explicit HeldFd(std::shared_ptr<const UniqueFd> kept)
      : kept_(std::move(kept)), fd_(kept_->get()) {}
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  std::string proc_path() const;  // by which the very file is opened

 private:
  UniqueFd own_;
  std::shared_ptr<const UniqueFd> kept_;
  int fd_;
};

/// Finds files of one file system by their handles (name_to_handle_at(2)), which cost no
/// descriptor. Needs CAP_DAC_READ_SEARCH, and a file system that can (ext4, XFS, tmpfs …);
/// otherwise each file keeps a descriptor.
class FileHandles {
 public:
  FileHandles() = default;
  /// Of the file system of this directory.
  void start(const std::string& directory);
  bool enabled() const { return mount_.valid(); }

 private:
  friend class HostFile;
  UniqueFd mount_;
  int mount_id_ = -1;
};

/// One file. Threads: any.
class HostFile {
 public:
  HostFile() = default;  // of no file: it is not to be used
  /// `fd` is O_PATH. `handles` outlives this.
  HostFile(const FileHandles& handles, UniqueFd fd);
  HostFile(HostFile&& other) noexcept;
  /// No other thread uses either meanwhile: neither is locked.
  HostFile& operator=(HostFile&& other) noexcept PTC_NO_THREAD_SAFETY_ANALYSIS;

  /// Invalid, with errno: it is gone (ESTALE), or there is no descriptor left.
  HeldFd hold() const;
  /// Whether both are of one file, and not of two that had one inode number after each other.
  bool same_file(const HostFile& other) const;
  /// What tells it from a later file that has its inode number.
  uint64_t stamp() const;

  /// From now on a descriptor is kept, so that the file lives without a name, until each call has
  /// been followed by one of unpin(). Fails silently where there is none.
  void pin(int fd);
  void unpin();
  /// Lets go of a descriptor, by which a removed file keeps its memory; hold() is ESTALE from then
  /// on.
  void let_go();

 private:
  const FileHandles* handles_ = nullptr;
  std::string handle_;  // type and bytes; empty: none
  mutable Mutex mutex_;
  std::shared_ptr<const UniqueFd> kept_ PTC_GUARDED_BY(mutex_);
  int pins_ PTC_GUARDED_BY(mutex_) = 0;
};

/// One descriptor, or more, that a user's open file takes. As long as it lives it counts for him.
class DescriptorShare {
 public:
  /// EMFILE: the rest is for others, see check_descriptors(); or he has as many as are left for all
  /// others, so that whoever comes finds some. The latter not of root, nor of who runs the daemon.
  static FsResult<std::shared_ptr<DescriptorShare>> take(uid_t user, int any);
  ~DescriptorShare();
  DescriptorShare(const DescriptorShare&) = delete;
  DescriptorShare& operator=(const DescriptorShare&) = delete;

 private:
  explicit DescriptorShare(uid_t user);
  const uid_t user_;
};
using DescriptorShareRef = std::shared_ptr<DescriptorShare>;

/// Whether it lies in a tmpfs, whose pages may be pinned for long.
bool lies_in_memory(int fd);

/// EMFILE when the descriptors are as good as gone: the last are left to what nobody asked for by
/// opening files, that is other nodes, the metadata, and the daemon's own work. `any` is one of
/// whatever.
FsResult<> check_descriptors(int any);
/// How many are left for open files, however many; the errno where there is none.
FsResult<int> descriptors_left(int any);
/// Whether that has been so, or nearly, since the last call.
bool were_descriptors_short();

}  // namespace ptc
