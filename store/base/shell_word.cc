#include "store/base/shell_word.h"

namespace ptc {

std::string shell_word(std::string_view text) {
  constexpr std::string_view kSafe =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:@%+=,";
  if (!text.empty() && text.find_first_not_of(kSafe) == std::string_view::npos)
    return std::string(text);
  std::string word = "'";
  for (char c : text) {
    if (c == '\'') word += "'\\''";
    else word += c;
  }
  return word + "'";
}

}  // namespace ptc
