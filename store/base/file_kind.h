// Files that stand where others are expected: told by their first bytes.
#pragma once

#include <cstddef>
#include <string_view>

namespace ptc {

/// Enough of a file's beginning for other_kind_of().
inline constexpr size_t kFileKindBytes = 256;

/// What a file is that could not be read as what its name says, and what to do: "it is a git-lfs
/// pointer, …". Empty: nothing known.
std::string_view other_kind_of(std::string_view beginning);

}  // namespace ptc
