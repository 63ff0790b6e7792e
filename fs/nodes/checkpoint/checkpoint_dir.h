// checkpoints/<name>/: meta.json, model/, hf/, dcp/, layouts/.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fs/tree/tree.h"

namespace ptc {

/// A directory in a checkpoint: immutable, its names hidden one by one by `rm -r`.
class FrozenDir : public Node {
 public:
  /// `key` is that of the checkpoint, or of its parent followed by '/' and its name: child_key().
  FrozenDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key);

  bool immutable() const override { return true; }
  /// A checkpoint may be removed by others than the kernel; what is in it stays with it.
  NameLife name_life() const override {
    return path().empty() ? NameLife::kUntilTold : NameLife::kForever;
  }
  /// Until hidden names may come back by themselves: not 0, for `rm -r` has the kernel ask for
  /// those of each directory on the way to each name that it removes.
  double attribute_seconds() const override {
    return std::min(kCacheSeconds, checkpoint_->hidden.none_comes_back_for().count());
  }
  FsResult<struct stat> attributes() override;
  FsResult<NodeRef> lookup(const std::string& name) final;
  FsResult<std::vector<DirEntry>> list() final;
  FsResult<> unlink(const std::string& name) final;
  FsResult<> remove_directory(const std::string& name) override;

 protected:
  const JobViewRef& job() const { return job_; }
  const std::shared_ptr<CheckpointView>& checkpoint() const { return checkpoint_; }
  /// Relative to the checkpoint; empty for the checkpoint itself.
  std::string_view path() const { return checkpoint_->path_of(key()); }
  std::string child_key(std::string_view name) const;
  /// The node of this name, if there is one already.
  NodeRef known(const std::string& key) const { return job_->tree().table().find(key); }
  DirEntry entry(std::string name, mode_t type) const;
  /// EPERM while the checkpoint is pinned.
  FsResult<> may_remove() const;
  NodeRef intern(NodeRef fresh) const { return job_->tree().table().intern(std::move(fresh)); }

  /// As lookup() and list(), but of everything that is there, hidden or not.
  virtual FsResult<NodeRef> find(const std::string& name) = 0;
  virtual FsResult<std::vector<DirEntry>> entries() = 0;
  /// How many of entries() are directories; nullopt: to count them costs too much.
  virtual FsResult<std::optional<uint64_t>> subdirectories();
  /// Whether entries() are always the same.
  virtual bool entries_stay() const { return true; }

 private:
  bool hides(std::string_view name) const;
  void hide(std::string_view name);

  const JobViewRef job_;
  const std::shared_ptr<CheckpointView> checkpoint_;
  /// What subdirectories() said, where entries_stay(); asked for at each removal of a name.
  std::atomic<int64_t> subdirectories_{-1};
};

class CheckpointDir : public FrozenDir {
 public:
  CheckpointDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint)
      : FrozenDir(std::move(job), checkpoint, checkpoint->key) {
    checkpoint->shown = true;
  }
  /// Whether `rm -r` has taken every name out of it, so that rmdir may remove the checkpoint.
  static bool all_hidden(const CheckpointView& checkpoint);

  /// user.ptc.pin: "1" on a pinned checkpoint, absent on others; set and removed to pin and let go.
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<std::vector<std::string>> list_xattrs() override;
  FsResult<> set_xattr(const std::string& name, std::string_view value, int flags) override;
  FsResult<> remove_xattr(const std::string& name) override;

 private:
  bool pinned() const;
  FsResult<> pin(bool pinned);
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
};

}  // namespace ptc
