#include "tools/ptc/output_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <limits.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc::cli {
namespace {

std::optional<struct stat> status_of(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return std::nullopt;
  return info;
}

bool is_same(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

std::string directory_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

/// The name at the end of symbolic links that lead to nothing yet.
Result<std::string> end_of_links(std::string path) {
  constexpr int kMostLinks = 40;
  for (int i = 0; i < kMostLinks; ++i) {
    std::array<char, PATH_MAX> to{};
    const ssize_t length = ::readlink(path.c_str(), to.data(), to.size());
    if (length < 0) return path;
    const std::filesystem::path next(std::string(to.data(), static_cast<size_t>(length)));
    path = next.is_absolute() ? next.string()
                              : (std::filesystem::path(directory_of(path)) / next).string();
  }
  return errno_error(ELOOP, "opening " + path);
}

/// 1 or 2 for the names of standard output and standard error; else 0.
int named_descriptor(const std::string& path) {
  for (const char* own : {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})
    if (path == own) return STDOUT_FILENO;
  for (const char* own : {"/dev/stderr", "/dev/fd/2", "/proc/self/fd/2"})
    if (path == own) return STDERR_FILENO;
  return 0;
}

/// Writes all of it, also where nothing has a place (a pipe).
Result<> write_all(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, "writing " + path);
    text.remove_prefix(static_cast<size_t>(put));
  }
  return ok();
}

}  // namespace

Result<OutputFile> OutputFile::at(const std::string& path, const std::vector<std::string>& inputs) {
  OutputFile file;
  file.path_ = file.end_ = path;
  file.descriptor_ = named_descriptor(path);
  if (file.descriptor_ != 0) return file;
  if (path.empty()) return invalid_argument("the name of a file to write is missing");
  file.there_ = status_of(path);
  if (!file.there_) {
    if (errno != ENOENT) return errno_error(errno, "opening " + path);
    PTC_TRY(file.end_, end_of_links(path));
    const std::string directory = directory_of(file.end_);
    if (path.ends_with('/') || ::access(directory.c_str(), W_OK | X_OK) != 0)
      return errno_error(path.ends_with('/') ? EISDIR : errno, "writing " + path);
    file.is_replaced_ = true;
    return file;
  }
  const struct stat& there = *file.there_;
  if (S_ISDIR(there.st_mode)) return invalid_argument("{} is a directory", path);
  if (::access(path.c_str(), W_OK) != 0) return errno_error(errno, "writing " + path);
  if (!S_ISREG(there.st_mode)) return file;
  for (const std::string& input : inputs) {
    const auto read = status_of(input);
    if (read && is_same(*read, there))
      return invalid_argument("{} is read, and would be overwritten: name another file to write",
                              path);
  }
  for (const int own : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat info {};
    if (::fstat(own, &info) != 0 || !is_same(info, there)) continue;
    file.descriptor_ = own;
    return file;
  }
  // By such a name whoever has it open means that very file.
  if (path.starts_with("/dev/fd/") || path.starts_with("/proc/")) return file;
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), &std::free);
  if (!real) return errno_error(errno, "opening " + path);
  file.end_ = real.get();
  file.is_replaced_ = true;
  return file;
}

Result<> OutputFile::write(std::string_view text) const {
  if (is_replaced_) return replace(text);
  if (descriptor_ != 0) {
    std::fflush(descriptor_ == STDOUT_FILENO ? stdout : stderr);
    return write_all(descriptor_, text,
                     descriptor_ == STDOUT_FILENO ? "standard output" : "standard error");
  }
  PTC_TRY(const UniqueFd fd, open_file(AT_FDCWD, path_, O_WRONLY | O_TRUNC | O_NOCTTY));
  return write_all(fd.get(), text, path_);
}

Result<> OutputFile::replace(std::string_view text) const {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random)
    return errno_error(errno, "getrandom");
  const std::string directory = directory_of(end_);
  const std::string temporary = fmt::format("{}/.ptc-{:016x}.tmp", directory, random);
  const auto fill = [&](int fd) -> Result<> {
    PTC_TRY(write_all(fd, text, path_));
    if (there_) {
      // Where it belongs to somebody else and cannot be given back, its mode is all that stays.
      (void)!::fchown(fd, there_->st_uid, there_->st_gid);
      if (::fchmod(fd, there_->st_mode & 07777) != 0) return errno_error(errno, "chmod " + path_);
    }
    if (::fsync(fd) != 0) return errno_error(errno, "writing " + path_);
    return ok();
  };
  int reason = 0;
  if (UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      !fd.valid()) {
    reason = errno;
  } else if (Result<> filled = fill(fd.get()); !filled) {
    ::unlink(temporary.c_str());
    return filled;
  } else if (::rename(temporary.c_str(), end_.c_str()) != 0) {
    reason = errno;
    ::unlink(temporary.c_str());
  } else {
    return sync_directory(AT_FDCWD, directory);
  }
  // In a directory that takes no files, or where something is mounted on this one, it can still be
  // written into.
  const bool can_stay = reason == EACCES || reason == EPERM || reason == EBUSY || reason == EROFS;
  if (!there_ || !can_stay) return errno_error(reason, "writing " + path_);
  PTC_TRY(const UniqueFd fd, open_file(AT_FDCWD, end_, O_WRONLY | O_TRUNC));
  return write_all(fd.get(), text, path_);
}

}  // namespace ptc::cli
