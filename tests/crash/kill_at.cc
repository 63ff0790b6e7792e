// Preloaded into the daemon: ends it with SIGKILL just before its N-th call that changes a file.
//
//   PTC_KILL_AT=N             which call; 0: none, only count
//   PTC_KILL_COUNT=FILE       8 bytes, mapped: calls so far; survives the kill
//
// Counted: everything by which the daemon, or SQLite in it, makes state durable or visible.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

struct Counter {
  std::atomic<uint64_t>* calls = nullptr;
  uint64_t kill_at = 0;

  Counter() {
    if (const char* at = std::getenv("PTC_KILL_AT")) kill_at = std::strtoull(at, nullptr, 10);
    const char* path = std::getenv("PTC_KILL_COUNT");
    int fd = path != nullptr ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void* memory = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED) calls = static_cast<std::atomic<uint64_t>*>(memory);
  }
};

void count() {
  static Counter counter;
  if (counter.calls == nullptr) return;
  if (counter.calls->fetch_add(1) + 1 == counter.kill_at) kill(getpid(), SIGKILL);
}

}  // namespace

// glibc declares some of these noexcept and some (cancellation points) not.
#define COUNTED(result, name, parameters, arguments, ...)                        \
  extern "C" result name parameters __VA_ARGS__ {                                \
    static auto* real = reinterpret_cast<result(*) parameters>(dlsym(RTLD_NEXT, #name)); \
    count();                                                                     \
    return real arguments;                                                       \
  }

COUNTED(int, fsync, (int fd), (fd))
COUNTED(int, fdatasync, (int fd), (fd))
COUNTED(int, ftruncate, (int fd, off_t size), (fd, size), noexcept)
COUNTED(int, ftruncate64, (int fd, off64_t size), (fd, size), noexcept)
COUNTED(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
COUNTED(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
COUNTED(ssize_t, pwrite, (int fd, const void* data, size_t size, off_t at), (fd, data, size, at))
COUNTED(ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), (fd, data, size, at))
COUNTED(int, rename, (const char* from, const char* to), (from, to), noexcept)
COUNTED(int, renameat, (int a, const char* from, int b, const char* to), (a, from, b, to), noexcept)
COUNTED(int, renameat2, (int a, const char* from, int b, const char* to, unsigned flags),
        (a, from, b, to, flags), noexcept)
COUNTED(int, linkat, (int a, const char* from, int b, const char* to, int flags),
        (a, from, b, to, flags), noexcept)
COUNTED(int, unlink, (const char* path), (path), noexcept)
COUNTED(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags), noexcept)
COUNTED(int, rmdir, (const char* path), (path), noexcept)
COUNTED(int, mkdir, (const char* path, mode_t mode), (path, mode), noexcept)
COUNTED(int, mkdirat, (int fd, const char* path, mode_t mode), (fd, path, mode), noexcept)
COUNTED(int, fchmod, (int fd, mode_t mode), (fd, mode), noexcept)
COUNTED(int, fchmodat, (int fd, const char* path, mode_t mode, int flags), (fd, path, mode, flags), noexcept)
