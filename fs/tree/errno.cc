#include "fs/tree/errno.h"

namespace ptc {

int to_errno(const Error& error) {
  if (error.errno_value() != 0) return error.errno_value();
  switch (error.code()) {
    case Code::kInvalidArgument:
      return EINVAL;
    case Code::kNotFound:
      return ENOENT;
    case Code::kAlreadyExists:
      return EEXIST;
    case Code::kBusy:
      return EBUSY;
    case Code::kConflict:
      return EAGAIN;
    case Code::kNoSpace:
      return ENOSPC;
    case Code::kPermissionDenied:
      return EACCES;
    case Code::kReadOnly:
      return EROFS;
    case Code::kUnavailable:
      return EIO;
    case Code::kCorrupt:
      return EIO;
    case Code::kCancelled:
      return EINTR;
    case Code::kInternal:
      return EIO;
    case Code::kInDoubt:
      return EAGAIN;
  }
  return EIO;
}

int to_errno_of_decision(const Error& error) {
  // kPermissionDenied without a system call: a peer or etcd did not let this node in, which is no
  // right of the caller's.
  const bool away = error.code() == Code::kUnavailable || error.code() == Code::kPermissionDenied;
  return away && error.errno_value() == 0 ? EAGAIN : to_errno(error);
}

FsResult<> as_decided(const Result<>& result) {
  if (!result) return Errno{to_errno_of_decision(result.error())};
  return ok();
}

}  // namespace ptc
