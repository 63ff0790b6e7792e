#include "tools/cli/numbers.h"

#include <fmt/format.h>

#include <charconv>
#include <string>

#include "store/base/json.h"

namespace ptc::cli {
namespace {

template <class Number>
CLI::Validator between(const char* what, Number least, Number most) {
  auto check = [=](const std::string& text) -> std::string {
    Number value{};
    const auto [end, bad] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool good = bad == std::errc() && end == text.data() + text.size() && value >= least &&
                      value <= most;  // NaN: no
    return good ? ""
                : fmt::format("{} is not a {} from {} to {}", ptc::quoted(text), what, least, most);
  };
  return CLI::Validator(check, "", "");
}

}  // namespace

CLI::Validator whole_number(uint64_t least, uint64_t most) {
  return between("whole number", least, most);
}
CLI::Validator number(double least, double most) { return between("number", least, most); }

CLI::Validator not_empty() {
  auto check = [](const std::string& text) -> std::string {
    return text.empty() ? "it is empty" : "";
  };
  return CLI::Validator(check, "", "");
}

}  // namespace ptc::cli
