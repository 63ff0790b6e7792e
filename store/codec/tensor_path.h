// Tensor names as paths: "model.layers.0.q_proj.weight" ↔ "model/layers/0/q_proj/weight.npy".
#pragma once

#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// Dots become directories and ".npy" is added. So that every legal tensor name has exactly one
/// path and no path leads anywhere else, these are written as %XX (as in a URL): '%', '/', NUL and
/// other control characters; every dot beside another ("a..b"), a leading and a trailing dot. So no
/// directory has a dot in its name, and none is taken for a file. The empty name, components over
/// 255 bytes and names over 2048 are kInvalidArgument.
Result<std::string> tensor_path(std::string_view tensor_name);

/// The inverse. kInvalidArgument for what tensor_path never returns.
Result<std::string> tensor_name_of_path(std::string_view path);

}  // namespace ptc
