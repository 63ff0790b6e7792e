// Errors as values: `Result<T>` is a T or an `Error`, and PTC_TRY passes the error up.
//
//   Result<Box> parse(std::string_view text) {
//     PTC_TRY(auto ranges, parse_ranges(text));
//     if (ranges.empty()) return invalid_argument("slice '{}' is empty", text);
//     return to_box(ranges);
//   }
//
// Only this header names Boost.Outcome.
#pragma once

#include <fmt/format.h>

#include <boost/outcome/basic_result.hpp>
#include <boost/outcome/try.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace ptc {

/// What the caller can do about an error. fs/tree/errno.cc maps each to an errno.
enum class Code {
  kInvalidArgument,   // EINVAL: what was asked or given is wrong; mend it and ask again
  kNotFound,          // ENOENT
  kAlreadyExists,     // EEXIST
  kBusy,              // EBUSY: somebody uses it; ask again later
  kConflict,          // EAGAIN: a compare in a transaction failed; read again and decide anew
  kNoSpace,           // ENOSPC
  kPermissionDenied,  // EACCES
  kReadOnly,          // EROFS: immutable by design
  kUnavailable,       // EIO, a peer or the store does not answer; retry may help
  kCorrupt,           // EIO, bytes are not what their checksum says
  kCancelled,         // EINTR: superseded or shut down
  kInternal,          // EIO, an error that should not happen
  kInDoubt,  // EAGAIN: a decision that may or may not have been made; what it was for stays until
             // that is known
};

std::string_view code_name(Code code);

/// A code, and a message for people that says what happened, where, and what to do.
class [[nodiscard]] Error {
 public:
  Error(Code code, std::string message, int errno_value = 0)
      : code_(code), errno_value_(errno_value), message_(std::move(message)) {}

  Code code() const { return code_; }
  /// The errno of the system call that failed, where that is what happened; 0 otherwise.
  int errno_value() const { return errno_value_; }
  const std::string& message() const { return message_; }

  /// The same error with "context: " in front of its message, added as it rises.
  Error with_context(std::string_view context) && {
    message_ = fmt::format("{}: {}", context, message_);
    return std::move(*this);
  }

 private:
  Code code_;
  int errno_value_ = 0;
  std::string message_;
};

template <class T = void>
using Result =
    BOOST_OUTCOME_V2_NAMESPACE::basic_result<T, Error,
                                             BOOST_OUTCOME_V2_NAMESPACE::policy::terminate>;

inline auto ok() { return BOOST_OUTCOME_V2_NAMESPACE::success(); }

template <class... Args>
Error make_error(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return Error(code, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
Error invalid_argument(fmt::format_string<Args...> format, Args&&... args) {
  return Error(Code::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}
/// The error of a failed system call: code from `errno_value`, message "what: strerror".
Error errno_error(int errno_value, std::string_view what);

[[noreturn]] void check_failed(const char* condition, const char* file, int line);

}  // namespace ptc

/// PTC_TRY(expr) or PTC_TRY(auto value, expr): returns the error, or goes on with the value.
#define PTC_TRY(...) BOOST_OUTCOME_TRY(__VA_ARGS__)

/// Aborts when an invariant of the program itself is broken. Never for bad input.
#define PTC_CHECK(condition) \
  ((condition) ? (void)0 : ::ptc::check_failed(#condition, __FILE__, __LINE__))
