// checkpoints/<name>/: meta.json, model/, hf/, layouts/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fs/tree.h"

namespace ptc {

/// A directory in a checkpoint: immutable, its names hidden one by one by `rm -r`.
class FrozenDir : public Node {
 public:
  /// `path` is relative to the checkpoint; empty for the checkpoint itself.
  FrozenDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string path);

  bool immutable() const override { return true; }
  /// A checkpoint may be removed by others than the kernel; what is in it stays with it.
  bool keeps_its_name() const override { return !path_.empty(); }
  bool list_is_stable() const override { return !checkpoint_->hidden.any(); }
  FsResult<struct stat> attributes() override;
  FsResult<NodeRef> lookup(const std::string& name) final;
  FsResult<std::vector<DirEntry>> list() final;
  FsResult<> unlink(const std::string& name) final;
  FsResult<> remove_directory(const std::string& name) final;

  /// A node of this checkpoint at `path`.
  static std::string key_of(const CheckpointView& checkpoint, std::string_view path);

 protected:
  const JobViewRef& job() const { return job_; }
  const std::shared_ptr<CheckpointView>& checkpoint() const { return checkpoint_; }
  const std::string& path() const { return path_; }
  std::string path_of(std::string_view name) const;
  DirEntry entry(std::string name, mode_t type) const;
  /// EPERM while the checkpoint is pinned.
  FsResult<> may_remove() const;
  NodeRef intern(NodeRef fresh) const { return job_->tree().table().intern(std::move(fresh)); }

  /// As lookup() and list(), but of everything that is there, hidden or not.
  virtual FsResult<NodeRef> find(const std::string& name) = 0;
  virtual FsResult<std::vector<DirEntry>> entries() = 0;

 private:
  const JobViewRef job_;
  const std::shared_ptr<CheckpointView> checkpoint_;
  const std::string path_;
};

class CheckpointDir : public FrozenDir {
 public:
  CheckpointDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint)
      : FrozenDir(std::move(job), std::move(checkpoint), "") {}
  /// Whether `rm -r` has taken every name out of it, so that rmdir may remove the checkpoint.
  static bool all_hidden(const CheckpointView& checkpoint);

  /// user.ptc.pin: "1" on a pinned checkpoint, absent on others; set and removed to pin and let go.
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<std::vector<std::string>> list_xattrs() override;
  FsResult<> set_xattr(const std::string& name, std::string_view value, int flags) override;
  FsResult<> remove_xattr(const std::string& name) override;

 private:
  bool pinned() const;
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
};

}  // namespace ptc
