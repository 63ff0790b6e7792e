#include "tools/planner/profile/csv.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "store/base/json.h"
#include "store/base/utf8.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr size_t kMostOfATitle = 200;

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

}  // namespace

std::string plain_title(std::string_view title) {
  std::string plain;
  for (const char c : trimmed(title)) {
    if (c >= 'A' && c <= 'Z') plain += static_cast<char>(c - 'A' + 'a');
    else plain += c == ' ' || c == '-' ? '_' : c;
  }
  return plain;
}

Result<Csv> Csv::parse(std::string_view text, std::string name) {
  if (text.size() > kMostBytes) return invalid_argument("{}: it has more than 64 MiB", name);
  PTC_TRY(text, as_utf8(text, name));
  Csv csv;
  csv.name_ = std::move(name);
  bool has_header = false;
  uint32_t line = 1;
  size_t at = 0;
  while (at < text.size()) {
    Row row;
    const uint32_t row_line = line;
    const size_t begin = at;
    const auto here = [&] { return Place{row_line, static_cast<uint32_t>(at - begin + 1)}; };
    for (bool more = true; more;) {
      const Place place = here();
      std::string field;
      bool is_quoted = false;
      if (at < text.size() && text[at] == '"') {
        const uint32_t from = line;
        is_quoted = true;
        for (++at;; ++at) {
          if (at == text.size())
            return invalid_argument("{}: line {}, column {}: a quote that does not end", csv.name_,
                                    from, place.column);
          line += text[at] == '\n';
          if (text[at] != '"') field += text[at];
          else if (at + 1 < text.size() && text[at + 1] == '"') field += text[++at];
          else break;
        }
        ++at;
      }
      const size_t end = std::min(text.find_first_of(",\r\n", at), text.size());
      field += text.substr(at, end - at);
      at = end;
      row.fields.push_back({std::string(is_quoted ? std::string_view(field) : trimmed(field)),
                            place, static_cast<uint32_t>(row.fields.size())});
      more = at < text.size() && text[at] == ',';
      if (more) ++at;
    }
    if (row.fields.size() > kMostColumns)
      return invalid_argument("{}: line {}: more than {} columns", csv.name_, row_line,
                              kMostColumns);
    row.otherwise = here();
    if (at < text.size() && text[at] == '\r') ++at;
    if (at < text.size() && text[at] == '\n') ++at;
    ++line;
    if (row.fields.size() == 1 && row.fields.front().text.empty()) continue;
    if (!has_header) {
      has_header = true;
      for (Field& field : row.fields) {
        const bool is_new = csv.by_title_.try_emplace(field.text, field.column).second;
        csv.columns_.push_back(std::move(field.text));
        csv.title_places_.push_back(field.place);
        if (!is_new && !csv.columns_.back().empty())
          return invalid_argument("{}: line {}, column {}: a second column {}", csv.name_, row_line,
                                  field.place.column, ptc::quoted(csv.columns_.back()));
      }
      PTC_TRY(csv.check_header(row_line));
      continue;
    }
    while (row.fields.size() > csv.columns_.size() && row.fields.back().text.empty())
      row.fields.pop_back();
    if (row.fields.size() > csv.columns_.size())
      return invalid_argument(
          "{}: line {}, column {}: the header has {} column{}, and this is one more", csv.name_,
          row_line, row.fields[csv.columns_.size()].place.column, csv.columns_.size(),
          csv.columns_.size() == 1 ? "" : "s");
    csv.rows_.push_back(std::move(row));
  }
  if (!has_header)
    return invalid_argument("{}: it is empty: the first line names the columns", csv.name_);
  return csv;
}

const Csv::Field* Csv::find(size_t row, size_t column) const {
  const std::vector<Field>& fields = rows_[row].fields;
  if (column < fields.size() && fields[column].column == column) return &fields[column];
  const auto found =
      std::lower_bound(fields.begin(), fields.end(), column,
                       [](const Field& field, size_t wanted) { return field.column < wanted; });
  return found != fields.end() && found->column == column ? &*found : nullptr;
}

const std::string& Csv::at(size_t row, size_t column) const {
  static const std::string kNothing;
  const Field* field = find(row, column);
  return field != nullptr ? field->text : kNothing;
}

Csv::Place Csv::place(size_t row, size_t column) const {
  const Field* field = find(row, column);
  return field != nullptr ? field->place : rows_[row].otherwise;
}

Result<> Csv::check_header(size_t line) const {
  if (columns_.front().starts_with('#'))
    return invalid_argument(
        "{}: line {}: it begins with '#': the first line names the columns, and none is a comment",
        name_, line);
  if (columns_.size() > 1) return ok();
  for (const auto& [c, what] : {std::pair(';', "';'"), {'\t', "tabs"}})
    if (columns_.front().find(c) != std::string::npos)
      return invalid_argument("{}: line {}: its columns are separated by {}, and must be by commas",
                              name_, line, what);
  return ok();
}

std::optional<size_t> Csv::column(std::string_view title) const {
  const auto found = by_title_.find(title);
  if (found == by_title_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string> Csv::like_title(std::string_view title) const {
  for (const std::string& one : columns_)
    if (plain_title(one) == title) return one;
  if (auto near = nearest_name(title, columns_)) return near;
  for (const std::string& one : columns_)
    if (plain_title(one).find(title) != std::string::npos) return one;
  return std::nullopt;
}

Result<size_t> Csv::needed(std::string_view title) const {
  if (const auto found = column(title)) return *found;
  const auto like = like_title(title);
  return invalid_argument(
      "{}: line {}: there is no column '{}'{}", name_,
      title_places_.empty() ? 1 : title_places_.front().line, title,
      like ? fmt::format(" (is it {}? rename it)", ptc::quoted(*like)) : std::string());
}

Error Csv::error(size_t row, size_t column, std::string_view message) const {
  const Place at = place(row, column);
  return invalid_argument("{}: line {}, column {} ({}): {}", name_, at.line, at.column,
                          printable(columns_[column], kMostOfATitle), message);
}

Result<double> Csv::number(size_t row, size_t column) const {
  const std::string& text = at(row, column);
  double value = 0;
  const auto [end, error_code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error_code != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    return error(row, column,
                 text.empty() ? "a number is missing" : ptc::quoted(text) + " is no number");
  return value;
}

Result<uint64_t> Csv::whole(size_t row, size_t column, uint64_t least, uint64_t most) const {
  PTC_TRY(const double value, number(row, column));
  if (value != std::floor(value) || value < static_cast<double>(least) ||
      value > static_cast<double>(most))
    return error(row, column,
                 fmt::format("{} is no whole number from {} to {}", ptc::quoted(at(row, column)),
                             least, most));
  return static_cast<uint64_t>(value);
}

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos && trimmed(text) == text)
    return std::string(text);
  std::string field = "\"";
  for (const char c : text) {
    if (c == '"') field += '"';
    field += c;
  }
  return field + '"';
}

}  // namespace ptc::planner
