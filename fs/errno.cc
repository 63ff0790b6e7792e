#include "fs/errno.h"

namespace ptc {

int to_errno(const Error& error) {
  if (error.errno_value() != 0) return error.errno_value();
  switch (error.code()) {
    case Code::kInvalidArgument: return EINVAL;
    case Code::kNotFound: return ENOENT;
    case Code::kAlreadyExists: return EEXIST;
    case Code::kBusy: return EBUSY;
    case Code::kConflict: return EAGAIN;
    case Code::kNoSpace: return ENOSPC;
    case Code::kPermissionDenied: return EACCES;
    case Code::kReadOnly: return EROFS;
    case Code::kUnavailable: return EIO;
    case Code::kCorrupt: return EIO;
    case Code::kCancelled: return EINTR;
    case Code::kInternal: return EIO;
  }
  return EIO;
}

}  // namespace ptc
