// The outline of a file of PyTorch's distributed checkpointing (`__0_0.distcp`): which parts of
// which tensors lie where in it, and its values that are no tensors.
#pragma once

#include <cstdint>
#include <optional>
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
  /// By tensor, as paths: what is at its path is a stack of several tensors, along an axis before
  /// all others, and this is the one of that number; nullopt: it is what is there.
  std::vector<std::optional<uint64_t>> rows;
  /// By exact path (torch_path.h) the bytes of an archive as torch.save writes it.
  std::vector<std::pair<std::string, std::string>> values;
  /// Files of its directory that have other bytes in dcp/ than were written, by name.
  std::vector<std::pair<std::string, std::string>> beside;
};

/// The axes of one of a stack's tensors, and of the stack.
inline Dims behind_first(const Dims& axes) {
  Dims rest;
  for (size_t axis = 1; axis < axes.size(); ++axis) rest.push_back(axes[axis]);
  return rest;
}
inline Dims with_first(uint64_t first, const Dims& rest) {
  Dims axes{first};
  for (const uint64_t each : rest) axes.push_back(each);
  return axes;
}

std::string dcp_table_text(const DcpTable& table);
/// kCorrupt: it is no such text, or of a file that has fewer bytes.
Result<DcpTable> parse_dcp_table(std::string_view text, uint64_t file_bytes);

}  // namespace ptc
