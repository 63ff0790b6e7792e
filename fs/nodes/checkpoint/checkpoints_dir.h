// <job>/checkpoints/: the committed checkpoints. A rename into it commits, rmdir removes.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "fs/tree/real_node.h"
#include "fs/tree/tree.h"

namespace ptc {

class CheckpointsDir : public Node, public RenameTarget {
 public:
  static FsResult<NodeRef> make(const JobViewRef& job);
  explicit CheckpointsDir(JobViewRef job) : Node(checkpoints_key(*job)), job_(std::move(job)) {}

  /// mv incoming/<name> checkpoints/<target_name>. `parent` is where it comes from.
  FsResult<> take(RealNode& parent, const std::string& name, const std::string& target_name,
                  unsigned flags, std::chrono::milliseconds waits) override;

  NameLife name_life() const override { return NameLife::kForever; }
  double attribute_seconds() const override { return kCacheSeconds; }
  FsResult<struct stat> attributes() override;
  FsResult<NodeRef> lookup(const std::string& name) override;
  FsResult<std::vector<DirEntry>> list() override;
  /// Removes a checkpoint, once everything in it is hidden; ENOTEMPTY before.
  FsResult<> remove_directory(const std::string& name) override;

 private:
  const JobViewRef job_;
};

}  // namespace ptc
