// Files of the local machine: an owned descriptor and the few whole-file operations used here.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "store/base/error.h"

namespace ptc {

/// Owns a file descriptor; closes it. Move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// openat(2) with O_CLOEXEC; the error names `path`. With O_NOFOLLOW and a directory, no component
/// of the path may be a symbolic link, and none may lead out of the directory.
Result<UniqueFd> open_file(int dir_fd, const std::string& path, int flags, mode_t mode = 0600);

/// Reads exactly `buffer.size()` bytes at `offset`; a short file is kCorrupt.
Result<> read_exactly(int fd, std::span<std::byte> buffer, uint64_t offset);
Result<> write_exactly(int fd, std::span<const std::byte> data, uint64_t offset);
/// Pieces that follow each other in the file, in as few calls as there can be.
Result<> write_exactly(int fd, std::span<const std::span<const std::byte>> pieces, uint64_t offset);

/// The whole of a file of at most `limit` bytes; a longer one is kInvalidArgument. kOwn: only an
/// ordinary file that is no symbolic link, for names that somebody else could have put there.
enum class FileKind { kAny, kOwn };
Result<std::string> read_text_file(int dir_fd, const std::string& path, size_t limit,
                                   FileKind kind = FileKind::kAny);

/// Replaces `path` by `text` so that a crash leaves the old or the new content: temporary file,
/// fsync, rename, fsync of the directory.
Result<> write_file_atomically(int dir_fd, const std::string& path, std::string_view text);

Result<> make_directory(int dir_fd, const std::string& path, mode_t mode = 0700);  // exists: ok
/// Removes a tree, however deep; what does not exist is ok. Follows no link; never leaves the tree.
Result<> remove_tree(int dir_fd, const std::string& path);
Result<> sync_directory(int dir_fd, const std::string& path);

/// Takes the exclusive flock(2) of `fd`, which ends with its last descriptor; false when somebody
/// else still has it after `patience`.
Result<bool> lock_file(int fd, std::chrono::milliseconds patience);

}  // namespace ptc
