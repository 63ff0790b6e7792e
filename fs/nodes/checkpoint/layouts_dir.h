// checkpoints/<name>/layouts/: every valid layout can be opened by name; those that are
// materialised are listed.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fs/nodes/checkpoint/checkpoint_dir.h"

namespace ptc {

class LayoutsDir : public FrozenDir {
 public:
  LayoutsDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint)
      : FrozenDir(std::move(job), checkpoint, checkpoint->key + "/layouts") {}
  /// The names stay what they are, but which of them are listed changes with each reshard.
  FsResult<struct stat> attributes() override;
  FsResult<> remove_directory(const std::string& name) override;

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  bool entries_stay() const override { return false; }
};

}  // namespace ptc
