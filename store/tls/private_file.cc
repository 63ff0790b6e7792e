#include "store/tls/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <span>

#include "store/base/file.h"

namespace ptc {

Result<std::string> read_private_file(const std::string& path, size_t limit) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, "fstat of " + path);
  if (!S_ISREG(info.st_mode)) return invalid_argument("{} is not a regular file", path);
  if ((info.st_mode & 077) != 0)
    return invalid_argument("others than its owner may use {} (mode {:o}): chmod 600 it", path,
                            info.st_mode & 07777);
  if (static_cast<uint64_t>(info.st_size) > limit)
    return invalid_argument("{} has {} bytes, more than {}", path, info.st_size, limit);
  std::string text(static_cast<size_t>(info.st_size), '\0');
  PTC_TRY(read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0));
  return text;
}

}  // namespace ptc
