#include "store/base/json.h"

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/parser.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <set>

#include "store/base/json_problem.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

/// "line 3, column 7" of the byte at `offset`; columns count characters, not bytes.
std::string place_of_offset(std::string_view text, size_t offset) {
  text = text.substr(0, offset);
  auto line = 1 + std::count(text.begin(), text.end(), '\n');
  size_t line_start = text.rfind('\n');
  if (line_start != std::string_view::npos) text.remove_prefix(line_start + 1);
  auto column =
      1 + std::count_if(text.begin(), text.end(), [](char c) {
        return (static_cast<unsigned char>(c) & 0xC0) != 0x80;  // not the rest of a UTF-8 character
      });
  return fmt::format("line {}, column {}", line, column);
}

/// Walks text that is known to be JSON, by tokens. Strings and structure only.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  size_t offset() const { return at_; }
  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  void advance() { ++at_; }

  /// To the next byte that is neither space nor ',' nor ':'.
  void skip_filler() { at_ = std::min(text_.find_first_not_of(" \t\r\n,:", at_), text_.size()); }

  /// At a '"': moves past the string and returns it with its quotes.
  std::string_view take_string() {
    size_t begin = at_++;
    while (!at_end() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, text_.size());
    return text_.substr(begin, at_ - begin);
  }

  /// At a value: moves past it.
  void skip_value() {
    size_t depth = 0;
    do {
      skip_filler();
      char c = peek();
      if (c == '"') {
        take_string();
      } else if (c == '{' || c == '[') {
        ++depth;
        advance();
      } else if (c == '}' || c == ']') {
        --depth;
        advance();
      } else {
        at_ = std::min(text_.find_first_of(" \t\r\n,]}", at_), text_.size());
      }
    } while (depth > 0 && !at_end());
  }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

/// A string token's content with its escapes undone.
std::string decode(std::string_view token) {
  if (token.find('\\') == std::string_view::npos)
    return std::string(token.substr(1, token.size() - 2));
  json::error_code error;
  json::value value = json::parse(json::string_view(token.data(), token.size()), error);
  PTC_CHECK(!error && value.is_string());
  return std::string(value.get_string().c_str(), value.get_string().size());
}

uint64_t count_members(const json::value& value) {
  uint64_t count = 0;
  if (value.is_object()) {
    count = value.get_object().size();
    for (const auto& member : value.get_object()) count += count_members(member.value());
  } else if (value.is_array()) {
    for (const json::value& element : value.get_array()) count += count_members(element);
  }
  return count;
}

uint64_t count_member_colons(std::string_view text) {
  uint64_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ':') {
      ++count;
    } else if (text[i] == '"') {
      for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\' ? 1 : 0;
    }
  }
  return count;
}

/// The error that names the first duplicate key of a text that has one.
Error duplicate_key_error(std::string_view text) {
  struct Level {
    bool is_object;
    std::set<std::string> keys;
  };
  std::vector<Level> levels;
  Scanner scanner(text);
  bool key_next = false;
  for (scanner.skip_filler(); !scanner.at_end(); scanner.skip_filler()) {
    char c = scanner.peek();
    if (c == '{' || c == '[') {
      levels.push_back({c == '{', {}});
      scanner.advance();
    } else if (c == '}' || c == ']') {
      levels.pop_back();
      scanner.advance();
    } else if (key_next && c == '"') {
      size_t place = scanner.offset();
      std::string key = decode(scanner.take_string());
      if (!levels.back().keys.insert(key).second) {
        return invalid_argument("{}: the key {} is there twice; remove one",
                                place_of_offset(text, place), quoted(key));
      }
      key_next = false;
      continue;
    } else {
      scanner.skip_value();
    }
    key_next = !levels.empty() && levels.back().is_object;
  }
  return invalid_argument("a key is there twice; remove one");
}

bool is_scalar(const json::value& value) { return !value.is_array() && !value.is_object(); }

void append_scalar(std::string& out, const json::value& value) {
  if (!value.is_double()) {
    out += json::serialize(value);
  } else if (!std::isfinite(value.get_double())) {
    out += "null";  // JSON has no other word for it
  } else {
    std::string number = fmt::format("{}", value.get_double());
    if (number.find_first_of(".e") == std::string::npos) number += ".0";
    out += number;
  }
}

constexpr size_t kLineLimit = 100;

/// "[1, 2, 3]", or nothing when the array does not fit on the rest of a line.
std::string one_line(const json::array& array, size_t room) {
  std::string line = "[";
  for (const json::value& element : array) {
    if (!is_scalar(element)) return {};
    if (line.size() > 1) line += ", ";
    append_scalar(line, element);
    if (line.size() + 2 > room) return {};
  }
  return line + "]";
}

void append_pretty(std::string& out, const json::value& value, size_t indent, size_t column) {
  if (is_scalar(value)) return append_scalar(out, value);
  std::string margin(indent + 2, ' ');
  if (value.is_array()) {
    const json::array& array = value.get_array();
    std::string line = one_line(array, kLineLimit - std::min(column, kLineLimit - 20));
    if (!line.empty()) {
      out += line;
      return;
    }
    const char* separator = "[\n";
    for (const json::value& element : array) {
      out += separator + margin;
      append_pretty(out, element, indent + 2, indent + 2);
      separator = ",\n";
    }
    out += "\n" + std::string(indent, ' ') + "]";
    return;
  }
  const json::object& object = value.get_object();
  if (object.empty()) {
    out += "{}";
    return;
  }
  const char* separator = "{\n";
  for (const auto& member : object) {
    std::string key = json::serialize(member.key()) + ": ";
    out += separator + margin + key;
    append_pretty(out, member.value(), indent + 2, indent + 2 + key.size());
    separator = ",\n";
  }
  out += "\n" + std::string(indent, ' ') + "}";
}

/// Edits (insert, delete, change, swap of neighbours) that turn `a` into `b`.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

Result<json::value> parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    return invalid_argument("{} bytes of JSON, but at most {} are read", text.size(),
                            limits.max_bytes);
  json::parse_options options;
  options.max_depth = limits.max_depth;
  json::parser parser(json::storage_ptr{}, options);
  json::error_code error;
  size_t used = parser.write_some(text.data(), text.size(), error);
  if (!error && used < text.size()) error = json::error::extra_data;
  if (error) {
    std::string reason = error == json::error::too_deep
                             ? fmt::format("nested deeper than {}", limits.max_depth)
                             : json_problem(text, used, error);
    return invalid_argument("{}: not valid JSON: {}", place_of_offset(text, used), reason);
  }
  json::value value = parser.release();
  // Boost.JSON keeps the last of equal keys. Then the value has fewer members than the text.
  if (count_members(value) != count_member_colons(text)) return duplicate_key_error(text);
  return value;
}

std::string json_place(std::string_view text, const std::vector<std::string>& path, JsonPart part) {
  Scanner scanner(text);
  scanner.skip_filler();
  size_t place = scanner.offset();
  for (size_t step = 0; step < path.size(); ++step) {
    char open = scanner.peek();
    if (open != '{' && open != '[') break;
    scanner.advance();
    bool found = false;
    for (size_t index = 0;; ++index) {
      scanner.skip_filler();
      size_t begin = scanner.offset();
      if (scanner.at_end() || scanner.peek() == '}' || scanner.peek() == ']') break;
      found = open == '[' ? path[step] == std::to_string(index)
                          : path[step] == decode(scanner.take_string());
      scanner.skip_filler();
      if (found) {
        bool want_key = part == JsonPart::kKey && step + 1 == path.size();
        place = want_key ? begin : scanner.offset();
        break;
      }
      scanner.skip_value();
    }
    if (!found) break;
  }
  return place_of_offset(text, place);
}

std::optional<uint64_t> whole_number(const json::value& value) {
  if (value.is_uint64()) return value.get_uint64();
  if (value.is_int64() && value.get_int64() >= 0) return static_cast<uint64_t>(value.get_int64());
  return std::nullopt;
}

std::string json_text(const json::object& object, std::string_view key) {
  const json::value* text = object.if_contains(key);
  return text != nullptr && text->is_string() ? std::string(text->get_string()) : "";
}

std::string json_text(std::string_view object, std::string_view key) {
  Result<json::value> parsed = parse_json(object);
  return parsed.has_value() && parsed.value().is_object()
             ? json_text(parsed.value().get_object(), key)
             : "";
}

Result<std::optional<uint64_t>> json_uint(const json::object& object, std::string_view key,
                                          uint64_t max) {
  const json::value* value = object.if_contains(json::string_view(key.data(), key.size()));
  if (value == nullptr) return std::optional<uint64_t>();
  std::optional<uint64_t> number = whole_number(*value);
  if (!number || *number > max) {
    return invalid_argument("{} must be a whole number from 0 to {}, not {}", quoted(key), max,
                            is_scalar(*value) ? json::serialize(*value) : "a list or an object");
  }
  return number;
}

std::string quoted(std::string_view text) {
  constexpr size_t kMost = 200;
  return "'" + printable(text, kMost) + "'";
}

std::optional<std::string> nearest_name(std::string_view word,
                                        const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 64;
  if (word.size() > kLongest) return std::nullopt;
  std::optional<std::string> nearest;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kLongest) continue;
    size_t distance = edit_distance(word, candidate);
    if (distance < least && distance < std::max(word.size(), candidate.size())) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string pretty_json(const json::value& value) {
  std::string out;
  append_pretty(out, value, 0, 0);
  return out + "\n";
}

}  // namespace ptc
