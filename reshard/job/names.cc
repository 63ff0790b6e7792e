#include "reshard/job/names.h"

#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {

bool can_be_file(std::string_view name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string_view::npos;
}

Result<> check_name(std::string_view name, std::string_view what, std::string_view written_in) {
  constexpr size_t kMaxBytes = 255;
  if (!can_be_file(name) || name.size() > kMaxBytes)
    return invalid_argument("'{}' is no name for a {}", name, what);
  if (!is_utf8(name))
    return invalid_argument(
        "the name of the {}, {}, is not UTF-8, and could not be written in {}: rename it", what,
        quoted(name), written_in);
  return ok();
}

std::string_view staged_name(std::string_view incoming) {
  constexpr size_t kBytes = kImportMark.size() + kImportDigits;
  if (incoming.size() <= kBytes) return incoming;
  const std::string_view ending = incoming.substr(incoming.size() - kBytes);
  const bool own = ending.starts_with(kImportMark) &&
                   ending.find_first_not_of("0123456789abcdef", kImportMark.size()) == ending.npos;
  return own ? incoming.substr(0, incoming.size() - kBytes) : incoming;
}

}  // namespace ptc
