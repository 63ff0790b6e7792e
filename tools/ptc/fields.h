// Members of the daemon's JSON answers, read leniently: a missing or odd member reads as its
// default, so that an older `ptc` still shows what it knows of a newer daemon's file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/json.h"

namespace ptc::cli {

std::string text_field(const json::object& object, std::string_view key);
uint64_t number_field(const json::object& object, std::string_view key);
double real_field(const json::object& object, std::string_view key);
bool bool_field(const json::object& object, std::string_view key);
/// An empty object or array when the member is missing, null or of another type.
const json::object& object_field(const json::object& object, std::string_view key);
const json::array& array_field(const json::object& object, std::string_view key);
bool has_object(const json::object& object, std::string_view key);

/// The elements that are strings.
std::vector<std::string> text_list(const json::array& array);

}  // namespace ptc::cli
