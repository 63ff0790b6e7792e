#include "tools/planner/profile/input.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <vector>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc::planner {
namespace {

/// Text without a mark: of two bytes each the one that is zero in Latin letters.
bool has_zeros(std::string_view text, size_t from) {
  const size_t looked_at = std::min<size_t>(text.size(), 64);
  if (looked_at < 4) return false;
  for (size_t i = from; i + 1 < looked_at; i += 2)
    if (text[i] != '\0') return false;
  return true;
}

/// The one that is meant: by its spelling, or because it is the only one that contains the word.
std::optional<std::string> meant(std::string_view word, const std::vector<std::string>& known) {
  if (auto near = nearest_name(word, known)) return near;
  std::optional<std::string> found;
  for (const std::string& one : known) {
    if (word.size() < 2 || one.find(word) == std::string::npos) continue;
    if (found) return std::nullopt;
    found = one;
  }
  return found;
}

}  // namespace

std::string counted(uint64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

bool has_a_place(const std::string& path) {
  struct stat info {};
  return path != "-" && !path.starts_with("/dev/") && !path.starts_with("/proc/") &&
         ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

std::string input_name(const std::string& path) { return path == "-" ? "standard input" : path; }

Result<std::string> read_input(const std::string& path, size_t most) {
  UniqueFd opened;
  int fd = STDIN_FILENO;
  if (path != "-") {
    PTC_TRY(opened, open_file(AT_FDCWD, path, O_RDONLY));
    fd = opened.get();
  }
  struct stat info {};
  if (::fstat(fd, &info) == 0 && S_ISDIR(info.st_mode))
    return invalid_argument("{} is a directory", path);
  std::string text;
  for (;;) {
    // One byte more than allowed is asked for, so that what is too long shows.
    const size_t room = std::min<size_t>(most + 1 - text.size(), 64 << 10), before = text.size();
    text.resize(before + room);
    const ssize_t got = ::read(fd, text.data() + before, room);
    if (got < 0 && errno != EINTR) return errno_error(errno, "reading " + input_name(path));
    text.resize(before + (got > 0 ? static_cast<size_t>(got) : 0));
    if (text.size() > most)
      return invalid_argument("{} is longer than {} bytes, the most that is read", input_name(path),
                              most);
    if (got == 0) return text;
  }
}

Result<std::string_view> as_utf8(std::string_view text, const std::string& name) {
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  const bool is_marked = text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff");
  if (is_marked || has_zeros(text, 0) || has_zeros(text, 1)) {
    const char* which = is_marked ? "UTF-16" : has_zeros(text, 1) ? "UTF-16LE" : "UTF-16BE";
    return invalid_argument("{}: it is {}, and must be UTF-8: iconv -f {} -t UTF-8 makes it so",
                            name, which, which);
  }
  size_t line = 1;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t length = utf8_character(rest);
    if (length == 0)
      return invalid_argument(
          "{}: line {}: it is not UTF-8, Latin-1 perhaps: iconv -f LATIN1 -t UTF-8 makes it so",
          name, line);
    line += rest.front() == '\n';
    rest.remove_prefix(length);
  }
  return text;
}

std::string some_of(const std::set<std::string>& names, size_t most) {
  std::string text;
  size_t said = 0;
  for (const std::string& name : names) {
    if (said == most) {
      text += fmt::format(" and {} more", names.size() - said);
      break;
    }
    text += (said++ == 0 ? "" : ", ") + ptc::quoted(name);
  }
  return text;
}

std::string what_there_is(std::string_view word, const std::set<std::string>& known, size_t most) {
  if (known.empty()) return "";
  const auto like = meant(word, {known.begin(), known.end()});
  return (like ? fmt::format(" (did you mean {}?)", ptc::quoted(*like)) : std::string()) +
         "; there " + (known.size() == 1 ? "is " : "are ") + some_of(known, most);
}

}  // namespace ptc::planner
