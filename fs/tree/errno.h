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
using FsResult =
    BOOST_OUTCOME_V2_NAMESPACE::basic_result<T, Errno,
                                             BOOST_OUTCOME_V2_NAMESPACE::policy::terminate>;

/// Error::errno_value() where a system call failed, otherwise what the code stands for.
int to_errno(const Error& error);

/// The same of something that is decided with the other nodes. EAGAIN where these, or what they
/// agree through, cannot be asked: nothing has happened, and later it may.
int to_errno_of_decision(const Error& error);

/// Of a rename whose source was looked at and refused. Not EINVAL, which mv(1) reports as a move
/// into "a subdirectory of itself".
inline constexpr int kRenameRefused = ECANCELED;
inline Errno of_rename(Errno error) {
  return error.value == EINVAL ? Errno{kRenameRefused} : error;
}

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

/// As as_fs(), of something that is decided with the other nodes.
FsResult<> as_decided(const Result<>& result);

}  // namespace ptc
