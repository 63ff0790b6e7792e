#include "tools/ptc/text.h"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>

namespace ptc::cli {
namespace {

std::optional<double> seconds_of_time(const json::value& time) {
  if (time.is_double()) return time.get_double();
  if (time.is_int64()) return static_cast<double>(time.get_int64());
  if (time.is_uint64()) return static_cast<double>(time.get_uint64());
  if (!time.is_string()) return std::nullopt;
  std::tm parts{};
  std::string text(time.get_string());
  if (std::sscanf(text.c_str(), "%4d-%2d-%2dT%2d:%2d:%2d", &parts.tm_year, &parts.tm_mon,
                  &parts.tm_mday, &parts.tm_hour, &parts.tm_min, &parts.tm_sec) != 6) {
    return std::nullopt;
  }
  parts.tm_year -= 1900;
  parts.tm_mon -= 1;
  return static_cast<double>(::timegm(&parts));
}

bool is_continuation_byte(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

/// Its first `columns` columns.
std::string beginning(std::string_view text, size_t columns) {
  size_t end = 0;
  for (size_t seen = 0; end < text.size(); ++end) {
    if (!is_continuation_byte(text[end]) && seen++ == columns) break;
  }
  return std::string(text.substr(0, end));
}

}  // namespace

size_t text_width(std::string_view text) {
  return text.size() -
         static_cast<size_t>(std::count_if(text.begin(), text.end(), is_continuation_byte));
}

std::string shortened(std::string_view text, size_t width) {
  if (text_width(text) <= width) return std::string(text);
  std::string_view mark = utf8_terminal() ? "…" : "...";
  size_t keep = width > text_width(mark) ? width - text_width(mark) : 0;
  return beginning(text, keep) + std::string(mark);
}

std::string shortened_in_the_middle(std::string_view text, size_t width) {
  const size_t whole = text_width(text);
  if (whole <= width) return std::string(text);
  const std::string_view mark = utf8_terminal() ? "…" : "...";
  const size_t keep = width > text_width(mark) ? width - text_width(mark) : 0;
  const size_t behind = (keep + 1) / 2;
  const std::string before_end = beginning(text, whole - behind);
  return beginning(text, keep - behind) + std::string(mark) +
         std::string(text.substr(before_end.size()));
}

std::string padded(std::string_view text, size_t width) {
  size_t used = text_width(text);
  return std::string(text) + std::string(used < width ? width - used : 0, ' ');
}

std::string printable(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool c1 = byte == 0xC2 && next >= 0x80 && next < 0xA0;
    out += byte < 0x20 || byte == 0x7F || c1 ? '?' : text[i];
    if (c1) ++i;
  }
  return out;
}

bool utf8_terminal() { return std::string_view(::nl_langinfo(CODESET)) == "UTF-8"; }

size_t terminal_width(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col >= 20) return size.ws_col;
  if (const char* columns = std::getenv("COLUMNS")) {
    size_t value = 0;
    std::string_view text(columns);
    std::from_chars(text.data(), text.data() + text.size(), value);
    if (value >= 20 && value <= 1000) return value;
  }
  return 80;
}

bool is_live_terminal(int fd) {
  const char* term = std::getenv("TERM");
  return ::isatty(fd) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

std::string coloured(std::string_view text, Colour colour, int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  if (!is_live_terminal(fd) || (no_color != nullptr && *no_color != '\0')) return std::string(text);
  const char* code = "0";
  switch (colour) {
    case Colour::kGreen:
      code = "32";
      break;
    case Colour::kYellow:
      code = "33";
      break;
    case Colour::kRed:
      code = "31";
      break;
    case Colour::kBold:
      code = "1";
      break;
    case Colour::kDim:
      code = "2";
      break;
  }
  return fmt::format("\033[{}m{}\033[0m", code, text);
}

std::string format_clock(double seconds) {
  auto whole = static_cast<uint64_t>(std::clamp(std::ceil(seconds), 0.0, 359999.0));
  if (whole >= 3600)
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

std::string format_duration(double seconds) {
  if (seconds < 0.9995) return fmt::format("{:.0f} ms", std::max(0.0, seconds) * 1000);
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  auto whole = static_cast<uint64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  return fmt::format("{} h {} min", whole / 3600, whole / 60 % 60);
}

std::string format_age(const json::value* time) {
  auto then = time == nullptr ? std::nullopt : seconds_of_time(*time);
  if (!then) return "";
  double age = static_cast<double>(std::time(nullptr)) - *then;
  if (age < 1) return "just now";
  if (age < 120) return fmt::format("{:.0f} s", age);
  if (age < 2 * 3600) return fmt::format("{:.0f} min", std::floor(age / 60));
  if (age < 2 * 86400) return fmt::format("{:.0f} h", std::floor(age / 3600));
  return fmt::format("{:.0f} d", std::floor(age / 86400));
}

std::string wrapped(std::string_view text, size_t indent, size_t width) {
  std::string out;
  size_t column = indent;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    std::string word = printable(text.substr(begin, end - begin));
    size_t space = column > indent ? 1 : 0;
    auto next_line = [&] {
      out += '\n' + std::string(indent, ' ');
      column = indent;
      space = 0;
    };
    if (space > 0 && column + space + text_width(word) > width) next_line();
    while (width > indent && text_width(word) > width - indent) {
      const std::string head = beginning(word, width - indent);
      out += head;
      word.erase(0, head.size());
      next_line();
    }
    if (!word.empty()) {
      if (space > 0) out += ' ';
      out += word;
      column += space + text_width(word);
    }
    begin = end + 1;
  }
  return out;
}

void Table::add(std::vector<std::string> row) {
  for (std::string& cell : row) cell = printable(cell);
  rows_.push_back(std::move(row));
}

std::vector<size_t> Table::whole_widths() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(text_width(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], text_width(row[i]));
  }
  return widths;
}

void Table::remove(std::string_view title) {
  const auto found = std::find_if(columns_.begin(), columns_.end(),
                                  [&](const Column& column) { return column.title == title; });
  const auto at = found - columns_.begin();
  columns_.erase(found);
  for (auto& row : rows_)
    if (static_cast<size_t>(at) < row.size()) row.erase(row.begin() + at);
}

std::vector<std::string> Table::narrow(size_t width) {
  std::vector<std::string> gone;
  std::vector<size_t> now = whole_widths();
  const auto least = [&](size_t i) {
    return columns_[i].least == 0 ? now[i] : std::min(now[i], columns_[i].least);
  };
  const auto total = [&] {
    size_t sum = 0;
    for (size_t i = 0; i < now.size(); ++i) sum += least(i) + (i == 0 ? 0 : 2);
    return sum;
  };
  while (total() > width) {
    const auto first =
        std::max_element(columns_.begin(), columns_.end(),
                         [](const Column& a, const Column& b) { return a.goes < b.goes; });
    if (first == columns_.end() || first->goes == 0) break;
    gone.push_back(first->title);
    now.erase(now.begin() + (first - columns_.begin()));
    remove(gone.back());
  }
  size_t used = total();
  for (size_t i = 0; i < now.size(); ++i) {
    size_t room = least(i);
    if (used < width && room < now[i]) {
      const size_t more = std::min(width - used, now[i] - room);
      room += more;
      used += more;
    }
    if (i == 0 && used > width) {
      constexpr size_t kLeastOfNames = 8;
      room -= std::min(used - width, room > kLeastOfNames ? room - kLeastOfNames : 0);
    }
    if (room >= now[i]) continue;
    for (auto& row : rows_)
      if (i < row.size()) row[i] = shortened_in_the_middle(row[i], room);
  }
  return gone;
}

std::string Table::to_string(size_t indent, size_t width) const {
  std::vector<size_t> widths = whole_widths();
  // Texts give way, the longest first; numbers do not. Where that is not enough, the last columns
  // go.
  constexpr size_t kLeast = 6;
  auto least = [&](size_t i) {
    return columns_[i].align == Align::kRight ? widths[i] : std::min(widths[i], kLeast);
  };
  size_t least_total = indent, columns = 0;
  while (columns < widths.size() && least_total + least(columns) <= width)
    least_total += least(columns++) + 2;
  widths.resize(std::max<size_t>(columns, 1));
  size_t total = indent;
  for (size_t column : widths) total += column + 2;
  for (total -= 2; total > width; --total) {
    size_t longest = widths.size();
    for (size_t i = 0; i < widths.size(); ++i) {
      if (columns_[i].align == Align::kRight || widths[i] <= kLeast) continue;
      if (longest == widths.size() || widths[i] > widths[longest]) longest = i;
    }
    if (longest == widths.size()) break;
    --widths[longest];
  }
  std::string out;
  auto add_line = [&](auto cell_at) {
    std::string line(indent, ' ');
    for (size_t i = 0; i < widths.size(); ++i) {
      std::string cell = shortened(cell_at(i), widths[i]);
      size_t fill = widths[i] > text_width(cell) ? widths[i] - text_width(cell) : 0;
      if (columns_[i].align == Align::kRight) line += std::string(fill, ' ') + cell;
      else line += cell + std::string(fill, ' ');
      line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += shortened(line, width) + '\n';
  };
  add_line([&](size_t i) { return columns_[i].title; });
  for (const auto& row : rows_) {
    add_line([&](size_t i) { return i < row.size() ? row[i] : std::string(); });
  }
  return out;
}

}  // namespace ptc::cli
