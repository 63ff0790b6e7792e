#include "store/base/decimal.h"

#include <algorithm>
#include <charconv>

namespace ptc {

std::optional<uint64_t> parse_count(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (const size_t last = text.find_last_not_of(kSpace); last != text.npos)
    text = text.substr(0, last + 1);
  uint64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return count;
}

}  // namespace ptc
