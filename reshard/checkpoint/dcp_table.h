// The outline of a file of PyTorch's distributed checkpointing (`__0_0.distcp`): which parts of
// which tensors lie where in it, and its values that are no tensors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/codec/safetensors.h"
#include "store/tensor/box.h"

namespace ptc {

inline constexpr std::string_view kDcpEnding = ".distcp";  // of such files' names

struct DcpTable {
  std::vector<TensorEntry> tensors;  // their shapes are those of the boxes
  std::vector<Box> boxes;            // by tensor: of the whole
  /// By tensor: its exact path (torch_path.h) in the state that was saved, whose torch_name() is
  /// the whole name that it had there. Empty: not known.
  std::vector<std::string> paths;
  /// By exact path (torch_path.h) the bytes of an archive as torch.save writes it.
  std::vector<std::pair<std::string, std::string>> values;
};

std::string dcp_table_text(const DcpTable& table);
/// kCorrupt: it is no such text, or of a file that has fewer bytes.
Result<DcpTable> parse_dcp_table(std::string_view text, uint64_t file_bytes);

}  // namespace ptc
