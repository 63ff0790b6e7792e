// Tables as text: RFC 4180's commas and quotes, with or without a byte order mark, CRLF or LF.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::planner {

/// One table, read whole. Immutable.
class Csv {
 public:
  /// `name` is the file's, for messages: "profiles.csv: line 3, column 7: …". kInvalidArgument: a
  /// quote that does not end, a row that is longer than the header, a column twice, more than
  /// 4096 of them, anything but commas between them, no UTF-8, more than 64 MiB. A shorter row has
  /// empty fields at its end; empty lines are passed over.
  static Result<Csv> parse(std::string_view text, std::string name);

  const std::string& name() const { return name_; }
  size_t rows() const { return rows_.size(); }
  const std::vector<std::string>& columns() const { return columns_; }
  std::optional<size_t> column(std::string_view title) const;
  /// kInvalidArgument, naming the title that is most like it, when there is none.
  Result<size_t> needed(std::string_view title) const;

  const std::string& at(size_t row, size_t column) const { return rows_[row].fields[column]; }
  /// Where that stands in the file, both from 1.
  size_t line_of(size_t row) const { return rows_[row].line; }
  size_t column_of(size_t row, size_t column) const { return rows_[row].places[column]; }
  /// A finite number; kInvalidArgument names the place otherwise.
  Result<double> number(size_t row, size_t column) const;
  Result<uint64_t> whole(size_t row, size_t column, uint64_t least, uint64_t most) const;
  /// kInvalidArgument: "name: line 3, column 7 (title): message".
  Error error(size_t row, size_t column, std::string_view message) const;

 private:
  Result<> check_header(size_t line) const;
  std::optional<std::string> like_title(std::string_view title) const;

  struct Row {
    size_t line;
    std::vector<std::string> fields;
    std::vector<size_t> places;  // of fields, from 1
  };
  std::string name_;
  std::vector<std::string> columns_;
  std::vector<Row> rows_;
};

/// A title as most write it: "Max GPUs-per node" is max_gpus_per_node.
std::string plain_title(std::string_view title);

/// A field as it stands in a row: quoted where it must be.
std::string csv_field(std::string_view text);

}  // namespace ptc::planner
