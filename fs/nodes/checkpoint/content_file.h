// One file of a FileSet: the bytes of a checkpoint under some name.
#pragma once

#include <memory>
#include <string>

#include "fs/nodes/checkpoint/checkpoint_dir.h"
#include "fs/tree/gather_cache.h"
#include "fs/tree/passthrough.h"

namespace ptc {

/// Immutable. An image of its own is handed to the kernel; so is memory into which the first open
/// gathers a file that has none (GatherCache). Where there is neither, because the file is small or
/// larger than the cache, or takes long to gather, or comes from other nodes, bytes are read
/// through the handle and stay in the page cache. Which it is the first open decides until the last
/// close, as the kernel demands; the bytes are the same.
class ContentFile : public Node {
 public:
  /// `key`: FrozenDir::child_key() of its directory.
  ContentFile(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
              FileSetSourceRef source, const FileSet& set, size_t index);

  bool immutable() const override { return true; }
  bool has_content() const override { return true; }
  InodeMode* inode_mode() override { return &mode_; }
  FsResult<struct stat> attributes() override;
  const Awaited* awaited_by_open() const override;
  FsResult<Opened> open(const Caller& caller, int flags) override;
  FsResult<std::string> get_xattr(const std::string& name) override;
  FsResult<std::vector<std::string>> list_xattrs() override;

 private:
  friend class ContentHandle;
  GatherCache::Content gathered(FileContentRef content) const;
  /// What the kernel is handed for a content that is no image of its own; nullptr: it is read
  /// through the handle. Not whole: so it is, and the handle has bytes from there.
  GatherCache::FileRef gather(const FileContentRef& content, const std::string& content_key,
                              const Caller& caller) const;
  std::string_view path() const { return checkpoint_->path_of(key()); }
  const JobViewRef job_;
  const std::shared_ptr<CheckpointView> checkpoint_;
  const FileSetSourceRef source_;
  const size_t index_;  // in its set
  const uint64_t bytes_;
  const std::string dtype_;  // FileSet::Entry::dtype
  const ReadRights rights_;
  InodeMode mode_;
  OpenerShare share_;
};

}  // namespace ptc
