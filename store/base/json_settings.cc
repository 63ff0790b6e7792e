#include "store/base/json_settings.h"

#include <algorithm>

namespace ptc {

Error JsonSettings::error(const std::vector<std::string>& path, std::string_view message) const {
  return invalid_argument("{}: {}", json_place(text_, path), message);
}

Result<> JsonSettings::check_keys(const std::vector<std::string>& known) const {
  for (const auto& member : object_) {
    const std::string key(member.key());
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const auto nearest = nearest_name(key, known);
    return invalid_argument(
        "{}: unknown key {}{}", json_place(text_, {key}, JsonPart::kKey), ptc::quoted(key),
        nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : std::string());
  }
  return ok();
}

Result<std::optional<uint64_t>> JsonSettings::whole(const std::string& key, uint64_t min,
                                                    uint64_t max) const {
  const json::value* value = object_.if_contains(key);
  if (!value) return std::optional<uint64_t>();
  const std::optional<uint64_t> found = whole_number(*value);
  if (!found || *found < min || *found > max)
    return error({key}, fmt::format("'{}' must be a whole number from {} to {}", key, min, max));
  return found;
}

Result<std::optional<std::string_view>> JsonSettings::word(const std::string& key) const {
  const json::value* value = object_.if_contains(key);
  if (!value) return std::optional<std::string_view>();
  if (!value->is_string()) return error({key}, fmt::format("'{}' must be a text", key));
  return std::optional<std::string_view>(std::string_view(value->get_string()));
}

}  // namespace ptc
