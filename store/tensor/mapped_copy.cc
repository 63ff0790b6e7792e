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

/// The mapping that a thread reads.
struct Reading {
  sigjmp_buf back;
  uintptr_t source;
  size_t bytes;
};
thread_local Reading* volatile under_way = nullptr;

void on_bus_error(int number, siginfo_t* info, void*) {
  Reading* reading = under_way;
  if (reading != nullptr &&
      reinterpret_cast<uintptr_t>(info->si_addr) - reading->source < reading->bytes)
    siglongjmp(reading->back, 1);
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

/// `read` reads nothing else that could be missing, and owns nothing: it may be left anywhere.
template <class Read>
bool read_mapped(const std::byte* source, size_t bytes, const Read& read) {
  static const bool taken = take_signal();
  (void)taken;
  Reading reading;
  reading.source = reinterpret_cast<uintptr_t>(source);
  reading.bytes = bytes;
  if (sigsetjmp(reading.back, 0) !=
      0) {  // to save the mask of signals each time would be a system call
    under_way = nullptr;
    unblock();
    return false;
  }
  under_way = &reading;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  read();
  std::atomic_signal_fence(std::memory_order_seq_cst);
  under_way = nullptr;
  return true;
}

}  // namespace

bool mapped_copy(std::byte* target, const std::byte* source, size_t bytes, bool past_caches) {
  return read_mapped(source, bytes, [=] {
    if (past_caches) stream_copy(target, source, bytes);
    else std::memcpy(target, source, bytes);
  });
}

bool add_mapped_checksum(std::span<const std::byte> source, uint64_t logical_offset,
                         Checksum& sum) {
  Checksum of_run;
  if (!read_mapped(source.data(), source.size(),
                   [&] { of_run = checksum_of_run(source, logical_offset); }))
    return false;
  sum += of_run;
  return true;
}

}  // namespace ptc
