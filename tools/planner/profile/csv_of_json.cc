// The same table as JSON. Its values are taken from the text again, since Boost.JSON does not tell
// where they stand; what it accepts has a plain shape by then: an array of objects of scalars.
#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr std::string_view kShape =
    "it must be an array of objects, one a row: [{\"model\": …}, …]";

/// Tokens of a text that is JSON of that shape, with their places.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) {}

  /// Passes over whatever has no meaning here; '\0': there is no more.
  char next() {
    while (at_ < text_.size() && std::string_view(" \t\r\n,:").find(text_[at_]) != kNone) step();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  Csv::Place place() const { return {line_, column_}; }
  void step() {
    const auto byte = static_cast<unsigned char>(text_[at_++]);
    if (byte == '\n') ++line_, column_ = 1;
    else if ((byte & 0xC0) != 0x80) ++column_;  // as json_place() counts
  }
  /// A text with its quotes, or whatever else stands between two separators.
  std::string_view take() {
    const size_t begin = at_;
    if (text_[at_] == '"') {
      for (step(); at_ < text_.size() && text_[at_] != '"'; step())
        if (text_[at_] == '\\') step();
      step();
    } else {
      while (at_ < text_.size() && std::string_view(" \t\r\n,:]}").find(text_[at_]) == kNone)
        step();
    }
    return text_.substr(begin, at_ - begin);
  }

 private:
  static constexpr size_t kNone = std::string_view::npos;
  const std::string_view text_;
  size_t at_ = 0;
  uint32_t line_ = 1, column_ = 1;
};

/// Names the first that is no row, or no field.
Result<> check_shape(std::string_view text, const json::value& value) {
  if (!value.is_array()) return invalid_argument("{}: {}", json_place(text, {}), kShape);
  size_t number = 0;
  for (const json::value& row : value.get_array()) {
    const std::string at = std::to_string(number++);
    if (!row.is_object()) return invalid_argument("{}: {}", json_place(text, {at}), kShape);
    for (const auto& member : row.get_object())
      if (!member.value().is_string() && !member.value().is_number() && !member.value().is_null())
        return invalid_argument("{}: {} must be a text or a number",
                                json_place(text, {at, std::string(member.key())}),
                                ptc::quoted(member.key()));
  }
  return ok();
}

}  // namespace

bool Csv::is_json(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin != std::string_view::npos && (text[begin] == '[' || text[begin] == '{');
}

Result<uint32_t> Csv::add_column(std::string title, Place place) {
  const auto [known, is_new] =
      by_title_.try_emplace(std::move(title), static_cast<uint32_t>(columns_.size()));
  if (!is_new) return known->second;
  if (columns_.size() == kMostColumns)
    return invalid_argument("{}: line {}: more than {} columns", name_, place.line, kMostColumns);
  columns_.push_back(known->first);
  title_places_.push_back(place);
  return known->second;
}

Result<Csv> Csv::of_json(std::string_view text, std::string name) {
  PTC_TRY(text, as_utf8(text, name));
  constexpr size_t kDeepest = 4;
  Result<json::value> value = parse_json(text, {kMostBytes, kDeepest});
  if (value.has_error()) return std::move(value).error().with_context(name);
  Result<> right = check_shape(text, value.value());
  if (right.has_error()) return std::move(right).error().with_context(name);
  Csv csv;
  csv.name_ = std::move(name);
  Tokens tokens(text);
  tokens.next();
  tokens.step();  // the '['
  // Members stand in an object as they stand in the text.
  for (const json::value& object : value.value().get_array()) {
    tokens.next();
    Row& row = csv.rows_.emplace_back();
    row.otherwise = tokens.place();
    tokens.step();
    row.fields.reserve(object.get_object().size());
    for (const auto& member : object.get_object()) {
      tokens.next();
      PTC_TRY(const uint32_t column, csv.add_column(std::string(member.key()), tokens.place()));
      tokens.take();
      tokens.next();
      const Place place = tokens.place();
      const std::string_view token = tokens.take();
      std::string field;
      if (member.value().is_string()) field = std::string(member.value().get_string());
      else if (member.value().is_number()) field = std::string(token);
      row.fields.push_back({std::move(field), place, column});
    }
    std::sort(row.fields.begin(), row.fields.end(),
              [](const Field& a, const Field& b) { return a.column < b.column; });
    tokens.next();
    tokens.step();  // its '}'
  }
  return csv;
}

}  // namespace ptc::planner
