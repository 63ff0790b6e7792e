#include "store/tls/followed_files.h"

#include <sys/stat.h>

namespace ptc {

std::string stamp_of_files(const std::vector<std::string>& paths) {
  std::string stamp;
  for (const std::string& path : paths) {
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0)
      stamp += fmt::format("{}:{}:{}.{}", info.st_ino, info.st_size, info.st_mtim.tv_sec,
                           info.st_mtim.tv_nsec);
    stamp += ' ';
  }
  return stamp;
}

}  // namespace ptc
