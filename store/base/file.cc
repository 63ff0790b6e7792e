#include "store/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>
#include <vector>

namespace ptc {
namespace {

std::string parent_of(const std::string& path) {
  size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Result<> write_new_file(int dir_fd, const std::string& path, std::string_view text) {
  PTC_TRY(auto fd, open_file(dir_fd, path, O_WRONLY | O_CREAT | O_EXCL, 0600));
  PTC_TRY(write_exactly(fd.get(), std::as_bytes(std::span(text)), 0));
  if (::fsync(fd.get()) != 0) return errno_error(errno, "fsync " + path);
  return ok();
}

Result<uint64_t> random_number() {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random)
    return errno_error(errno, "getrandom");
  return random;
}

/// A file, or a directory in which nothing is. 0, or why it stays: ENOTEMPTY: something is in it,
/// or it was replaced just now.
int remove_entry(int dir_fd, const char* name) {
  if (::unlinkat(dir_fd, name, 0) == 0 || errno == ENOENT) return 0;
  const int reason = errno;
  if (reason != EISDIR && reason != EPERM) return reason;
  if (::unlinkat(dir_fd, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return 0;
  if (errno == ENOTDIR) return reason == EPERM ? EPERM : ENOTEMPTY;
  return errno == EEXIST ? ENOTEMPTY : errno;
}

/// Calls visit(name) for what is in the directory.
template <class Visit>
Result<> for_each_entry(int dir_fd, const std::string& path, Visit visit) {
  UniqueFd fd(::openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::unique_ptr<DIR, int (*)(DIR*)> stream(fd.valid() ? ::fdopendir(fd.get()) : nullptr,
                                             &::closedir);
  if (!stream) return errno_error(errno, "reading directory " + path);
  (void)fd.release();  // now the stream's
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      if (errno != 0) return errno_error(errno, "reading directory " + path);
      return ok();
    }
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    PTC_TRY(visit(entry->d_name));
  }
}

/// Of a directory that users may have filled, and still change: nested as deeply as they like. So
/// no stack grows with the depth, nor do descriptors: what is in the directories of the top goes,
/// and directories deeper still move up into it, for a next pass. Nothing here ever goes up by
/// "..", or by a path, so that whatever is moved meanwhile leads nowhere else.
class TreeRemoval {
 public:
  TreeRemoval(int top, const std::string& path, uint64_t random)
      : top_(top), path_(path), prefix_(fmt::format(".ptcfs-removed-{:016x}-", random)) {}

  Result<> run() {
    constexpr unsigned kInVain =
        100;  // passes; others change it, or something prevents it for good
    for (unsigned in_vain = 0; in_vain < kInVain;) {
      any_ = done_ = false;
      PTC_TRY(for_each_entry(top_, path_, [this](const char* name) { return remove(name); }));
      if (!any_) return ok();
      in_vain = done_ ? 0 : in_vain + 1;
    }
    return errno_error(ENOTEMPTY, "removing what is in " + path_);
  }

 private:
  Result<> remove(const char* name) {
    any_ = true;
    const int reason = remove_entry(top_, name);
    if (reason != ENOTEMPTY) return removed(reason, name);
    const UniqueFd dir(
        ::openat(top_, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (!dir.valid()) {
      if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return ok();  // replaced just now
      return errno_error(errno, fmt::format("opening {}/{}", path_, name));
    }
    PTC_TRY(for_each_entry(dir.get(), path_ + "/" + name,
                           [&](const char* below) { return remove_or_raise(dir.get(), below); }));
    if (::unlinkat(top_, name, AT_REMOVEDIR) == 0) done_ = true;
    return ok();
  }

  Result<> remove_or_raise(int dir, const char* name) {
    const int reason = remove_entry(dir, name);
    if (reason != ENOTEMPTY) return removed(reason, name);
    const std::string to = fmt::format("{}{}", prefix_, raised_++);
    if (::renameat(dir, name, top_, to.c_str()) == 0) {
      done_ = true;
      return ok();
    }
    switch (errno) {
      case EMLINK:  // of the top's directories the next pass removes some
      case ENOENT:
      case EEXIST:
      case ENOTEMPTY:
      case ENOTDIR:
      case EISDIR:
        return ok();  // somebody else's doing: another name, in the next pass
      default:
        return errno_error(errno, fmt::format("removing {} below {}", name, path_));
    }
  }

  Result<> removed(int reason, const char* name) {
    if (reason != 0) return errno_error(reason, fmt::format("removing {} below {}", name, path_));
    done_ = true;
    return ok();
  }

  const int top_;
  const std::string& path_;
  const std::string prefix_;
  uint64_t raised_ = 0;
  bool any_ = false, done_ = false;  // in this pass: something was there; of that something went
};

}  // namespace

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Result<UniqueFd> open_file(int dir_fd, const std::string& path, int flags, mode_t mode) {
  // Below a directory that is given, O_NOFOLLOW means the whole way: somebody else may own it.
  bool beneath = dir_fd != AT_FDCWD && (flags & O_NOFOLLOW) != 0;
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  for (;;) {
    int fd = beneath
                 ? static_cast<int>(::syscall(SYS_openat2, dir_fd, path.c_str(), &how, sizeof how))
                 : ::openat(dir_fd, path.c_str(), flags | O_CLOEXEC, mode);
    if (fd >= 0) return UniqueFd(fd);
    if (beneath && errno == ENOSYS) {
      beneath = false;  // before Linux 5.6
      continue;
    }
    if (errno == EAGAIN && beneath) continue;  // a rename came between
    if (errno != EINTR) return errno_error(errno, "opening " + path);
  }
}

Result<> read_exactly(int fd, std::span<std::byte> buffer, uint64_t offset) {
  size_t done = 0;
  while (done < buffer.size()) {
    ssize_t got =
        ::pread(fd, buffer.data() + done, buffer.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, fmt::format("reading at byte {}", offset + done));
    if (got == 0) {
      return make_error(Code::kCorrupt, "the file ends at byte {}, but {} bytes at {} are needed",
                        offset + done, buffer.size(), offset);
    }
    done += static_cast<size_t>(got);
  }
  return ok();
}

Result<> write_exactly(int fd, std::span<const std::byte> data, uint64_t offset) {
  size_t done = 0;
  while (done < data.size()) {
    ssize_t put =
        ::pwrite(fd, data.data() + done, data.size() - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, fmt::format("writing at byte {}", offset + done));
    done += static_cast<size_t>(put);
  }
  return ok();
}

Result<> write_exactly(int fd, std::span<const std::span<const std::byte>> pieces,
                       uint64_t offset) {
  std::vector<iovec> left;
  left.reserve(pieces.size());
  for (std::span<const std::byte> piece : pieces)
    if (!piece.empty()) left.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
  for (size_t i = 0; i < left.size();) {
    const size_t count = std::min<size_t>(left.size() - i, IOV_MAX);
    const ssize_t put =
        ::pwritev(fd, &left[i], static_cast<int>(count), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, fmt::format("writing at byte {}", offset));
    offset += static_cast<size_t>(put);
    size_t done = static_cast<size_t>(put);
    while (i < left.size() && done >= left[i].iov_len) done -= left[i++].iov_len;
    if (done > 0)
      left[i] = {static_cast<std::byte*>(left[i].iov_base) + done, left[i].iov_len - done};
  }
  return ok();
}

Result<std::string> read_text_file(int dir_fd, const std::string& path, size_t limit,
                                   FileKind kind) {
  // Not blocking: the name may turn out to be a pipe's.
  PTC_TRY(auto fd, open_file(dir_fd, path,
                             O_RDONLY | O_NONBLOCK | (kind == FileKind::kOwn ? O_NOFOLLOW : 0)));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, "fstat of " + path);
  if (kind == FileKind::kOwn && !S_ISREG(info.st_mode))
    return invalid_argument("{} is no ordinary file", path);
  std::string text;
  for (;;) {
    // One byte more than allowed is asked for, so that a file that is too long shows; files in
    // /proc have no size to ask for first.
    size_t room = std::min<size_t>(limit + 1 - text.size(), 64 << 10);
    size_t old_size = text.size();
    text.resize(old_size + room);
    ssize_t got = ::pread(fd.get(), text.data() + old_size, room, static_cast<off_t>(old_size));
    if (got < 0 && errno != EINTR) return errno_error(errno, "reading " + path);
    text.resize(old_size + (got > 0 ? static_cast<size_t>(got) : 0));
    if (text.size() > limit)
      return invalid_argument("{} is longer than {} bytes, the most that is read", path, limit);
    if (got == 0) return text;
  }
}

Result<> write_file_atomically(int dir_fd, const std::string& path, std::string_view text) {
  PTC_TRY(const uint64_t random, random_number());
  std::string temporary = fmt::format("{}.tmp-{:016x}", path, random);
  Result<> written = write_new_file(dir_fd, temporary, text);
  if (written && ::renameat(dir_fd, temporary.c_str(), dir_fd, path.c_str()) != 0)
    written = errno_error(errno, "renaming a file to " + path);
  if (!written) {
    ::unlinkat(dir_fd, temporary.c_str(), 0);
    return std::move(written).error().with_context("writing " + path);
  }
  return sync_directory(dir_fd, parent_of(path));
}

Result<> make_directory(int dir_fd, const std::string& path, mode_t mode) {
  if (::mkdirat(dir_fd, path.c_str(), mode) == 0) return ok();
  int reason = errno;
  struct stat info {};
  if (reason == EEXIST && ::fstatat(dir_fd, path.c_str(), &info, 0) == 0 && S_ISDIR(info.st_mode))
    return ok();
  return errno_error(reason, "making directory " + path);
}

Result<> remove_tree(int dir_fd, const std::string& path) {
  if (::unlinkat(dir_fd, path.c_str(), 0) == 0 || errno == ENOENT) return ok();
  if (errno != EISDIR && errno != EPERM) return errno_error(errno, "removing " + path);
  PTC_TRY(auto dir, open_file(dir_fd, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  PTC_TRY(const uint64_t random, random_number());
  constexpr int kTries = 100;  // somebody who does not know yet may make a file in it, and another
  for (int tries = 1;; ++tries) {
    PTC_TRY(TreeRemoval(dir.get(), path, random).run());
    if (::unlinkat(dir_fd, path.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT) return ok();
    if ((errno != ENOTEMPTY && errno != EEXIST) || tries == kTries)
      return errno_error(errno, "removing directory " + path);
  }
}

Result<> sync_directory(int dir_fd, const std::string& path) {
  PTC_TRY(auto dir, open_file(dir_fd, path.empty() ? "." : path, O_RDONLY | O_DIRECTORY));
  if (::fsync(dir.get()) != 0) return errno_error(errno, "fsync of directory " + path);
  return ok();
}

Result<bool> lock_file(int fd, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno_error(errno, "flock");
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

}  // namespace ptc
