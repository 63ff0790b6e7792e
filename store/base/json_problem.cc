#include "store/base/json_problem.h"

#include <fmt/format.h>

#include <algorithm>

#include "store/base/file_kind.h"

namespace ptc {

std::string json_problem(std::string_view text, size_t offset,
                         const boost::json::error_code& error) {
  if (const std::string_view kind = other_kind_of(text); !kind.empty()) return std::string(kind);
  if (error == boost::json::error::incomplete) return "the text ends too early";
  const std::string_view read = text.substr(0, offset),
                         left = text.substr(std::min(offset, text.size()));
  const size_t before = read.find_last_not_of(" \t\r\n");
  if ((left.starts_with('}') || left.starts_with(']')) && before != std::string_view::npos &&
      read[before] == ',')
    return fmt::format("the comma before this '{}' is one too many", left.front());
  if (left.starts_with("//") || left.starts_with("/*") || left.starts_with('#'))
    return "JSON has no comments";
  if (error == boost::json::error::extra_data) return "more text after the end";
  return error.message();
}

std::string_view without_json_place(std::string_view message) {
  std::string_view rest = message;
  for (const std::string_view word : {"line ", ", column "}) {
    if (!rest.starts_with(word)) return message;
    rest.remove_prefix(word.size());
    rest.remove_prefix(std::min(rest.find_first_not_of("0123456789"), rest.size()));
  }
  return rest.starts_with(": ") ? rest.substr(2) : message;
}

}  // namespace ptc
