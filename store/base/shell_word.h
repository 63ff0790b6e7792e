// Words of command lines that users are advised to type.
#pragma once

#include <string>
#include <string_view>

namespace ptc {

/// As one word of a shell's command line: as it is where that is safe, else in single quotes.
std::string shell_word(std::string_view text);

}  // namespace ptc
