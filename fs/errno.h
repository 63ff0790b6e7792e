// What a file-system operation answers: a value, or the errno the kernel passes on.
#pragma once

#include <cerrno>
#include <utility>

#include "store/base/error.h"

namespace ptc {

struct [[nodiscard]] Errno {
  int value;
};

/// A T, or an errno. PTC_TRY works with it as with Result; the two mix only through as_fs().
template <class T = void>
using FsResult = BOOST_OUTCOME_V2_NAMESPACE::basic_result<
    T, Errno, BOOST_OUTCOME_V2_NAMESPACE::policy::terminate>;

/// Error::errno_value() where a system call failed, otherwise what the code stands for.
int to_errno(const Error& error);

inline Errno last_errno() { return Errno{errno}; }

/// Leaves the message behind: for callers whose user sees an errno and nothing else.
template <class T>
FsResult<T> as_fs(Result<T> result) {
  if (!result) return Errno{to_errno(result.error())};
  if constexpr (std::is_void_v<T>) {
    return ok();
  } else {
    return std::move(result).value();
  }
}

}  // namespace ptc
