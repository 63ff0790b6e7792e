#include "store/base/error.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ptc {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kAlreadyExists:
      return "already exists";
    case Code::kBusy:
      return "busy";
    case Code::kConflict:
      return "conflict";
    case Code::kNoSpace:
      return "no space";
    case Code::kPermissionDenied:
      return "permission denied";
    case Code::kReadOnly:
      return "read-only";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal error";
    case Code::kInDoubt:
      return "in doubt";
  }
  return "unknown";
}

Error errno_error(int errno_value, std::string_view what) {
  Code code = Code::kInternal;
  switch (errno_value) {
    case EINVAL:
      code = Code::kInvalidArgument;
      break;
    case ENOENT:
    case ENOTDIR:
      code = Code::kNotFound;
      break;
    case EEXIST:
    case ENOTEMPTY:
      code = Code::kAlreadyExists;
      break;
    case EBUSY:
    case ETXTBSY:
      code = Code::kBusy;
      break;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
      code = Code::kNoSpace;
      break;
    case EACCES:
    case EPERM:
      code = Code::kPermissionDenied;
      break;
    case EROFS:
      code = Code::kReadOnly;
      break;
    case EINTR:
    case ECANCELED:
      code = Code::kCancelled;
      break;
    case EIO:
    case ETIMEDOUT:
    case ECONNRESET:
    case EPIPE:
      code = Code::kUnavailable;
      break;
    default:
      break;
  }
  return Error(code, fmt::format("{}: {}", what, std::strerror(errno_value)), errno_value);
}

void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "ptcfs: broken invariant at %s:%d: %s\n", file, line, condition);
  std::abort();
}

}  // namespace ptc
