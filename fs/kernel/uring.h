// One io_uring, as far as a device's commands need it; by system calls, without a library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/base/error.h"

struct io_uring_sqe;

namespace ptc {

/// Threads: the one that opens it, and no other.
class Uring {
 public:
  Uring() = default;
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  /// At most so many submissions at once; there may be any number of completions to come.
  Result<> open(unsigned submissions, unsigned completions);

  /// A command to the file's driver, in the bytes of its own; sent by the next enter(), or by this
  /// where there is no more room. Whatever it points to lasts until its completion.
  struct Command {
    int file;
    uint32_t operation;
    uint64_t address;
    uint32_t length;
    std::span<const std::byte> own;  // at most 80
    uint64_t tag;
  };
  void push(const Command& command);
  void push_read(int file, void* to, uint32_t size, uint64_t tag);

  /// Sends what was pushed; waits for a completion, if asked to. 0 or −errno: −EINTR after a
  /// signal.
  int enter(bool wait);

  struct Completion {
    uint64_t tag;
    int result;
  };
  bool pop(Completion& completion);

 private:
  io_uring_sqe& next();
  uint32_t& at(uint32_t offset) { return *reinterpret_cast<uint32_t*>(rings_ + offset); }

  int file_ = -1;
  std::byte *rings_ = nullptr, *submissions_ = nullptr;
  size_t rings_bytes_ = 0, submissions_bytes_ = 0;
  unsigned unsent_ = 0, most_unsent_ = 0;
  // Where these are in rings_.
  uint32_t submitted_ = 0, submit_mask_ = 0, submit_order_ = 0;
  uint32_t taken_ = 0, completed_ = 0, completion_mask_ = 0, completions_ = 0;
};

}  // namespace ptc
