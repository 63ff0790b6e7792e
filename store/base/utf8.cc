#include "store/base/utf8.h"

#include <fmt/format.h>

#include <algorithm>

namespace ptc {
namespace {

/// Bytes of the character that `text` begins with; 0 when it is no UTF-8, or a control character.
size_t printable_character(std::string_view text) {
  const size_t length = utf8_character(text);
  const bool control =
      (length == 1 && (static_cast<unsigned char>(text[0]) < 0x20 || text[0] == 0x7F)) ||
      (length == 2 && text[0] == '\xC2' && static_cast<unsigned char>(text[1]) < 0xA0);
  return control ? 0 : length;
}

}  // namespace

size_t utf8_character(std::string_view text) {
  auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  if (text.empty()) return 0;
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF5   ? 0
                        : first >= 0xF0 ? 4
                        : first >= 0xE0 ? 3
                        : first >= 0xC2 ? 2
                                        : 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  const bool long_form = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool no_character = (first == 0xED && second > 0x9F) || (first == 0xF4 && second > 0x8F);
  return long_form || no_character ? 0 : length;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_character(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string printable(std::string_view text, size_t most_bytes) {
  constexpr std::string_view kMore = "…";
  std::string out;
  size_t room_for_more = 0;  // length of `out` where kMore still fits
  while (!text.empty()) {
    const size_t length = printable_character(text);
    if (length > 0) out += text.substr(0, length);
    else out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(std::max<size_t>(length, 1));
    if (out.size() > most_bytes) return out.substr(0, room_for_more).append(kMore);
    if (out.size() + kMore.size() <= most_bytes) room_for_more = out.size();
  }
  return out;
}

}  // namespace ptc
