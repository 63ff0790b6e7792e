// JSON from strangers: parsed by Boost.JSON under limits, with places for messages.
#pragma once

#include <boost/json/value.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

namespace json = boost::json;

struct JsonLimits {
  size_t max_bytes = 1 << 20;
  size_t max_depth = 32;
};

/// Parses one JSON document (RFC 8259, UTF-8). Refuses duplicate keys, which Boost.JSON lets pass.
/// Errors are kInvalidArgument, "line 3, column 7: …".
Result<json::value> parse_json(std::string_view text, const JsonLimits& limits = {});

/// "line 3, column 7" of the value (with kKey: of the last member's key) that `path` leads to in a
/// text that parse_json accepted: {"rules", "0", "axis"}. The innermost part that exists is used.
enum class JsonPart { kValue, kKey };
std::string json_place(std::string_view text, const std::vector<std::string>& path,
                       JsonPart part = JsonPart::kValue);

/// The value if it is a whole number and not negative.
std::optional<uint64_t> whole_number(const json::value& value);

/// A key's value as an unsigned number ≤ max; absent: nullopt; anything else: kInvalidArgument.
Result<std::optional<uint64_t>> json_uint(const json::object& object, std::string_view key,
                                          uint64_t max = UINT64_MAX);

/// The text that the object has under the key; "" where it has none.
std::string json_text(const json::object& object, std::string_view key);
/// The same of an object that is text itself, as far as it is one.
std::string json_text(std::string_view object, std::string_view key);

/// 'text' for a message: control characters as \xNN, at most 200 bytes of it.
std::string quoted(std::string_view text);

/// Of `candidates` the one with the smallest edit distance to `word`, if it is close enough to be
/// meant; for "unknown key 'tpp' (did you mean 'tp'?)".
std::optional<std::string> nearest_name(std::string_view word,
                                        const std::vector<std::string>& candidates);

/// Two-space indented text with a final newline, keys in insertion order.
std::string pretty_json(const json::value& value);

}  // namespace ptc
