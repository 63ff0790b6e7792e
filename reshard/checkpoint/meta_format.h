// By what a checkpoint's meta.json is known, also where somebody has copied its directory.
#pragma once

#include <string_view>

namespace ptc {

/// The first value in it, of "format".
inline constexpr std::string_view kMetaFormat = "ptc-checkpoint/1";

}  // namespace ptc
