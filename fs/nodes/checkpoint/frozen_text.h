// Texts in a checkpoint: meta.json, consumed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "fs/nodes/checkpoint/checkpoint_dir.h"

namespace ptc {

/// As long as the checkpoint, so worth caching.
class FrozenText : public Node {
 public:
  using Make = std::function<std::string(const Checkpoint&)>;  // always the same
  /// `of_all`: it tells something of each file's content, and is for who may read all of them.
  FrozenText(std::shared_ptr<CheckpointView> checkpoint, std::string key, Make make, bool of_all);
  bool immutable() const override { return true; }
  FsResult<struct stat> attributes() override;
  bool keeps_content() const override { return true; }
  FsResult<Opened> open(const Caller&, int flags) override;

 private:
  std::string text() const { return make_(*checkpoint_->checkpoint); }
  const std::shared_ptr<CheckpointView> checkpoint_;
  const Make make_;
  const bool of_all_;
};

}  // namespace ptc
