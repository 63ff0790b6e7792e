// layouts/<layout>/megatron/: what Megatron-LM saved in its own format, as it loads it again under
// this layout (`--load …/current/megatron`):
//   latest_checkpointed_iteration.txt
//   iter_0000100/mp_rank_01_002/model_optim_rng.pt
// Of its distributed checkpoint (torch_dist) iter_0000100/ has what is in dcp/, the same under each
// layout: Megatron cuts that itself.
// A directory of the other has the files of the first of its tensor-parallel rank, stage and expert
// rank's data-parallel ranks, as if nothing was cut over these: Megatron loads all there.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fs/nodes/checkpoint/checkpoint_dir.h"

namespace ptc {

class MegatronDir : public FrozenDir {
 public:
  MegatronDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
              LayoutSpec spec, Checkpoint::MegatronTree tree)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)),
        spec_(std::move(spec)),
        tree_(std::move(tree)) {
    spec_.optimizer = OptimizerCut::kReplicated;
  }

 private:
  FsResult<NodeRef> find(const std::string& name) override;
  FsResult<std::vector<DirEntry>> entries() override;
  LayoutSpec spec_;
  const Checkpoint::MegatronTree tree_;
};

}  // namespace ptc
