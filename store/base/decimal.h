// A count that people and scripts write to a file.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ptc {

/// Decimal digits, with white space around them; nullopt: something else, or more than 64 bits.
std::optional<uint64_t> parse_count(std::string_view text);

}  // namespace ptc
