// What readers of frameworks' file and tensor names take off their beginnings.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <system_error>

namespace ptc {

/// Takes `begin` off the front; false: it is not there.
inline bool take_text(std::string_view& text, std::string_view begin) {
  if (!text.starts_with(begin)) return false;
  text.remove_prefix(begin.size());
  return true;
}

/// Takes all digits off the front; nullopt: there are none, or it is too large a number.
inline std::optional<uint32_t> take_digits(std::string_view& text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace ptc
