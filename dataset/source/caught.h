// What work that somebody else chose the size of may end by: it is stopped, or there is no memory
// for it.
#pragma once

#include <cerrno>
#include <exception>
#include <new>
#include <stop_token>

#include "store/base/error.h"

namespace ptc {

/// What `work` returns, a Result; what it throws, as an error: kNoSpace where memory was not
/// enough. For threads, which an exception must not leave.
template <class Work>
auto caught(const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Error(Code::kNoSpace, "out of memory", ENOMEM);
  } catch (const std::exception& error) {
    return Error(Code::kInternal, error.what());
  }
}

/// kCancelled.
inline Result<> unless_stopped(const std::stop_token& stop) {
  if (stop.stop_requested()) return Error(Code::kCancelled, "stopped");
  return ok();
}

}  // namespace ptc
