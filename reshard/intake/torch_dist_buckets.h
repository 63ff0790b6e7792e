// The state of Megatron-Core's distributed optimizer in a checkpoint of its own format
// (`--ckpt-format torch_dist`), as it is saved unless
// --dist-ckpt-optim-fully-reshardable says otherwise ("dp_reshardable"): a flat array for each
// bucket of each model-parallel rank's gradients,
//
//   optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)
//       .bucket_idx_0.exp_avg
//
// in which that rank's parameters lie from the last to the first, each at a multiple of 64.
// Megatron itself reads it on as many tensor ranks and stages alone. Here it becomes what the other
// format has, `optimizer.state.exp_avg.<parameter>`, which any layout cuts.
//
// The file does not say which parameters these are. It follows from what it does say:
//  * the boxes in which a parameter was saved are what its tensor-parallel ranks have of it;
//  * a stage has as many layers as fill its buckets to their last element, in the order in which
//    Megatron makes a layer's modules (four are known);
//  * each parameter's array begins and ends where one of the bucket's chunks does;
//  * and its master copy, rounded, is the parameter.
// Where one of these does not hold nothing is taken apart.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/megatron_file.h"
#include "store/base/error.h"
#include "store/codec/dcp_metadata.h"

namespace ptc {

/// Whether a tensor of that name is such a bucket's.
bool is_optimizer_bucket(std::string_view name);

/// The first bytes of a chunk's array.
struct ChunkRead {
  uint32_t tensor = 0, chunk = 0;  // numbers in the metadata
  uint32_t bytes = 0;
};
/// By read what is there.
using ReadChunks = std::function<Result<std::vector<std::string>>(std::span<const ChunkRead>)>;

/// What buckets become.
struct TakenApart {
  /// What an optimizer's first rank has beside (`param_groups`), which is the same on all.
  struct Value {
    uint32_t optimizer = 0;  // 1: of experts that are apart
    std::string key;         // "optimizer", "grad_scaler"
    DcpItem item;
  };
  std::vector<DcpTensor> tensors;  // of parameters; their chunks are runs of the buckets'
  std::vector<Value> settings;
  bool experts_apart = false;
};

/// Takes the buckets of `metadata` apart. `said`: what common.pt says. nullopt: there are none, or
/// nobody knows what is in them, and they stay. Errors are those of `read`.
/// Cost: in proportion to the chunks, and to parameters × model-parallel ranks.
Result<std::optional<TakenApart>> take_buckets_apart(const DcpMetadata& metadata,
                                                     const MegatronFile& said,
                                                     const ReadChunks& read);
/// The buckets' tensors, and what describes them, go from `metadata`, and those of parameters come.
void put_in_place(TakenApart apart, DcpMetadata& metadata);

}  // namespace ptc
