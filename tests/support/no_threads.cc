#include "tests/support/no_threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <climits>

namespace {

std::atomic<int> left = INT_MAX, refusals = 0;

}  // namespace

/// In place of libc's, for the shared libraries, too.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*run)(void*), void* argument) {
  static const auto libcs =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (left != INT_MAX && left-- <= 0) {
    ++refusals;
    return EAGAIN;
  }
  return libcs(thread, attributes, run, argument);
}

namespace ptc::testing {

NoThreads::NoThreads(int more) {
  refusals = 0;
  left = more;
}
NoThreads::~NoThreads() { left = INT_MAX; }
int NoThreads::refused() { return refusals; }

}  // namespace ptc::testing
