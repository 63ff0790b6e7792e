#include "tools/planner/profile/csv.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

constexpr size_t kMostCsvBytes = 64 << 20, kMostColumns = 4096;

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
  if (text.size() > kMostCsvBytes) return invalid_argument("{}: it has more than 64 MiB", name);
  PTC_TRY(text, as_utf8(text, name));
  Csv csv;
  csv.name_ = std::move(name);
  bool has_header = false;
  size_t line = 1, at = 0;
  while (at < text.size()) {
    Row row{line, {}, {}};
    const size_t begin = at;
    for (bool more = true; more;) {
      row.places.push_back(at - begin + 1);
      std::string field;
      bool is_quoted = false;
      if (at < text.size() && text[at] == '"') {
        const size_t from = line;
        is_quoted = true;
        for (++at;; ++at) {
          if (at == text.size())
            return invalid_argument("{}: line {}, column {}: a quote that does not end", csv.name_,
                                    from, row.places.back());
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
      row.fields.emplace_back(is_quoted ? std::string_view(field) : trimmed(field));
      more = at < text.size() && text[at] == ',';
      if (more) ++at;
    }
    if (row.fields.size() > kMostColumns)
      return invalid_argument("{}: line {}: more than {} columns", csv.name_, row.line,
                              kMostColumns);
    if (at < text.size() && text[at] == '\r') ++at;
    if (at < text.size() && text[at] == '\n') ++at;
    ++line;
    if (row.fields.size() == 1 && row.fields.front().empty()) continue;
    if (!has_header) {
      has_header = true;
      csv.columns_ = std::move(row.fields);
      PTC_TRY(csv.check_header(row.line));
      for (size_t i = 0; i < csv.columns_.size(); ++i)
        if (!csv.columns_[i].empty() && csv.column(csv.columns_[i]) != i)
          return invalid_argument("{}: line {}, column {}: a second column {}", csv.name_, row.line,
                                  row.places[i], ptc::quoted(csv.columns_[i]));
      continue;
    }
    while (row.fields.size() > csv.columns_.size() && row.fields.back().empty())
      row.fields.pop_back();
    if (row.fields.size() > csv.columns_.size())
      return invalid_argument(
          "{}: line {}, column {}: the header has {} column{}, and this is one more", csv.name_,
          row.line, row.places[csv.columns_.size()], csv.columns_.size(),
          csv.columns_.size() == 1 ? "" : "s");
    row.fields.resize(csv.columns_.size());
    row.places.resize(csv.columns_.size(), at - begin);
    csv.rows_.push_back(std::move(row));
  }
  if (!has_header)
    return invalid_argument("{}: it is empty: the first line names the columns", csv.name_);
  return csv;
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
  const auto found = std::find(columns_.begin(), columns_.end(), title);
  if (found == columns_.end()) return std::nullopt;
  return static_cast<size_t>(found - columns_.begin());
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
      "{}: line 1: there is no column '{}'{}", name_, title,
      like ? fmt::format(" (is it {}? rename it)", ptc::quoted(*like)) : std::string());
}

Error Csv::error(size_t row, size_t column, std::string_view message) const {
  return invalid_argument("{}: line {}, column {} ({}): {}", name_, rows_[row].line,
                          rows_[row].places[column], columns_[column], message);
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
