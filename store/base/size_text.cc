#include "store/base/size_text.h"

#include <cctype>

namespace ptc {
namespace {

constexpr std::string_view kUnits = "KMGTPE";

Error bad_size(std::string_view text) {
  return invalid_argument(
      "'{}' is not a size; write a number and a unit of K, M, G, T, P or E, such as 64G or 1.5T",
      text);
}

std::string_view without_spaces(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

Result<uint64_t> parse_size(std::string_view text) {
  using Wide = unsigned __int128;
  std::string_view rest = without_spaces(text);
  Wide digits = 0, scale = 1;
  bool any_digit = false, fraction = false, too_large = false;
  while (!rest.empty() && (std::isdigit(static_cast<unsigned char>(rest.front())) != 0 ||
                           (rest.front() == '.' && !fraction))) {
    char c = rest.front();
    rest.remove_prefix(1);
    if (c == '.') {
      fraction = true;
      continue;
    }
    any_digit = true;
    if (!too_large) digits = digits * 10 + static_cast<Wide>(c - '0');
    too_large = digits >> 64 != 0;
    if (fraction) scale *= 10;
    if (scale > 1'000'000'000'000) return bad_size(text);
  }
  if (!any_digit) return bad_size(text);

  rest = without_spaces(rest);
  uint32_t shift = 0;
  if (!rest.empty()) {
    size_t unit = kUnits.find(static_cast<char>(std::toupper(static_cast<unsigned char>(rest[0]))));
    if (unit != std::string_view::npos) {
      shift = 10 * (static_cast<uint32_t>(unit) + 1);
      rest.remove_prefix(1);
      if (!rest.empty() && rest != "B" && rest != "iB" && rest != "b" && rest != "ib")
        return bad_size(text);
    } else if (rest != "B" && rest != "b") {
      return bad_size(text);
    }
  }
  Wide bytes = (digits << shift) / scale;
  if (too_large || bytes >> 64 != 0)
    return invalid_argument("size '{}' does not fit into 64 bits", text);
  return static_cast<uint64_t>(bytes);
}

std::string format_size(uint64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (value /= 1024; value >= 1023.95 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}iB", value, kUnits[unit]);
}

}  // namespace ptc
