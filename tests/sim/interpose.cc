// The functions of libc by which threads start, wait, read clocks, draw random bytes, and change
// files. In a program they come before libc's own. Called by a thread of the scheduler they are
// its; by any other, libc's.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <set>

#include "tests/sim/scheduler.h"

namespace ptc::sim {
namespace {

// 2026-01-01: what the clock on the wall says at time 0. Far from all times since start, so that a
// deadline tells by itself which of the clocks it is of.
constexpr Time kWallAtStart = std::chrono::seconds(1767225600);
constexpr Time kWallAtLeast = kWallAtStart / 2;  // with any offset
Time wall() { return now() + kWallAtStart + wall_offset(); }

// libc's own. Not a static that is guarded: of two threads that meet there one may be none of the
// scheduler's yet, and what this one waits for, the other would tell the scheduler.
#define PTC_REAL(name)                                                           \
  ([] {                                                                          \
    static constinit std::atomic<void*> of_libc{nullptr};                        \
    void* known = of_libc.load(std::memory_order_relaxed);                       \
    if (known == nullptr)                                                        \
      of_libc.store(known = dlsym(RTLD_NEXT, #name), std::memory_order_relaxed); \
    return reinterpret_cast<decltype(&::name)>(known);                           \
  }())

Time time_of(const timespec& time) {
  return std::chrono::seconds(time.tv_sec) + Time(time.tv_nsec);
}
Time deadline_of(const timespec& time) {
  const Time read = time_of(time);
  return read >= kWallAtLeast ? read - kWallAtStart - wall_offset() : read;
}
timespec timespec_of(Time time) {
  return {static_cast<time_t>(time.count() / 1'000'000'000),
          static_cast<long>(time.count() % 1'000'000'000)};
}
bool is_simulated(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_REALTIME_COARSE ||
         clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME || clock == CLOCK_MONOTONIC_RAW;
}
bool is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

void lock(pthread_mutex_t* mutex) {
  while (real_mutex_trylock(mutex) == EBUSY) wait(mutex, std::nullopt, "for a mutex");
}

int wait_for(pthread_cond_t* condition, pthread_mutex_t* mutex, std::optional<Time> deadline) {
  // Nobody runs between the two: what is signalled after the unlock is not missed.
  PTC_REAL(pthread_mutex_unlock)(mutex);
  wake(mutex, SIZE_MAX);
  const bool woken =
      wait(condition, deadline, deadline ? "for a condition, with a deadline" : "for a condition");
  lock(mutex);
  return woken ? 0 : ETIMEDOUT;
}

// Started and not joined or detached yet; touched by the thread that runs alone.
std::map<pthread_t, Thread*>& started() {
  static auto* const threads = new std::map<pthread_t, Thread*>;
  return *threads;
}
Thread* take_started(pthread_t id) {
  auto found = started().find(id);
  if (found == started().end()) return nullptr;
  Thread* thread = found->second;
  started().erase(found);
  return thread;
}

/// Whether the call may go on; else errno says why not.
bool may_change_files(FileCall call) {
  const int reason = managed() ? file_call(call) : 0;
  if (reason != 0) errno = reason;
  return reason == 0;
}

struct Start {
  Thread* thread;
  void* (*function)(void*);
  void* argument;
};
void* begin(void* given) {
  std::unique_ptr<Start> start(static_cast<Start*>(given));
  void* result = nullptr;
  run_thread(start->thread, [&] { result = start->function(start->argument); });
  return result;
}

std::set<pthread_once_t*>& running_once() {
  static auto* const controls = new std::set<pthread_once_t*>;
  return *controls;
}

long simulated_futex(uint32_t* word, int operation, uint32_t value, const timespec* timeout) {
  const int kind = operation & FUTEX_CMD_MASK;
  if (kind == FUTEX_WAKE || kind == FUTEX_WAKE_BITSET) return static_cast<long>(wake(word, value));
  if (kind != FUTEX_WAIT && kind != FUTEX_WAIT_BITSET) {
    errno = ENOSYS;
    return -1;
  }
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) {
    errno = EAGAIN;
    return -1;
  }
  std::optional<Time> deadline;
  if (timeout != nullptr)
    deadline = kind == FUTEX_WAIT ? now() + time_of(*timeout) : deadline_of(*timeout);
  if (wait(word, deadline, "for a futex")) return 0;
  errno = ETIMEDOUT;
  return -1;
}

}  // namespace

int real_mutex_trylock(void* mutex) {
  return PTC_REAL(pthread_mutex_trylock)(static_cast<pthread_mutex_t*>(mutex));
}

long raw_futex(uint32_t* word, int operation, uint32_t value) {
  return PTC_REAL(syscall)(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

}  // namespace ptc::sim

using namespace ptc::sim;

extern "C" {

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!managed()) return PTC_REAL(pthread_mutex_lock)(mutex);
  maybe_yield();
  lock(mutex);
  return 0;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int result = PTC_REAL(pthread_mutex_unlock)(mutex);
  if (managed()) wake(mutex, SIZE_MAX);
  return result;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!managed()) return PTC_REAL(pthread_cond_wait)(condition, mutex);
  return wait_for(condition, mutex, std::nullopt);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  if (!managed()) return PTC_REAL(pthread_cond_timedwait)(condition, mutex, until);
  return wait_for(condition, mutex, deadline_of(*until));
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  if (!managed()) return PTC_REAL(pthread_cond_clockwait)(condition, mutex, clock, until);
  return wait_for(condition, mutex, deadline_of(*until));
}

int pthread_cond_signal(pthread_cond_t* condition) {
  if (!managed()) return PTC_REAL(pthread_cond_signal)(condition);
  wake(condition, 1);
  return 0;
}

int pthread_cond_broadcast(pthread_cond_t* condition) {
  if (!managed()) return PTC_REAL(pthread_cond_broadcast)(condition);
  wake(condition, SIZE_MAX);
  return 0;
}

int pthread_create(pthread_t* id, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) {
  if (!managed()) return PTC_REAL(pthread_create)(id, attributes, function, argument);
  auto start = std::make_unique<Start>(Start{add_thread(), function, argument});
  Thread* thread = start->thread;
  const int error = PTC_REAL(pthread_create)(id, attributes, begin, start.get());
  if (error != 0) {
    forget_thread(thread);
    return error;
  }
  (void)start.release();
  started()[*id] = thread;
  maybe_yield();
  return 0;
}

int pthread_join(pthread_t id, void** result) {
  if (!managed()) return PTC_REAL(pthread_join)(id, result);
  if (Thread* thread = take_started(id)) {
    while (!has_ended(thread)) wait(thread, std::nullopt, "for the end of a thread");
    free_thread(thread);
  }
  return PTC_REAL(pthread_join)(id, result);
}

int pthread_detach(pthread_t id) {
  if (managed())
    if (Thread* thread = take_started(id)) free_thread(thread);
  return PTC_REAL(pthread_detach)(id);
}

int pthread_once(pthread_once_t* control, void (*function)()) {
  if (!managed()) return PTC_REAL(pthread_once)(control, function);
  while (running_once().contains(control))
    wait(control, std::nullopt, "for what another does once");
  struct Running {
    explicit Running(pthread_once_t* of) : control(of) { running_once().insert(control); }
    ~Running() {
      running_once().erase(control);
      wake(control, SIZE_MAX);
    }
    pthread_once_t* control;
  } running(control);
  return PTC_REAL(pthread_once)(control, function);
}

int sched_yield() {
  if (!managed()) return PTC_REAL(sched_yield)();
  yield();
  return 0;
}

int clock_gettime(clockid_t clock, timespec* time) {
  if (!managed() || !is_simulated(clock)) return PTC_REAL(clock_gettime)(clock, time);
  *time = timespec_of(is_wall(clock) ? wall() : now());
  return 0;
}

int gettimeofday(timeval* time, void* zone) {
  if (!managed()) return PTC_REAL(gettimeofday)(time, zone);
  const timespec read = timespec_of(wall());
  *time = {read.tv_sec, read.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* result) {
  if (!managed()) return PTC_REAL(time)(result);
  const time_t read = timespec_of(wall()).tv_sec;
  if (result != nullptr) *result = read;
  return read;
}

int nanosleep(const timespec* time, timespec* left) {
  if (!managed()) return PTC_REAL(nanosleep)(time, left);
  wait(nullptr, now() + time_of(*time), "for a time");
  return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (!managed() || !is_simulated(clock))
    return PTC_REAL(clock_nanosleep)(clock, flags, time, left);
  wait(nullptr, (flags & TIMER_ABSTIME) != 0 ? deadline_of(*time) : now() + time_of(*time),
       "for a time");
  return 0;
}

ssize_t getrandom(void* buffer, size_t bytes, unsigned flags) {
  if (!managed()) return PTC_REAL(getrandom)(buffer, bytes, flags);
  auto* at = static_cast<unsigned char*>(buffer);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t value = ptc::sim::random();
    std::memcpy(at + i, &value, std::min<size_t>(8, bytes - i));
  }
  return static_cast<ssize_t>(bytes);
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  return may_change_files(FileCall::kWrite) ? PTC_REAL(pwrite)(fd, bytes, count, offset) : -1;
}

ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) {
  return may_change_files(FileCall::kWrite) ? PTC_REAL(pwritev)(fd, pieces, count, offset) : -1;
}

int posix_fallocate(int fd, off_t offset, off_t length) {
  return may_change_files(FileCall::kWrite) ? PTC_REAL(posix_fallocate)(fd, offset, length) : errno;
}

int ftruncate(int fd, off_t length) {
  return may_change_files(FileCall::kWrite) ? PTC_REAL(ftruncate)(fd, length) : -1;
}

int fsync(int fd) { return may_change_files(FileCall::kSync) ? PTC_REAL(fsync)(fd) : -1; }

int rename(const char* from, const char* to) {
  return may_change_files(FileCall::kRename) ? PTC_REAL(rename)(from, to) : -1;
}

int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return may_change_files(FileCall::kRename) ? PTC_REAL(renameat)(from_dir, from, to_dir, to) : -1;
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  return may_change_files(FileCall::kRename)
             ? PTC_REAL(renameat2)(from_dir, from, to_dir, to, flags)
             : -1;
}

// std::future, std::atomic::wait, semaphores and statics of functions wait by it.
long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& argument : a) argument = va_arg(list, long);
  va_end(list);
  if (managed() && number == SYS_futex)
    return simulated_futex(reinterpret_cast<uint32_t*>(a[0]), static_cast<int>(a[1]),
                           static_cast<uint32_t>(a[2]), reinterpret_cast<const timespec*>(a[3]));
  return PTC_REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"
