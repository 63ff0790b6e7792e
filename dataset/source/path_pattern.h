// Patterns of paths, as shells and WebDataset have them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/source_access.h"
#include "store/base/error.h"

namespace ptc {

/// What braces stand for, in order: "{000..012}", "{0..10..2}", "{a..e}", "{train,val}", also within each other. With a
/// leading zero all numbers are as wide as the wider one. Braces that are neither stay as they are. kInvalidArgument: more
/// than a million paths.
Result<std::vector<std::string>> expand_braces(const std::string& pattern);

/// Whether it has '*', '?' or '['.
bool has_wildcards(std::string_view pattern);

/// The paths that match, sorted; where the pattern ends with '/', directories, without it. A '.' at a name's
/// beginning is matched by nothing but itself. kPermissionDenied: a directory on the way cannot be listed.
Result<std::vector<std::string>> matching_paths(const SourceAccess& access, const std::string& pattern);

}  // namespace ptc
