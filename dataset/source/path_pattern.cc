#include "dataset/source/path_pattern.h"

#include <dirent.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <optional>

#include "dataset/source/caught.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMostPaths = 1'000'000;

struct Braces {
  size_t begin, end;                    // of '{' and '}'
  std::vector<std::string_view> parts;  // between them, separated by ',' of this level
};

/// The first braces that close again.
std::optional<Braces> first_braces(std::string_view text) {
  for (size_t begin = text.find('{'); begin != text.npos; begin = text.find('{', begin + 1)) {
    Braces found{begin, 0, {}};
    size_t depth = 1, part = begin + 1;
    for (size_t at = begin + 1; at < text.size() && found.end == 0; ++at) {
      if (text[at] == '{') ++depth;
      if (text[at] == '}') --depth;
      if (depth == 0 || (depth == 1 && text[at] == ',')) {
        found.parts.push_back(text.substr(part, at - part));
        part = at + 1;
      }
      if (depth == 0) found.end = at;
    }
    if (found.end != 0 && (found.parts.size() > 1 || found.parts[0].find("..") != text.npos))
      return found;
  }
  return std::nullopt;
}

/// Numbers whose differences are numbers, too.
std::optional<int64_t> number_of(std::string_view text) {
  constexpr int64_t kEnd = int64_t{1} << 60;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && -kEnd < number && number < kEnd ? std::optional(number) : std::nullopt;
}

bool has_leading_zero(std::string_view number) {
  number.remove_prefix(number.starts_with('-'));
  return number.size() > 1 && number[0] == '0';
}

Error too_long(std::string_view path, size_t bytes) {
  return invalid_argument(
      "{}…: {} bytes are more than a path has (PATH_MAX: {}); name the directory, or several "
      "patterns",
      ptc::quoted(path.substr(0, 100)), bytes, PATH_MAX);
}

}  // namespace

/// Numbers, or letters: "3..12", "3..12..2", "a..e".
struct BracePattern::Range {
  int64_t begin = 0, by = 1;
  uint64_t count = 0;
  size_t width = 0;
  bool letters = false;

  std::string at(uint64_t i) const {
    const int64_t value = begin + static_cast<int64_t>(i) * by;
    return letters ? std::string(1, static_cast<char>(value)) : fmt::format("{:0{}}", value, width);
  }
};

/// One of: a text; alternatives; a range.
struct BracePattern::Piece {
  std::string text;
  std::vector<Sequence> alternatives;
  std::optional<Range> range;
};

class BracePattern::Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {}

  struct Parsed {
    Sequence pieces;
    Size size;
  };
  Result<Parsed> parse(std::string_view text) const {
    Parsed parsed;
    while (const auto braces = first_braces(text)) {
      PTC_TRY(add_text(parsed, text.substr(0, braces->begin)));
      if (braces->parts.size() > 1) {
        PTC_TRY(add_alternatives(parsed, braces->parts));
      } else if (const auto range = range_of(braces->parts[0])) {
        const size_t longest = std::max(range->at(0).size(), range->at(range->count - 1).size());
        PTC_TRY(add(parsed, {.range = range}, {range->count, range->count * longest, longest}));
      } else {
        PTC_TRY(add_text(parsed, text.substr(braces->begin, braces->end + 1 - braces->begin)));
      }
      text.remove_prefix(braces->end + 1);
    }
    PTC_TRY(add_text(parsed, text));
    return parsed;
  }

 private:
  /// nullopt: no range.
  static std::optional<Range> range_of(std::string_view text) {
    const size_t dots = text.find("..");
    if (dots == text.npos) return std::nullopt;
    const std::string_view first = text.substr(0, dots), rest = text.substr(dots + 2);
    const size_t more = std::min(rest.find(".."), rest.size());
    const std::string_view last = rest.substr(0, more);
    const auto step =
        more < rest.size() ? number_of(rest.substr(more + 2)) : std::optional<int64_t>(1);
    auto begin = number_of(first), end = number_of(last);
    const auto letter = [](std::string_view word) {
      return word.size() == 1 && std::isalpha(static_cast<unsigned char>(word[0])) != 0;
    };
    Range range;
    range.letters = letter(first) && letter(last);
    if (range.letters) {
      begin = first[0];
      end = last[0];
    }
    if (!begin || !end || !step) return std::nullopt;
    if (has_leading_zero(first) || has_leading_zero(last))
      range.width = std::max(first.size(), last.size());
    range.begin = *begin;
    range.by = std::max<int64_t>(1, std::abs(*step)) * (*end < *begin ? -1 : 1);
    range.count = static_cast<uint64_t>((*end - *begin) / range.by) + 1;
    return range;
  }

  Result<> add_text(Parsed& parsed, std::string_view text) const {
    return add(parsed, {.text = std::string(text)}, {1, text.size(), text.size()});
  }

  Result<> add_alternatives(Parsed& parsed, const std::vector<std::string_view>& parts) const {
    Piece piece;
    Size all{.count = 0};
    for (const std::string_view part : parts) {
      PTC_TRY(Parsed one, parse(part));
      all = {all.count + one.size.count, all.bytes + one.size.bytes,
             std::max(all.longest, one.size.longest)};
      piece.alternatives.push_back(std::move(one.pieces));
    }
    return add(parsed, std::move(piece), all);
  }

  Result<> add(Parsed& parsed, Piece piece, Size size) const {
    if (size.count > kMostPaths / parsed.size.count) {
      return invalid_argument("{}: stands for more than {} paths; name their directory",
                              ptc::quoted(pattern_), kMostPaths);
    }
    parsed.size = {parsed.size.count * size.count,
                   parsed.size.bytes * size.count + size.bytes * parsed.size.count,
                   parsed.size.longest + size.longest};
    parsed.pieces.push_back(std::move(piece));
    return ok();
  }

  const std::string_view pattern_;
};

/// Writes one path after the other into one text.
class BracePattern::Walk {
 public:
  explicit Walk(const std::function<Result<bool>(const std::string&)>& visit) : visit_(visit) {}

  /// Of `pieces` those from `at` on, then what is behind them.
  struct Rest {
    const Sequence& pieces;
    size_t at;
    const Rest* behind;
  };
  Result<bool> go(const Rest& rest) {
    if (rest.at == rest.pieces.size())
      return rest.behind != nullptr ? go(*rest.behind) : visit_(path_);
    const Piece& piece = rest.pieces[rest.at];
    const Rest next{rest.pieces, rest.at + 1, rest.behind};
    const size_t before = path_.size();
    if (piece.range) {
      for (uint64_t i = 0; i < piece.range->count; ++i) {
        PTC_TRY(const bool more, with(piece.range->at(i), next, before));
        if (!more) return false;
      }
      return true;
    }
    if (piece.alternatives.empty()) return with(piece.text, next, before);
    for (const Sequence& one : piece.alternatives) {
      PTC_TRY(const bool more, go({one, 0, &next}));
      if (!more) return false;
    }
    return true;
  }

 private:
  Result<bool> with(const std::string& text, const Rest& next, size_t before) {
    path_ += text;
    auto more = go(next);
    path_.resize(before);
    return more;
  }

  const std::function<Result<bool>(const std::string&)>& visit_;
  std::string path_;
};

Result<> PathBudget::take(uint64_t paths, uint64_t bytes) {
  const PathBudget whole;
  if (paths > paths_ || bytes > bytes_) {
    return invalid_argument(
        "\"shards\" stands for more than {} paths, or for more than {} MiB of them, all together; "
        "name "
        "their directory",
        whole.paths_, whole.bytes_ >> 20);
  }
  paths_ -= paths;
  bytes_ -= bytes;
  return ok();
}

Result<BracePattern> BracePattern::parse(const std::string& pattern) {
  constexpr std::ptrdiff_t kMostBraces = 64;
  if (pattern.size() >= PATH_MAX) return too_long(pattern, pattern.size());
  if (std::count(pattern.begin(), pattern.end(), '{') > kMostBraces)
    return invalid_argument("{}: more than {} braces", ptc::quoted(pattern), kMostBraces);
  PTC_TRY(Parser::Parsed parsed, Parser(pattern).parse(pattern));
  if (parsed.size.longest >= PATH_MAX) return too_long(pattern, parsed.size.longest);
  BracePattern made;
  made.pieces_ = std::make_shared<const Sequence>(std::move(parsed.pieces));
  made.size_ = parsed.size;
  return made;
}

Result<BracePattern> BracePattern::literal(const std::string& path) {
  if (path.size() >= PATH_MAX) return too_long(path, path.size());
  BracePattern made;
  made.pieces_ = std::make_shared<const Sequence>(Sequence{{.text = path}});
  made.size_ = {1, path.size(), path.size()};
  return made;
}

Result<bool> BracePattern::each(
    const std::function<Result<bool>(const std::string&)>& visit) const {
  return Walk(visit).go({*pieces_, 0, nullptr});
}

namespace {

/// Goes through a pattern name by name.
class Matcher {
 public:
  Matcher(const SourceAccess& access, std::vector<std::string> names, bool folders,
          PathBudget& budget, const std::stop_token& stop)
      : access_(access),
        names_(std::move(names)),
        folders_(folders),
        budget_(budget),
        stop_(stop) {}

  Result<std::vector<std::string>> run() {
    PTC_TRY(match("", 0));
    std::sort(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  Result<> match(const std::string& path, size_t at) {
    PTC_TRY(unless_stopped(stop_));
    if (at == names_.size()) {
      if (folders_ && !access_.is_folder(path)) return ok();
      PTC_TRY(budget_.take(1, path.size()));
      found_.push_back(path);
      return ok();
    }
    const bool last = at + 1 == names_.size();
    if (!has_wildcards(names_[at])) {
      const std::string next = path + '/' + names_[at];
      if (last && !access_.exists(next)) return ok();
      return match(next, at + 1);
    }
    auto entries = access_.entries(path.empty() ? "/" : path, stop_);
    if (!entries) {
      if (entries.error().code() == Code::kNotFound) return ok();
      return std::move(entries).error().with_context(ptc::quoted(path) + " cannot be listed");
    }
    for (const FolderEntry& entry : entries.value()) {
      if (::fnmatch(names_[at].c_str(), entry.name.c_str(), FNM_PERIOD) != 0) continue;
      if (!last && entry.type != DT_DIR && entry.type != DT_LNK) continue;
      PTC_TRY(match(path + '/' + entry.name, at + 1));
    }
    return ok();
  }

  const SourceAccess& access_;
  const std::vector<std::string> names_;
  const bool folders_;
  PathBudget& budget_;
  const std::stop_token& stop_;
  std::vector<std::string> found_;
};

}  // namespace

bool has_wildcards(std::string_view pattern) {
  return pattern.find_first_of("*?[") != pattern.npos;
}

Result<std::vector<std::string>> matching_paths(const SourceAccess& access,
                                                const std::string& pattern, PathBudget& budget,
                                                const std::stop_token& stop) {
  std::vector<std::string> names;
  for (size_t at = 0; at < pattern.size();) {
    const size_t end = std::min(pattern.find('/', at), pattern.size());
    if (end > at) names.push_back(pattern.substr(at, end - at));
    at = end + 1;
  }
  PTC_TRY(const ActingAs as, access.act());
  return Matcher(access, std::move(names), pattern.ends_with('/'), budget, stop).run();
}

}  // namespace ptc
