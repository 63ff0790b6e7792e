// What users call jobs and checkpoints.
#pragma once

#include <cstddef>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// Of what lies in a directory of the store, and is not hidden there: not empty, no '/', not
/// beginning with '.'.
bool can_be_file(std::string_view name);

/// 1 to 255 bytes, UTF-8, can_be_file(). kInvalidArgument: `name` is none for a `what`, which
/// `written_in` would name.
Result<> check_name(std::string_view name, std::string_view what, std::string_view written_in);

/// What `ptc import` puts behind the name of a directory in incoming/ while it commits it: this,
/// and so many hexadecimal digits.
inline constexpr std::string_view kImportMark = ".import-";
inline constexpr size_t kImportDigits = 16;
/// The name without that, which it has before and after.
std::string_view staged_name(std::string_view incoming);

}  // namespace ptc
