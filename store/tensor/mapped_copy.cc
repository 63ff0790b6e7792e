#include "store/tensor/mapped_copy.h"

#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "store/base/error.h"
#include "store/tensor/stream_copy.h"

namespace ptc {
namespace {

/// The copy that a thread is at.
struct Copy {
  sigjmp_buf back;
  uintptr_t source;
  size_t bytes;
};
thread_local Copy* volatile under_way = nullptr;

void on_bus_error(int number, siginfo_t* info, void*) {
  Copy* copy = under_way;
  if (copy != nullptr && reinterpret_cast<uintptr_t>(info->si_addr) - copy->source < copy->bytes) {
    siglongjmp(copy->back, 1);
  }
  ::signal(number, SIG_DFL);  // what raised it is tried again, and ends the program
}

/// After a jump out of the handler.
void unblock() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGBUS);
  PTC_CHECK(::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr) == 0);
}

bool take_signal() {
  struct sigaction action = {};
  action.sa_sigaction = &on_bus_error;
  action.sa_flags = SA_SIGINFO;
  PTC_CHECK(::sigaction(SIGBUS, &action, nullptr) == 0);
  return true;
}

}  // namespace

bool mapped_copy(std::byte* target, const std::byte* source, size_t bytes, bool past_caches) {
  static const bool taken = take_signal();
  (void)taken;
  Copy copy;
  copy.source = reinterpret_cast<uintptr_t>(source);
  copy.bytes = bytes;
  if (sigsetjmp(copy.back, 0) !=
      0) {  // to save the mask of signals each time would be a system call
    under_way = nullptr;
    unblock();
    return false;
  }
  under_way = &copy;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (past_caches) {
    stream_copy(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  under_way = nullptr;
  return true;
}

}  // namespace ptc
