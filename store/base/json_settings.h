// Files of settings that people write: one JSON object of known keys; every error says its line and
// column.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/json.h"

namespace ptc {

/// What the parsers of such files have in common; each derives from it. Both arguments outlive it.
class JsonSettings {
 protected:
  JsonSettings(std::string_view text, const json::object& object) : text_(text), object_(object) {}

  /// kInvalidArgument: "line 2, column 3: …", where the value at `path` stands.
  Error error(const std::vector<std::string>& path, std::string_view message) const;
  /// Names an unknown key, and the known one that is most like it.
  Result<> check_keys(const std::vector<std::string>& known) const;
  /// Absent: `target` stays as it is.
  template <class Number>
  Result<> number(const std::string& key, uint64_t min, uint64_t max, Number& target) const {
    PTC_TRY(const auto found, whole(key, min, max));
    if (found) target = static_cast<Number>(*found);
    return ok();
  }
  Result<std::optional<std::string_view>> word(const std::string& key) const;

  const std::string_view text_;
  const json::object& object_;

 private:
  Result<std::optional<uint64_t>> whole(const std::string& key, uint64_t min, uint64_t max) const;
};

}  // namespace ptc
