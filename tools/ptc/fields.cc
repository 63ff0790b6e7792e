#include "tools/ptc/fields.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

namespace ptc::cli {

std::string text_field(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->get_string()) : "";
}

uint64_t number_field(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) return 0;
  if (value->is_uint64()) return value->get_uint64();
  if (value->is_int64()) return value->get_int64() > 0 ? value->get_int64() : 0;
  return value->is_double() && value->get_double() > 0 ? value->get_double() : 0;
}

double real_field(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) return 0;
  if (value->is_double()) return value->get_double();
  if (value->is_int64()) return static_cast<double>(value->get_int64());
  if (value->is_uint64()) return static_cast<double>(value->get_uint64());
  return 0;
}

bool bool_field(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_bool() && value->get_bool();
}

const json::object& object_field(const json::object& object, std::string_view key) {
  static const json::object empty;
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_object() ? value->get_object() : empty;
}

const json::array& array_field(const json::object& object, std::string_view key) {
  static const json::array empty;
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_array() ? value->get_array() : empty;
}

bool has_object(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_object();
}

std::vector<std::string> text_list(const json::array& array) {
  std::vector<std::string> list;
  for (const json::value& value : array) {
    if (value.is_string()) list.emplace_back(value.get_string());
  }
  return list;
}

}  // namespace ptc::cli
