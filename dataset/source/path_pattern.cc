#include "dataset/source/path_pattern.h"

#include <dirent.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMostPaths = 1'000'000;

Error too_many(std::string_view pattern) {
  return invalid_argument("{}: stands for more than {} paths; name their directory", ptc::quoted(pattern), kMostPaths);
}

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
    if (found.end != 0 && (found.parts.size() > 1 || found.parts[0].find("..") != text.npos)) return found;
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

/// "3..12", "3..12..2", "a..e"; nullopt: no range.
Result<std::optional<std::vector<std::string>>> range(std::string_view text, std::string_view pattern) {
  using None = std::optional<std::vector<std::string>>;
  const size_t dots = text.find("..");
  if (dots == text.npos) return None();
  const std::string_view first = text.substr(0, dots), rest = text.substr(dots + 2);
  const size_t more = std::min(rest.find(".."), rest.size());
  const std::string_view last = rest.substr(0, more);
  const auto step = more < rest.size() ? number_of(rest.substr(more + 2)) : std::optional<int64_t>(1);
  auto begin = number_of(first), end = number_of(last);
  const auto letter = [](std::string_view word) { return word.size() == 1 && std::isalpha(static_cast<unsigned char>(word[0])) != 0; };
  const bool letters = letter(first) && letter(last);
  if (letters) {
    begin = first[0];
    end = last[0];
  }
  if (!begin || !end || !step) return None();
  const size_t width = has_leading_zero(first) || has_leading_zero(last) ? std::max(first.size(), last.size()) : 0;
  const int64_t by = std::max<int64_t>(1, std::abs(*step)) * (*end < *begin ? -1 : 1);
  const auto count = static_cast<uint64_t>((*end - *begin) / by) + 1;
  if (count > kMostPaths) return too_many(pattern);
  std::vector<std::string> all;
  all.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t value = *begin + static_cast<int64_t>(i) * by;
    all.push_back(letters ? std::string(1, static_cast<char>(value)) : fmt::format("{:0{}}", value, width));
  }
  return None(std::move(all));
}

Result<> expand_into(std::vector<std::string>& all, const std::string& text, std::string_view pattern) {
  constexpr size_t kMostBraces = 64;
  if (std::count(text.begin(), text.end(), '{') > static_cast<std::ptrdiff_t>(kMostBraces))
    return invalid_argument("{}: more than {} braces", ptc::quoted(pattern), kMostBraces);
  const auto braces = first_braces(text);
  if (!braces) {
    if (all.size() == kMostPaths) return too_many(pattern);
    all.push_back(text);
    return ok();
  }
  const std::string before = text.substr(0, braces->begin), behind = text.substr(braces->end + 1);
  std::vector<std::string> middles;
  if (braces->parts.size() > 1) {
    for (const std::string_view part : braces->parts) {
      PTC_TRY(expand_into(middles, std::string(part), pattern));
    }
  } else {
    PTC_TRY(auto values, range(braces->parts[0], pattern));
    if (values) middles = std::move(*values);
    else middles = {text.substr(braces->begin, braces->end + 1 - braces->begin)};
  }
  std::vector<std::string> ends;
  PTC_TRY(expand_into(ends, behind, pattern));
  if (middles.size() > (kMostPaths - all.size()) / ends.size()) return too_many(pattern);
  for (const std::string& middle : middles)
    for (const std::string& end : ends) all.push_back(before + middle + end);
  return ok();
}

/// Goes through a pattern name by name.
class Matcher {
 public:
  Matcher(const SourceAccess& access, std::vector<std::string> names, bool folders)
      : access_(access), names_(std::move(names)), folders_(folders) {}

  Result<std::vector<std::string>> run() {
    PTC_TRY(match("", 0));
    std::sort(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  Result<> match(const std::string& path, size_t at) {
    if (at == names_.size()) {
      if (!folders_ || access_.is_folder(path)) found_.push_back(path);
      return ok();
    }
    const bool last = at + 1 == names_.size();
    if (!has_wildcards(names_[at])) {
      const std::string next = path + '/' + names_[at];
      if (last && !access_.exists(next)) return ok();
      return match(next, at + 1);
    }
    auto entries = access_.entries(path.empty() ? "/" : path);
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
  std::vector<std::string> found_;
};

}  // namespace

bool has_wildcards(std::string_view pattern) { return pattern.find_first_of("*?[") != pattern.npos; }

Result<std::vector<std::string>> expand_braces(const std::string& pattern) {
  std::vector<std::string> all;
  PTC_TRY(expand_into(all, pattern, pattern));
  return all;
}

Result<std::vector<std::string>> matching_paths(const SourceAccess& access, const std::string& pattern) {
  std::vector<std::string> names;
  for (size_t at = 0; at < pattern.size();) {
    const size_t end = std::min(pattern.find('/', at), pattern.size());
    if (end > at) names.push_back(pattern.substr(at, end - at));
    at = end + 1;
  }
  PTC_TRY(const ActingAs as, access.act());
  return Matcher(access, std::move(names), pattern.ends_with('/')).run();
}

}  // namespace ptc
