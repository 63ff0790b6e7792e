// Locks whose use a compiler checks. Data says which mutex guards it, and a function which it
// needs; clang's -Wthread-safety refuses what does otherwise (ctest unit.locks). For GCC these are
// the locks of the standard library, at the same cost.
#pragma once

#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <stop_token>
#include <utility>

#ifdef __clang__
#define PTC_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define PTC_THREAD_ATTRIBUTE(...)
#endif

// Of members: they are read and written with the mutex held (a SharedMutex: read also while it is
// shared); the second of what a pointer, also a smart one, leads to.
#define PTC_GUARDED_BY(mutex) PTC_THREAD_ATTRIBUTE(guarded_by(mutex))
#define PTC_PT_GUARDED_BY(mutex) PTC_THREAD_ATTRIBUTE(pt_guarded_by(mutex))
// Of functions and of lambdas, behind their parameters: the caller holds these, or does not.
#define PTC_REQUIRES(...) PTC_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define PTC_EXCLUDES(...) PTC_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// Of functions that lock or unlock for their caller.
#define PTC_ACQUIRE(...) PTC_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define PTC_ACQUIRE_SHARED(...) PTC_THREAD_ATTRIBUTE(acquire_shared_capability(__VA_ARGS__))
#define PTC_TRY_ACQUIRE(...) PTC_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define PTC_RELEASE(...) PTC_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define PTC_RELEASE_SHARED(...) PTC_THREAD_ATTRIBUTE(release_shared_capability(__VA_ARGS__))
// Of a function that returns a reference to one.
#define PTC_RETURN_CAPABILITY(mutex) PTC_THREAD_ATTRIBUTE(lock_returned(mutex))
// Of functions that are right for a reason that the compiler cannot see, which a comment says.
#define PTC_NO_THREAD_SAFETY_ANALYSIS PTC_THREAD_ATTRIBUTE(no_thread_safety_analysis)
// Of classes.
#define PTC_CAPABILITY(name) PTC_THREAD_ATTRIBUTE(capability(name))
#define PTC_SCOPED_CAPABILITY PTC_THREAD_ATTRIBUTE(scoped_lockable)

namespace ptc {

class PTC_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() PTC_ACQUIRE() { mutex_.lock(); }
  void unlock() PTC_RELEASE() { mutex_.unlock(); }
  bool try_lock() PTC_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class BorrowedLock;
  std::mutex mutex_;
};

class PTC_CAPABILITY("mutex") SharedMutex {
 public:
  SharedMutex() = default;
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;
  void lock() PTC_ACQUIRE() { mutex_.lock(); }
  void unlock() PTC_RELEASE() { mutex_.unlock(); }
  void lock_shared() PTC_ACQUIRE_SHARED() { mutex_.lock_shared(); }
  void unlock_shared() PTC_RELEASE_SHARED() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

/// Holds a mutex to the end of the block.
class PTC_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PTC_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  MutexLock(Mutex& mutex, std::adopt_lock_t) PTC_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() PTC_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// The same, but it may let go of it before, and hold it again.
class PTC_SCOPED_CAPABILITY UniqueLock {
 public:
  explicit UniqueLock(Mutex& mutex) PTC_ACQUIRE(mutex) : lock_(mutex) {}
  ~UniqueLock() PTC_RELEASE() {}
  UniqueLock(const UniqueLock&) = delete;
  UniqueLock& operator=(const UniqueLock&) = delete;
  void lock() PTC_ACQUIRE() { lock_.lock(); }
  void unlock() PTC_RELEASE() { lock_.unlock(); }

 private:
  std::unique_lock<Mutex> lock_;
};

/// The inverse, in a function whose caller holds the mutex: it does not to the end of the block.
class PTC_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) PTC_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~MutexUnlock() PTC_RELEASE() { mutex_.lock(); }  // clang: what the constructor did is undone
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

/// Alone, to the end of the block.
class PTC_SCOPED_CAPABILITY ExclusiveLock {
 public:
  explicit ExclusiveLock(SharedMutex& mutex) PTC_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~ExclusiveLock() PTC_RELEASE() { mutex_.unlock(); }
  ExclusiveLock(const ExclusiveLock&) = delete;
  ExclusiveLock& operator=(const ExclusiveLock&) = delete;

 private:
  SharedMutex& mutex_;
};

/// With others that share it.
class PTC_SCOPED_CAPABILITY SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) PTC_ACQUIRE_SHARED(mutex) : mutex_(mutex) {
    mutex_.lock_shared();
  }
  ~SharedLock() PTC_RELEASE() { mutex_.unlock_shared(); }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;

 private:
  SharedMutex& mutex_;
};

/// What a condition variable unlocks and locks: it is held before and after, whatever is thrown.
class BorrowedLock {
 public:
  explicit BorrowedLock(Mutex& mutex) : lock(mutex.mutex_, std::adopt_lock) {}
  ~BorrowedLock() { lock.release(); }
  std::unique_lock<std::mutex> lock;
};

/// As the standard's; waits with the mutex itself, which some lock of the caller holds. A condition
/// that is given as a lambda needs it too: [&]() PTC_REQUIRES(mutex_) { return ready_; }
template <class Standard>
class BasicConditionVariable {
 public:
  void notify_one() noexcept { standard_.notify_one(); }
  void notify_all() noexcept { standard_.notify_all(); }

  /// (), (condition), and of one that can be stopped (stop token, condition).
  template <class... Rest>
  auto wait(Mutex& mutex, Rest&&... rest) PTC_REQUIRES(mutex) {
    BorrowedLock borrowed(mutex);
    return standard_.wait(borrowed.lock, std::forward<Rest>(rest)...);
  }
  /// (time), (time, condition), (stop token, time, condition).
  template <class... Rest>
  auto wait_for(Mutex& mutex, Rest&&... rest) PTC_REQUIRES(mutex) {
    BorrowedLock borrowed(mutex);
    return standard_.wait_for(borrowed.lock, std::forward<Rest>(rest)...);
  }
  template <class... Rest>
  auto wait_until(Mutex& mutex, Rest&&... rest) PTC_REQUIRES(mutex) {
    BorrowedLock borrowed(mutex);
    return standard_.wait_until(borrowed.lock, std::forward<Rest>(rest)...);
  }

 private:
  Standard standard_;
};

using ConditionVariable = BasicConditionVariable<std::condition_variable>;
using StoppableConditionVariable = BasicConditionVariable<std::condition_variable_any>;

}  // namespace ptc
