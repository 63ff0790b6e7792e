// mirror_fs DIR MOUNTPOINT: a FUSE file system, in the foreground, that shows a directory
// read-only. Stopped (SIGSTOP), it is a server that does not answer.
#define FUSE_USE_VERSION 314
#include <dirent.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace {

std::string root;

std::string host_path(const char* path) { return root + path; }

int get_attributes(const char* path, struct stat* stat, fuse_file_info*) {
  return ::lstat(host_path(path).c_str(), stat) == 0 ? 0 : -errno;
}

int list(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*,
         fuse_readdir_flags) {
  DIR* stream = ::opendir(host_path(path).c_str());
  if (stream == nullptr) return -errno;
  while (const dirent* entry = ::readdir(stream))
    fill(buffer, entry->d_name, nullptr, 0, fuse_fill_dir_flags{});
  ::closedir(stream);
  return 0;
}

int open_file(const char* path, fuse_file_info* info) {
  const int fd = ::open(host_path(path).c_str(), info->flags | O_CLOEXEC);
  if (fd < 0) return -errno;
  info->fh = static_cast<uint64_t>(fd);
  return 0;
}

int read_file(const char*, char* out, size_t size, off_t offset, fuse_file_info* info) {
  const ssize_t got = ::pread(static_cast<int>(info->fh), out, size, offset);
  return got >= 0 ? static_cast<int>(got) : -errno;
}

int close_file(const char*, fuse_file_info* info) { return ::close(static_cast<int>(info->fh)); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  root = argv[1];
  fuse_operations operations = {};
  operations.getattr = get_attributes;
  operations.readdir = list;
  operations.open = open_file;
  operations.read = read_file;
  operations.release = close_file;
  char program[] = "mirror_fs", foreground[] = "-f", single[] = "-s";
  char* arguments[] = {program, foreground, single, argv[2], nullptr};
  return fuse_main(4, arguments, &operations, nullptr);
}
