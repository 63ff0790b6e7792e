#include "dataset/source/own_files.h"

#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <sstream>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr int kMostLinks = 40;  // as the kernel

std::vector<std::string> parts_of(std::string_view path) {
  std::vector<std::string> parts;
  while (!path.empty()) {
    const size_t end = std::min(path.find('/'), path.size());
    if (end > 0) parts.emplace_back(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return parts;
}

/// Undoes "\040" for a space, and the like.
std::string unescaped(std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    auto digit = [&](size_t at) { return text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && i + 3 < text.size() && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
      result.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                         (text[i + 3] - '0')));
      i += 3;
    } else {
      result.push_back(text[i]);
    }
  }
  return result;
}

std::string text_of_mountinfo() {
  std::ifstream file("/proc/self/mountinfo");
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

Error own_file(std::string_view path, std::string_view mount) {
  return invalid_argument(
      "{} lies in {}, which ptcfs shows itself: reading it would wait for ptcfs; keep the shards "
      "on "
      "another file system",
      ptc::quoted(path), ptc::quoted(mount));
}

}  // namespace

OwnFiles::OwnFiles() : OwnFiles(text_of_mountinfo()) {}

OwnFiles::OwnFiles(std::string_view mountinfo) {
  std::istringstream lines{std::string(mountinfo)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word, point, type;
    for (int i = 0; i < 5; ++i) words >> point;
    while (words >> word && word != "-") {
    }
    if (words >> type && type == "fuse.ptcfs") mounts_.push_back(unescaped(point));
  }
}

const std::string* OwnFiles::mount_of(const std::string& path) {
  const std::vector<std::string> named = parts_of(path);
  std::deque<std::string> ahead(named.begin(), named.end());
  std::vector<std::string> behind;  // the directories gone through, whole paths
  std::string at;
  for (int links = 0; !ahead.empty();) {
    const std::string name = std::move(ahead.front());
    ahead.pop_front();
    if (name == ".") continue;
    if (name == "..") {
      at = behind.empty() ? "" : behind.back();
      if (!behind.empty()) behind.pop_back();
      continue;
    }
    const std::string next = at + '/' + name;
    const auto mount = std::find(mounts_.begin(), mounts_.end(), next);
    if (mount != mounts_.end()) return &*mount;
    char target[4096];
    const ssize_t length = ::readlink(next.c_str(), target, sizeof target);
    if (length > 0 && static_cast<size_t>(length) < sizeof target && ++links <= kMostLinks) {
      const std::vector<std::string> more = parts_of({target, static_cast<size_t>(length)});
      ahead.insert(ahead.begin(), more.begin(), more.end());
      if (target[0] != '/') continue;
      at.clear();
      behind.clear();
      continue;
    }
    behind.push_back(at);
    at = next;
  }
  return nullptr;
}

Result<> OwnFiles::refuse(const std::string& path) {
  if (mounts_.empty()) return ok();
  const size_t slash = path.rfind('/');
  const std::string directory = path.substr(0, slash);
  char target;
  const bool known = slash != path.npos && elsewhere_.contains(directory);
  const bool plain = known && ::readlink(path.c_str(), &target, 1) < 0 &&
                     std::find(mounts_.begin(), mounts_.end(), path) == mounts_.end();
  if (plain) return ok();
  if (const std::string* mount = mount_of(path)) return own_file(path, *mount);
  if (mount_of(directory) == nullptr) elsewhere_.insert(directory);
  return ok();
}

Result<> OwnFiles::refuse_pattern(const std::string& pattern) {
  const size_t special = pattern.find_first_of("*?[");
  if (special == pattern.npos) return refuse(pattern);
  PTC_TRY(refuse(pattern.substr(0, pattern.rfind('/', special) + 1)));
  const std::vector<std::string> parts = parts_of(pattern);
  for (const std::string& mount : mounts_) {
    const std::vector<std::string> names = parts_of(mount);
    const bool meets = names.size() <= parts.size() &&
                       std::equal(names.begin(), names.end(), parts.begin(),
                                  [](const auto& name, const auto& part) {
                                    return ::fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) == 0;
                                  });
    if (meets) return own_file(pattern, mount);
  }
  return ok();
}

}  // namespace ptc
