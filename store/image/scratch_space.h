// Memory to be handed to the kernel for a while: nameless files of a tmpfs that nobody else sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// A file of memory, mapped. Its pages live until the last descriptor and mapping of it is gone,
/// also after the object is.
class ScratchFile {
 public:
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int fd() const { return fd_.get(); }
  uint64_t bytes() const { return bytes_; }
  std::span<std::byte> memory() { return {memory_, bytes_}; }

  /// Whether nobody but this object has the file open or mapped, through passthrough either: then
  /// its bytes may be written again.
  bool unshared() const;
  /// Gives it another size with memory behind all of it; what its bytes are then, nobody knows. On
  /// an error the file is good for nothing more. kNoSpace.
  Result<> resize(uint64_t bytes);

 private:
  friend class ScratchSpace;
  explicit ScratchFile(UniqueFd fd) : fd_(std::move(fd)) {}
  void unmap();
  UniqueFd fd_;
  uint64_t bytes_ = 0, mapped_bytes_ = 0;
  std::byte* memory_ = nullptr;
};

/// Threads: any.
class ScratchSpace {
 public:
  /// A tmpfs on huge pages, where the kernel has them, of at most `limit_bytes`. It is mounted
  /// nowhere and goes with its last file. Needs CAP_SYS_ADMIN: kPermissionDenied.
  static Result<std::unique_ptr<ScratchSpace>> open(uint64_t limit_bytes);
  /// kNoSpace beyond the limit.
  Result<std::unique_ptr<ScratchFile>> create(uint64_t bytes);

 private:
  explicit ScratchSpace(UniqueFd top) : top_(std::move(top)) {}
  UniqueFd top_;
};

}  // namespace ptc
