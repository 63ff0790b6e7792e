// What a checkpoint of PyTorch's distributed checkpointing has beside tensors (step counts, groups
// of parameters), as a file that torch.load() reads.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/plan/source_index.h"
#include "store/base/error.h"
#include "store/codec/torch_path.h"

namespace ptc {

inline constexpr std::string_view kDcpValuesFile = "values.pt";

/// Nested dicts and lists as the state had them; where these cannot be (a list of which other
/// elements are tensors) one dict with the names of torch_path.h. Tensors among them are
/// contiguous. Empty: there are no values. kInvalidArgument: tensors in sets, or in objects of
/// unknown kinds.
Result<std::string> dcp_values_file(std::span<const DcpTable> tables);

/// A whole tensor of the model's.
struct ValueTensor {
  std::vector<TorchStep> path;
  uint32_t tensor = 0;
  DType dtype = DType::kF32;
  SubTensor all;
};
/// A file of torch.save's with these tensors behind the values. kInvalidArgument, too: what cannot
/// be one nested state.
Result<ImageLayout> lay_out_values(std::span<const DcpTable> tables,
                                   std::span<const ValueTensor> tensors);

}  // namespace ptc
