// Members of JSON objects, read leniently: a missing or odd one reads as 0 or nothing.
#pragma once

#include <cstdint>
#include <string_view>

#include "store/base/json.h"

namespace ptc::planner {

inline uint64_t number_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr ? whole_number(*value).value_or(0) : 0;
}

inline double real_of(const json::object& object, std::string_view key, double otherwise) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_number() ? value->to_number<double>() : otherwise;
}

/// nullptr: there is none.
inline const json::object* object_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_object() ? &value->get_object() : nullptr;
}

}  // namespace ptc::planner
