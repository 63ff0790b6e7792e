// Which bytes are text, and text for people from what is not.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ptc {

/// Bytes of the character that `text` begins with; 0 when it begins with none.
size_t utf8_character(std::string_view text);

bool is_utf8(std::string_view text);

/// `text` as people can read it: UTF-8 without control characters, what is neither as \xNN, and "…"
/// for what goes beyond `most_bytes`.
std::string printable(std::string_view text, size_t most_bytes);

}  // namespace ptc
