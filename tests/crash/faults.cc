// Preloaded into the daemon: at the N-th point something befalls it.
//
// A point is the moment before a call by which the daemon, or SQLite in it, makes state durable or
// visible, or tells another process or hears from it; a write has a second one, when half of it is
// done. PTC_FAULTS names a file that is mapped: it outlives the daemon, and who tests writes it at
// any time.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

enum Action : uint64_t { kNothing, kSignal, kFailOnce, kFailFromHereOn };

struct Control {
  std::atomic<uint64_t> points;  // passed so far
  std::atomic<uint64_t> at;      // the one where it happens; 0: none
  std::atomic<uint64_t> action;
  std::atomic<uint64_t> argument;  // signal or errno
};

Control* control() {
  static Control* const mapped = []() -> Control* {
    const char* path = std::getenv("PTC_FAULTS");
    int fd = path != nullptr ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return nullptr;
    void* memory = mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? nullptr : static_cast<Control*>(memory);
  }();
  return mapped;
}

/// Of a daemon whose mount another process keeps, only the daemon has points.
bool is_spared() {
  static const bool spared =
      std::getenv("PTC_FAULTS_OF_DAEMON") != nullptr && std::getenv("PTCFS_KEPT") == nullptr;
  return spared;
}
__attribute__((constructor)) void look_early() { (void)is_spared(); }

/// Passes a point: may not return, or returns the errno with which the call shall fail.
int pass() {
  Control* shared = control();
  if (shared == nullptr || is_spared()) return 0;
  const uint64_t point = shared->points.fetch_add(1) + 1, at = shared->at;
  if (at == 0 || point < at) return 0;
  const uint64_t action = shared->action;
  if (point > at && action != kFailFromHereOn) return 0;
  const int argument = static_cast<int>(shared->argument);
  if (action != kSignal) return action == kNothing ? 0 : argument;
  kill(getpid(), argument);
  return 0;
}

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

template <class Result>
Result fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

// glibc declares some of these noexcept and some (cancellation points) not.
#define POINT(result, name, parameters, arguments, ...) \
  extern "C" result name parameters __VA_ARGS__ {       \
    static auto* real = next(&name, #name);             \
    if (int error = pass()) return fail<result>(error); \
    return real arguments;                              \
  }

POINT(int, fsync, (int fd), (fd))
POINT(int, fdatasync, (int fd), (fd))
POINT(int, ftruncate, (int fd, off_t size), (fd, size), noexcept)
POINT(int, ftruncate64, (int fd, off64_t size), (fd, size), noexcept)
POINT(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
POINT(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
POINT(ssize_t, sendfile, (int out, int in, off_t* at, size_t size), (out, in, at, size), noexcept)
POINT(ssize_t, send, (int fd, const void* data, size_t size, int flags), (fd, data, size, flags))
POINT(ssize_t, sendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags))
POINT(ssize_t, recv, (int fd, void* data, size_t size, int flags), (fd, data, size, flags))
POINT(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags))
POINT(int, rename, (const char* from, const char* to), (from, to), noexcept)
POINT(int, renameat, (int a, const char* from, int b, const char* to), (a, from, b, to), noexcept)
POINT(int, renameat2, (int a, const char* from, int b, const char* to, unsigned flags),
      (a, from, b, to, flags), noexcept)
POINT(int, linkat, (int a, const char* from, int b, const char* to, int flags),
      (a, from, b, to, flags), noexcept)
/// A request that no daemon survives.
extern "C" int symlinkat(const char* text, int fd, const char* path) noexcept {
  static auto* real = next(&symlinkat, "symlinkat");
  if (control() != nullptr && std::strcmp(text, "what the daemon dies of") == 0) std::abort();
  if (int error = pass()) return fail<int>(error);
  return real(text, fd, path);
}
POINT(int, unlink, (const char* path), (path), noexcept)
POINT(int, unlinkat, (int fd, const char* path, int flags), (fd, path, flags), noexcept)
POINT(int, rmdir, (const char* path), (path), noexcept)
POINT(int, mkdir, (const char* path, mode_t mode), (path, mode), noexcept)
POINT(int, mkdirat, (int fd, const char* path, mode_t mode), (fd, path, mode), noexcept)
POINT(int, fchmod, (int fd, mode_t mode), (fd, mode), noexcept)
POINT(int, fchmodat, (int fd, const char* path, mode_t mode, int flags), (fd, path, mode, flags),
      noexcept)

/// Says what is wrong by its value and leaves errno alone.
extern "C" int posix_fallocate(int fd, off_t at, off_t size) {
  static auto* real = next(&posix_fallocate, "posix_fallocate");
  if (int error = pass()) return error;
  return real(fd, at, size);
}
extern "C" int posix_fallocate64(int fd, off64_t at, off64_t size) {
  return posix_fallocate(fd, at, size);
}

#define WRITE_POINTS(name, offset_type)                                                        \
  extern "C" ssize_t name(int fd, const void* data, size_t size, offset_type at) {             \
    static auto* real = next(&name, #name);                                                    \
    if (int error = pass()) return fail<ssize_t>(error);                                       \
    const size_t half = size / 2;                                                              \
    ssize_t begun = half == 0 ? 0 : real(fd, data, half, at);                                  \
    if (begun < 0) return begun;                                                               \
    if (int error = pass()) return fail<ssize_t>(error);                                       \
    ssize_t rest = real(fd, static_cast<const char*>(data) + begun, size - begun, at + begun); \
    return rest < 0 ? rest : begun + rest;                                                     \
  }

WRITE_POINTS(pwrite, off_t)
WRITE_POINTS(pwrite64, off64_t)
