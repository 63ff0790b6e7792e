// layouts/vllm-tp8/: what the workers of an inference engine load, under its own names:
//   serve/         the files of all workers, and config.json, tokenizers …: the engine's MODEL
//   rank/<worker>/ the same with the file of one worker alone
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "reshard/serve/served_layout.h"

namespace ptc {

class ServedDir : public FrozenDir {
 public:
  ServedDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
            ServedLayout layout)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)), layout_(layout) {}

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  const ServedLayout layout_;
};

}  // namespace ptc
