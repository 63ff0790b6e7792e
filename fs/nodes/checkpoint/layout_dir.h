// layouts/<layout>/rank/<r>/: what one rank of a layout loads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fs/nodes/checkpoint/file_set_dir.h"

namespace ptc {

/// "0", "12": only as it is written by us, so that one rank has one path.
std::optional<uint64_t> parse_rank(const std::string& name);

/// What this rank loads.
FileSetSourceRef rank_files_of(const JobView& job, const CheckpointView& checkpoint,
                               const LayoutSpec& spec, uint64_t rank);

/// layouts/<layout>/: holds rank/, deepspeed/, and megatron/ of what Megatron-LM saved in its own
/// format.
class LayoutDir : public FrozenDir {
 public:
  LayoutDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
            LayoutSpec spec)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)), spec_(std::move(spec)) {}

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  const LayoutSpec spec_;
};

/// layouts/<layout>/rank/: a directory a rank.
class RanksDir : public FrozenDir {
 public:
  RanksDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
           LayoutSpec spec)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)), spec_(std::move(spec)) {}
  FsResult<struct stat> attributes() override;

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  const LayoutSpec spec_;
};

/// layouts/<layout>/rank/<r>/: its files, and its sub-tensors under tensors/.
class RankDir : public WholeSetDir {
 public:
  RankDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
          FileSetSourceRef source, LayoutSpec spec, uint64_t rank)
      : WholeSetDir(std::move(job), std::move(checkpoint), std::move(key), std::move(source)),
        spec_(std::move(spec)),
        rank_(rank) {}

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  const LayoutSpec spec_;
  const uint64_t rank_;
};

}  // namespace ptc
