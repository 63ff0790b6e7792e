// Text for people: tables, ages, colours, paragraphs.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/base/json.h"

namespace ptc::cli {

/// Columns a UTF-8 text takes, every code point counted as one.
size_t text_width(std::string_view text);
/// The text's beginning in at most `width` columns, "…" (or "...") for what was cut off.
std::string shortened(std::string_view text, size_t width);
/// The same, cut in its middle.
std::string shortened_in_the_middle(std::string_view text, size_t width);
std::string padded(std::string_view text, size_t width);
/// The text with '?' for each control character: names are users', and a terminal obeys.
std::string printable(std::string_view text);
/// A line of which no part, whoever has given it its name, is more than text.
template <class... Args>
void say_line(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print("{}\n", printable(fmt::format(format, std::forward<Args>(args)...)));
}
/// Whether the locale's characters are UTF-8.
bool utf8_terminal();

/// Columns of the terminal behind `fd`; $COLUMNS, then 80, when there is none.
size_t terminal_width(int fd);
/// Whether to animate and colour: a terminal that is not "dumb".
bool is_live_terminal(int fd);

enum class Colour { kGreen, kYellow, kRed, kBold, kDim };
/// `text` coloured for `fd` if that is a terminal and NO_COLOR is not set.
std::string coloured(std::string_view text, Colour colour, int fd = 1);

/// "0:07", "12:30", "3:04:05".
std::string format_clock(double seconds);
/// "850 ms", "2.1 s", "3 min 20 s", "5 h 10 min".
std::string format_duration(double seconds);
/// "just now", "45 s", "3 min", "2 h", "5 d": how long ago. `time` is ISO 8601 in UTC or seconds
/// since 1970; "" when it is neither.
std::string format_age(const json::value* time);

/// Breaks `text` at spaces into lines of at most `width` columns, all but the first behind
/// `indent` spaces. Only a word that is longer than a line is broken elsewhere.
std::string wrapped(std::string_view text, size_t indent, size_t width);

/// Columns aligned to their widest cell, two spaces between, no trailing spaces.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
    /// For narrow(): 0: it stays, whole; else the higher, the sooner it goes.
    int goes = 0;
    size_t least = 0;  // to how many columns its cells may be cut before anything goes; 0: not
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> row);
  bool empty() const { return rows_.empty(); }
  void remove(std::string_view title);  // of a column that is there
  /// Every line begins with `indent` spaces and has at most `width` columns: where that is too
  /// little, texts are cut, and the last columns of the table left out.
  std::string to_string(size_t indent, size_t width) const;
  /// Makes it fit `width` so that what identifies a row stays whole: columns that may go do, and
  /// their titles are returned. Where that is not enough, the first column gives way too. Texts
  /// lose their middle, as names differ at their ends.
  std::vector<std::string> narrow(size_t width);

 private:
  std::vector<size_t> whole_widths() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ptc::cli
