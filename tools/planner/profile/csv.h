// Tables as text: RFC 4180's commas and quotes, with or without a byte order mark, CRLF or LF; or
// JSON, an array of objects whose keys are the columns.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::planner {

/// One table, read whole. Immutable.
class Csv {
 public:
  static constexpr size_t kMostBytes = 64 << 20, kMostColumns = 4096;
  /// `name` is the file's, for messages: "profiles.csv: line 3, column 7: …". kInvalidArgument: a
  /// quote that does not end, a row that is longer than the header, a column twice, more than
  /// 4096 of them, anything but commas between them, no UTF-8, more than 64 MiB. A shorter row has
  /// empty fields at its end; empty lines are passed over.
  static Result<Csv> parse(std::string_view text, std::string name);
  /// The same of JSON; a column is whatever key some row has, and null is an empty field.
  /// kInvalidArgument: what is no array of objects of texts and numbers.
  static Result<Csv> of_json(std::string_view text, std::string name);
  /// Whether it can only be JSON.
  static bool is_json(std::string_view text);

  const std::string& name() const { return name_; }
  size_t rows() const { return rows_.size(); }
  const std::vector<std::string>& columns() const { return columns_; }
  std::optional<size_t> column(std::string_view title) const;
  /// kInvalidArgument, naming the title that is most like it, when there is none.
  Result<size_t> needed(std::string_view title) const;

  const std::string& at(size_t row, size_t column) const;
  struct Place {
    uint32_t line = 1, column = 1;
  };
  /// Where that stands in the file; where it is missing, the end of the row, or its begin in JSON.
  Place place(size_t row, size_t column) const;
  /// Of its title; in JSON of the first key of this name.
  Place title_place(size_t column) const { return title_places_[column]; }
  /// A finite number; kInvalidArgument names the place otherwise.
  Result<double> number(size_t row, size_t column) const;
  Result<uint64_t> whole(size_t row, size_t column, uint64_t least, uint64_t most) const;
  /// kInvalidArgument: "name: line 3, column 7 (title): message".
  Error error(size_t row, size_t column, std::string_view message) const;

 private:
  Result<> check_header(size_t line) const;
  std::optional<std::string> like_title(std::string_view title) const;

  struct Field {
    std::string text;
    Place place;
    uint32_t column;
  };
  struct Row {
    std::vector<Field> fields;  // by column; empty ones may be missing
    Place otherwise;            // of those
  };
  const Field* find(size_t row, size_t column) const;
  /// The column of this title, a new one if there is none. kInvalidArgument: too many.
  Result<uint32_t> add_column(std::string title, Place place);

  std::string name_;
  std::vector<std::string> columns_;
  std::vector<Place> title_places_;
  std::map<std::string, uint32_t, std::less<>> by_title_;  // the first of each
  std::vector<Row> rows_;
};

/// A title as most write it: "Max GPUs-per node" is max_gpus_per_node.
std::string plain_title(std::string_view title);

/// A field as it stands in a row: quoted where it must be.
std::string csv_field(std::string_view text);

}  // namespace ptc::planner
