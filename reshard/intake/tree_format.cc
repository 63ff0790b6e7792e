#include "reshard/intake/tree_format.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "store/base/file.h"

namespace ptc {

Result<std::vector<std::string>> names_in(int dir_fd, const std::string& path) {
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  DIR* dir = fdopendir(fd.release());
  if (dir == nullptr) return errno_error(errno, path);
  std::vector<std::string> names;
  errno = 0;
  while (dirent* entry = readdir(dir)) {
    std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int reason = errno;
  closedir(dir);
  if (reason != 0) return errno_error(reason, "reading " + path);
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<std::vector<std::string>> NamesThere::in(const std::string& name) const {
  auto names = names_in(dir_fd_, name);
  if (names.has_error()) return std::nullopt;
  return std::move(names).value();
}

bool NamesThere::has(const std::string& path) const {
  struct stat st {};
  return fstatat(dir_fd_, path.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0;
}

bool NamesThere::has_file(const std::string& path) const {
  struct stat st {};
  return fstatat(dir_fd_, path.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
}

Error TreeFormat::without_rest(std::string_view path) const {
  return make_error(Code::kInternal, "{} is no part of {}", path, name());
}

Result<> TreeFormat::read(const FileReader&, std::vector<Found>&, Executor&,
                          std::stop_token) const {
  return make_error(Code::kInternal, "{} is read by others", name());
}

std::span<const TreeFormat* const> tree_formats() {
  // The first that says that it has a tree, or reads it, does: the last is for what is left.
  static const TreeFormat* const rows[] = {&megatron_trees(), &deepspeed_trees(),
                                           &safetensors_sets(), &dcp_trees(), &plain_files()};
  return rows;
}

const TreeFormat* tree_of_part(std::string_view path) {
  return find_tree([&](const TreeFormat& tree) { return tree.is_part(path); });
}

bool is_read_later(std::string_view path) {
  return find_tree([&](const TreeFormat& tree) { return tree.is_read_later(path); }) != nullptr;
}

}  // namespace ptc
