// The state of Megatron-LM's distributed optimizer, as `--ckpt-format torch` keeps it in
// distrib_optim.pt beside the model_optim_rng.pt of the same rank: flat arrays of fp32, in which
// parameters lie as in the buffers that DistributedDataParallel makes for gradients.
//
//   {"buckets_coalesced": True,
//    0: {(torch.bfloat16, torch.float32): {"param": …, "exp_avg": …, "exp_avg_sq": …,
//                                          "numel_unpadded": 1024}}, 1: …}
//
// A list of two of these where experts have an optimizer of their own; one that a rank has nothing
// of is None. So is the first of expert ranks but the first, as it is the same there. An
// optimizer's buffers are numbered by stretch of layers, then by the types of parameters in the
// order of the first of each. In a buffer parameters lie from the last to the first, each at a
// multiple of 64 elements of its bucket. A bucket ends with the parameter that makes it as large as
// it shall be; an embedding that several stages have has one of its own. Here buckets lie behind
// each other without the padding at their ends.
//
// The file does not say which parameters these are. That the model beside it does, and of its args
// how large buckets are; what comes out is compared with the arrays' lengths.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/megatron_file.h"
#include "store/base/error.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

inline constexpr std::string_view kMegatronBuckets = "distrib_optim.pt";
/// By the last part of its path.
bool is_megatron_buckets(std::string_view path);

struct MegatronParameter {
  std::string name;  // in the rank's file: "decoder.layers.0.w", "model1.decoder.layers.0.w"
  DType dtype = DType::kF32;
  Shape shape;
  friend bool operator==(const MegatronParameter&, const MegatronParameter&) = default;
};

/// What decides how buffers are made.
struct MegatronDdp {
  bool experts_apart = false;
  bool tied = false;                        // the embedding is the head
  bool overlaps = false;                    // else each buffer is one bucket
  std::optional<uint64_t> bucket_elements;  // that a bucket shall have, or:
  std::optional<uint64_t> buckets;          // in how many a rank's parameters shall be
  uint64_t stages = 1;
  uint64_t data_parallel = 1;  // ranks that share gradients: Megatron's dp × cp

  static MegatronDdp of(const MegatronFile& megatron);
};

struct MegatronBuffer {
  uint32_t optimizer = 0;            // 1: of experts that are apart
  uint32_t number = 0;               // among that optimizer's
  DType dtype = DType::kF32;         // of its parameters
  std::vector<uint32_t> parameters;  // by number, in the model's order
  std::vector<uint64_t> offsets;     // of each of them, in elements
  uint64_t elements = 0;
};
/// `parameters`: all of a rank, in the model's order. kInvalidArgument: more than 2^62 elements.
Result<std::vector<MegatronBuffer>> megatron_buffers(std::span<const MegatronParameter> parameters,
                                                     const MegatronDdp& ddp);

/// The outline of such a file. Its tensors are "param.<parameter>", "exp_avg.<parameter>" and
/// "exp_avg_sq.<parameter>". kInvalidArgument: what does not come out.
Result<std::string> megatron_buckets_outline(const ReadAt& read, uint64_t file_bytes,
                                             std::vector<MegatronParameter> parameters,
                                             const MegatronDdp& ddp);

/// Of such an outline: tensors that the rank has, and only the first expert rank's file.
Result<std::vector<TensorEntry>> megatron_buckets_absent(const FileOutline& outline);

/// Knows a file by the outline above alone. Under another layout the file is made anew, with the
/// buffers that Megatron would have there; of `arguments` the size of pipelines counts, and
/// kDataParallelArgument.
const FileFormat& megatron_buckets_format();
/// No name of args: how many ranks share gradients under a layout.
inline constexpr std::string_view kDataParallelArgument = "ptc.data_parallel";

}  // namespace ptc
