// Where a checkpoint lies beside the host's memory, as status.json says.
#pragma once

#include <string>

#include "store/base/json.h"
#include "store/base/size_text.h"
#include "tools/ptc/fields.h"

namespace ptc::cli {

/// Of an entry of "checkpoints": "cuda:0 320.0 KiB, cuda:1 320.0 KiB"; empty: nothing is there.
inline std::string memories_text(const json::object& checkpoint) {
  std::string text;
  for (const json::value& one : array_field(checkpoint, "devices")) {
    if (!one.is_object()) continue;
    const json::object& device = one.get_object();
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", text_field(device, "memory"),
                        format_size(number_field(device, "bytes")));
  }
  return text;
}

}  // namespace ptc::cli
