#include "tools/ptc/event_time.h"

#include <time.h>

#include <charconv>
#include <cmath>
#include <optional>
#include <string>

namespace ptc::cli {
namespace {

constexpr double kNsOfSecond = 1e9;

/// A number that is the whole text.
std::optional<double> number_of(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(number) ||
      number < 0 || number > 1e10)
    return std::nullopt;
  return number;
}

/// So many seconds ago.
std::optional<double> age_of(std::string_view text) {
  if (text.size() < 2) return std::nullopt;
  double unit = 0;
  switch (text.back()) {
    case 's':
      unit = 1;
      break;
    case 'm':
      unit = 60;
      break;
    case 'h':
      unit = 3600;
      break;
    case 'd':
      unit = 86400;
      break;
    default:
      return std::nullopt;
  }
  const auto number = number_of(text.substr(0, text.size() - 1));
  return number ? std::optional(*number * unit) : std::nullopt;
}

/// "+01:00" → 3600; "Z" → 0.
std::optional<long> zone_of(std::string_view text) {
  if (text == "Z" || text == "z") return 0;
  if (text.size() != 6 || (text[0] != '+' && text[0] != '-') || text[3] != ':') return std::nullopt;
  const auto hours = number_of(text.substr(1, 2)), minutes = number_of(text.substr(4, 2));
  if (!hours || !minutes || *hours > 23 || *minutes > 59) return std::nullopt;
  const long seconds = static_cast<long>(*hours) * 3600 + static_cast<long>(*minutes) * 60;
  return text[0] == '-' ? -seconds : seconds;
}

/// Seconds since the epoch.
std::optional<double> date_of(const std::string& text) {
  tm parts = {};
  const char* end = nullptr;
  for (const char* form :
       {"%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"}) {
    parts = {};
    end = ::strptime(text.c_str(), form, &parts);
    if (end != nullptr) break;
  }
  if (end == nullptr) return std::nullopt;
  std::string_view rest(end);
  double fraction = 0;
  if (rest.starts_with('.')) {
    const size_t length = std::min(rest.find_first_not_of("0123456789", 1), rest.size());
    const auto digits = number_of("0" + std::string(rest.substr(0, length)));
    if (!digits) return std::nullopt;
    fraction = *digits;
    rest.remove_prefix(length);
  }
  if (rest.empty()) {
    parts.tm_isdst = -1;  // whatever it was there then
    return static_cast<double>(::mktime(&parts)) + fraction;
  }
  const auto zone = zone_of(rest);
  if (!zone) return std::nullopt;
  return static_cast<double>(::timegm(&parts) - *zone) + fraction;
}

}  // namespace

Result<int64_t> parse_event_time(std::string_view text, int64_t now_ns) {
  if (const auto age = age_of(text)) return now_ns - std::llround(*age * kNsOfSecond);
  if (const auto seconds = number_of(text)) return std::llround(*seconds * kNsOfSecond);
  if (const auto date = date_of(std::string(text))) return std::llround(*date * kNsOfSecond);
  return invalid_argument(
      "'{}' is no time: give an age (90s, 15m, 2h, 7d), a date (2026-01-31), or a time as "
      "2026-01-31T12:00:00 is, with Z or +01:00 for a zone",
      text);
}

}  // namespace ptc::cli
