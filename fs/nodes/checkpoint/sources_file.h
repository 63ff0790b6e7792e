// .sources.json: of layouts/<layout>/rank/<r>/ where the bytes of the rank's files lie, of a
// checkpoint where parts of its tensors do (byte_sources.h).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "fs/nodes/checkpoint/checkpoint_dir.h"

namespace ptc {

/// In no listing, for it is of no use in a copy of the directory. Made when it is opened, for
/// bytes are moved; how long it is then is not known before.
class SourcesFile : public Node {
 public:
  static constexpr const char* kName = ".sources.json";

  /// `files`: of a rank; nullptr: of the checkpoint's tensors.
  SourcesFile(std::shared_ptr<CheckpointView> checkpoint, std::string key, FileSetSourceRef files)
      : Node(std::move(key)), checkpoint_(std::move(checkpoint)), files_(std::move(files)) {}

  FsResult<struct stat> attributes() override;
  FsResult<Opened> open(const Caller& caller, int flags) override;

 private:
  const std::shared_ptr<CheckpointView> checkpoint_;
  const FileSetSourceRef files_;
};

}  // namespace ptc
