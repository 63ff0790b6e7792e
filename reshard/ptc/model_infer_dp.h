// Model::infer: the shapes of tensors before dp cut them. For model_infer.cc only.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/ptc/model.h"

namespace ptc {

/// A cut over dp: among how many ranks, and by tensor the rows that all of these wrote.
struct DpRows {
  uint32_t ranks;
  const std::vector<uint64_t>& rows;
};

/// Replaces the shapes of what one dp rank wrote by those that a rank would have without the cut
/// over dp, which is another for experts than for all else (`dense`). Of ZeRO-1's rows of elements
/// the shape is that of the parameter they follow; FSDP's rows add up.
///
/// Tensors of one element may be scalars or ends of cut ones: they are what other tensors of their
/// kind (`exp_avg.<parameter>`) are. A shape that no cut explains stays, and will not fit later. So
/// does one that is `known`, by tensor.
void undo_dp_cut(const RuleSet& rules, OptimizerCut cut, const DpRows& experts, const DpRows& dense,
                 const std::vector<bool>& known, std::vector<TensorInfo>& tensors);

}  // namespace ptc
