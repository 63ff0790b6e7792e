// <job>/dataset/gen/: generations, and the trees of files that are made of samples when they are
// read.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dataset/run/data_tree.h"
#include "fs/tree/node.h"
#include "fs/tree/passthrough.h"
#include "fs/tree/tree.h"

namespace ptc {

/// gen/: one directory a generation, that comes with a change and goes with a rollback.
class GenerationsDir : public Node {
 public:
  explicit GenerationsDir(JobViewRef job)
      : Node(job->key() + "/dataset/gen"), job_(std::move(job)) {}
  NameLife name_life() const override { return NameLife::kForever; }
  double attribute_seconds() const override { return job_->hidden().any() ? 0 : kCacheSeconds; }
  FsResult<struct stat> attributes() override;
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;

 private:
  std::vector<uint64_t> numbers() const;
  const JobViewRef job_;
};

/// A generation as this mount shows it. Immutable; lives while a node of it does.
struct GenerationView {
  JobViewRef job;
  ShownGenerationRef generation;
  std::string key;     // prefix of its nodes' keys; never used twice
  timespec time = {};  // of all that is in it
  InodeHash inodes;    // from which those of all paths are reckoned; other ones for each generation
  Awaited shards;      // whose file system may be slow, or gone
  uid_t uid = 0;       // of all that is in it: who saved the source
  gid_t gid = 0;       // the shards' where they have one
  mode_t mode = 0;     // of its files

  struct stat attributes(bool directory, std::string_view node_key) const;
};
using GenerationViewRef = std::shared_ptr<const GenerationView>;

/// A directory below. What it lists says nothing of sizes.
class SamplesDir : public Node {
 public:
  SamplesDir(GenerationViewRef view, std::string key, DataDirRef dir, bool top)
      : Node(std::move(key)), view_(std::move(view)), dir_(std::move(dir)), top_(top) {}
  bool immutable() const override { return true; }
  bool lists_attributes() const override { return false; }
  const Awaited* awaited() const override { return &view_->shards; }
  NameLife name_life() const override { return top_ ? NameLife::kUntilTold : NameLife::kForever; }
  FsResult<struct stat> attributes() override;
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;

 private:
  const GenerationViewRef view_;
  const DataDirRef dir_;
  const bool top_;
};

/// A file below. What is a source file as it is, is handed to the kernel; so is memory into which a
/// file that is read through is gathered at its first open, and those after it in its directory
/// meanwhile (GatherCache). All else is made when read, and stays in the page cache. Which it is
/// the first open decides until the last close.
class SamplesFile : public Node {
 public:
  using Make = std::function<Result<VirtualFileRef>()>;
  /// `name` in `dir`, made by `make`.
  SamplesFile(GenerationViewRef view, std::string key, DataDirRef dir, std::string name, Make make)
      : Node(std::move(key)),
        view_(std::move(view)),
        dir_(std::move(dir)),
        name_(std::move(name)),
        make_(std::move(make)) {}
  bool immutable() const override { return true; }
  bool keeps_content() const override { return true; }
  InodeMode* inode_mode() override { return &mode_; }
  const Awaited* awaited() const override { return &view_->shards; }
  FsResult<struct stat> attributes() override;
  FsResult<Opened> open(const Caller& caller, int flags) override;

 private:
  friend class SamplesHandle;
  /// Says it in status.json and in the log.
  Errno failed(const Error& error, std::string_view what) const;
  /// nullptr: it is to be read as it is.
  GatherCache::FileRef gather(const VirtualFileRef& file) const;
  const GenerationViewRef view_;
  const DataDirRef dir_;
  const std::string name_;
  const Make make_;
  InodeMode mode_;
  OpenerShare share_;
  std::atomic<uint64_t> size_{UINT64_MAX};  // as soon as it is known
};

}  // namespace ptc
