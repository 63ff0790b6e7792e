// Ordinary files: incoming/ and what users keep beside layout.json.
#pragma once

#include <sys/statvfs.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fs/tree/host_file.h"
#include "fs/tree/node.h"
#include "fs/tree/passthrough.h"
#include "fs/tree/tree.h"
#include "store/base/mutex.h"

namespace ptc {

class RealNode;
using RealNodeRef = std::shared_ptr<RealNode>;

/// A directory in which what is renamed into it becomes something else.
class RenameTarget {
 public:
  virtual ~RenameTarget() = default;
  /// `parent` is where it comes from; `flags` as of Node::rename(). EAGAIN after `waits`.
  virtual FsResult<> take(RealNode& parent, const std::string& name, const std::string& target_name,
                          unsigned flags, std::chrono::milliseconds waits) = 0;
};

/// A file, directory, symbolic link, fifo or socket of the host, below Job::files_dir(). Everything
/// is done by its handle, or relative to it, so no path of a user is ever resolved on the host.
/// Key: device and inode number, so that all hard links of a file are one node.
class RealNode : public Node {
 public:
  ~RealNode() override;
  RealNode(JobViewRef job, HostFile file, const struct stat& stat);

  JobView& job() const { return *job_; }
  FsResult<HeldFd> held() const;
  static std::string key_of(const struct stat& stat);

  /// It is a file or directory of the user's, and no name of ptcfs' own.
  bool is_plain() const { return inode_ != 0; }
  /// The file became part of a checkpoint: no more writing through what the kernel still knows.
  void make_read_only() { read_only_.store(true); }
  /// Of a file without a name: no longer holds it, and answers ESTALE, which makes the kernel look
  /// for the name anew. Only on a tmpfs, where no later file gets the number by which this node is
  /// known.
  bool let_go_if_removed();
  /// It has lost a name. Of a file that has none left, space is counted until it is closed
  /// (Quotas).
  void note_unlinked();
  /// Tells the job that the file was written, or that a directory has come to be there, if its
  /// name, by which `fd` was opened, is below incoming/.
  void note_written(int fd) const;
  /// A name in this directory, `directory`, has come to be another file's: opened with O_PATH.
  UniqueFd note_moved(const HeldFd& directory, const std::string& name) const;

  /// Changes this directory by a system call, which says whether it went well; EBUSY while it is
  /// being committed.
  FsResult<> change(const std::function<bool()>& call);

  bool is_agreed_on() const override { return false; }
  bool caches_attributes() const override { return !is_plain(); }
  uint64_t stamp() const override { return file_.stamp(); }
  InodeMode* inode_mode() override { return &mode_; }
  FsResult<struct stat> attributes() override;
  FsResult<> set_attributes(const AttributeChange& change, Handle* handle) override;
  FsResult<Opened> open(const Caller& caller, int flags) override;
  FsResult<std::string> read_link() override;
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;
  FsResult<Created> create(const Caller& caller, const std::string& name, mode_t mode,
                           int flags) override;
  FsResult<NodeRef> make_directory(const Caller& caller, const std::string& name,
                                   mode_t mode) override;
  FsResult<NodeRef> make_node(const Caller& caller, const std::string& name, mode_t mode) override;
  FsResult<NodeRef> make_symlink(const Caller& caller, const std::string& name,
                                 const std::string& target) override;
  FsResult<NodeRef> make_link(Node& node, const std::string& name) override;
  FsResult<> unlink(const std::string& name) override;
  FsResult<> remove_directory(const std::string& name) override;
  FsResult<> rename(const Caller& caller, const std::string& name, Node& target_parent,
                    const std::string& target_name, unsigned flags) override;  // in rename.cc
  FsResult<> sync_directory() override;
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<std::vector<std::string>> list_xattrs() override;
  FsResult<> set_xattr(const std::string& name, std::string_view value, int flags) override;
  FsResult<> remove_xattr(const std::string& name) override;

  /// Makes what statfs(2) says of the store what the job may have of it.
  void limit_space(struct statvfs& space) const;

  /// In the directory of a job or its data set: layout.json and others that are not files of the
  /// host; else null.
  virtual EditableFile* editable(const std::string& /*name*/) { return nullptr; }
  /// There: other names that belong to ptcfs.
  virtual bool reserved(const std::string& /*name*/) const { return false; }

 protected:
  /// For directories of the tree that have a key of their own.
  RealNode(JobViewRef job, HostFile file, std::string key);

 private:
  friend class RealHandle;
  /// Runs what changes how much space the file takes, and counts that. Where the job is not
  /// limited, it only runs. `most`: bytes that it may take more; `needed` says it better, and is
  /// asked where that is too much. `done`: called then, if that has not failed, for note_taken().
  template <class Change>
  auto counted(uint64_t most, const std::function<uint64_t()>& needed, Change change,
               const std::function<void()>& done = nullptr) -> decltype(change());
  /// While it is counted: these bytes have their pages from now on; from there on none has.
  void note_taken(uint64_t begin, uint64_t end);
  void note_freed(uint64_t begin);
  /// While it is counted, how much of these bytes has no page yet, at most.
  uint64_t lacking(int fd, uint64_t begin, uint64_t end) const;
  /// The same of a new name in this directory.
  FsResult<> counted_new(const Caller& caller, const std::function<FsResult<>()>& make);
  FsResult<> change_xattrs(const HeldFd& fd, int64_t most,
                           const std::function<FsResult<>()>& change);
  FsResult<> remove(const std::string& name, int flags);
  /// Takes a name out of `directory` by `call`. Who has the file open, or is in the directory that
  /// it was, keeps that.
  FsResult<> take_away(const HeldFd& directory, const std::string& name,
                       const std::function<FsResult<>()>& call);
  FsResult<> drop_suid(const HeldFd& fd,
                       const Caller& caller);  // and S_ISGID, as a write of his does
  FsResult<NodeRef> find(const HeldFd& directory, const std::string& name);
  FsResult<Opened> opened(UniqueFd fd, DescriptorShareRef share, int flags);
  void note_open(int fd, bool by_kernel);
  void note_closing(int fd);
  Quotas::Seen look() const;
  FsResult<NodeRef> adopt_new(const HeldFd& directory, const Caller& caller,
                              const std::string& name, mode_t mode);
  static gid_t group_for(const HeldFd& directory, const Caller& caller);

  const JobViewRef job_;
  HostFile file_;
  const uint64_t inode_;  // 0: a directory with a key of its own
  InodeMode mode_;
  std::atomic<uint64_t> writers_{0};
  std::atomic<bool> read_only_{false};
  Mutex space_mutex_;  // what changes its space is counted one by one
  /// Held by that: what was taken at once, which is a hole for lseek(2) until somebody writes
  /// there.
  uint64_t taken_begin_ = 0, taken_end_ = 0;
  std::atomic<bool> uncounted_{false};  // that may have changed
  std::atomic<bool> nameless_{false};
  std::atomic<bool> by_kernel_{false};  // it is open, and the kernel writes by itself
  Mutex known_mutex_;  // held while it is made known to the quotas, or forgotten; before their own
  mutable Mutex open_mutex_;                               // after it
  std::vector<int> open_ PTC_GUARDED_BY(open_mutex_);      // descriptors of handles
  mutable Quotas::Seen seen_ PTC_GUARDED_BY(open_mutex_);  // when there was one last
};

/// What a file's user attributes take. By HeldFd::proc_path(), or by a path of which the last link
/// is not followed.
int64_t xattr_bytes(const HeldFd& file);
int64_t xattr_bytes(const std::string& path);

}  // namespace ptc
