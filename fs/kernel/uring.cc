#include "fs/kernel/uring.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace ptc {
namespace {

constexpr size_t kSubmissionBytes = 128;  // room for a command's own

}  // namespace

Uring::~Uring() {
  if (rings_ != nullptr) ::munmap(rings_, rings_bytes_);
  if (submissions_ != nullptr) ::munmap(submissions_, submissions_bytes_);
  if (file_ >= 0) ::close(file_);
}

Result<> Uring::open(unsigned submissions, unsigned completions) {
  io_uring_params params = {};
  // Nothing runs in a thread unless it asks for completions: no signal, no interrupted call.
  params.flags = IORING_SETUP_SQE128 | IORING_SETUP_CQSIZE | IORING_SETUP_SINGLE_ISSUER |
                 IORING_SETUP_DEFER_TASKRUN;
  params.cq_entries = std::max(completions, submissions);
  file_ = static_cast<int>(::syscall(SYS_io_uring_setup, submissions, &params));
  if (file_ < 0) return errno_error(errno, "io_uring");
  auto map = [&](size_t size, off_t what) {
    void* at =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, what);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  };
  rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                          params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  submissions_bytes_ = params.sq_entries * kSubmissionBytes;
  rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
  submissions_ = map(submissions_bytes_, IORING_OFF_SQES);
  if (rings_ == nullptr || submissions_ == nullptr)
    return errno_error(errno, "the memory of an io_uring");
  most_unsent_ = params.sq_entries;
  submitted_ = params.sq_off.tail;
  submit_mask_ = params.sq_off.ring_mask;
  submit_order_ = params.sq_off.array;
  taken_ = params.cq_off.head;
  completed_ = params.cq_off.tail;
  completion_mask_ = params.cq_off.ring_mask;
  completions_ = params.cq_off.cqes;
  return ok();
}

/// The next submission, with nothing in it; it counts as pushed.
io_uring_sqe& Uring::next() {
  if (unsent_ == most_unsent_) (void)enter(/*wait=*/false);
  std::atomic_ref<uint32_t> tail(at(submitted_));
  const uint32_t number = tail.load(std::memory_order_relaxed);
  const uint32_t place = number & at(submit_mask_);
  std::byte* submission = submissions_ + place * kSubmissionBytes;
  std::memset(submission, 0, kSubmissionBytes);
  (&at(submit_order_))[place] = place;
  tail.store(number + 1, std::memory_order_release);  // it is read in enter(), not before
  ++unsent_;
  return *reinterpret_cast<io_uring_sqe*>(submission);
}

void Uring::push(const Command& command) {
  io_uring_sqe& submission = next();
  submission.opcode = IORING_OP_URING_CMD;
  submission.fd = command.file;
  submission.cmd_op = command.operation;
  submission.addr = command.address;
  submission.len = command.length;
  submission.user_data = command.tag;
  std::memcpy(reinterpret_cast<std::byte*>(&submission) + offsetof(io_uring_sqe, cmd),
              command.own.data(), command.own.size());
}

void Uring::push_read(int file, void* to, uint32_t size, uint64_t tag) {
  io_uring_sqe& submission = next();
  submission.opcode = IORING_OP_READ;
  submission.fd = file;
  submission.addr = reinterpret_cast<uint64_t>(to);
  submission.len = size;
  submission.user_data = tag;
}

int Uring::enter(bool wait) {
  const long sent = ::syscall(SYS_io_uring_enter, file_, unsent_, wait ? 1 : 0,
                              wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
  if (sent < 0) return -errno;
  unsent_ -= static_cast<unsigned>(sent);
  return 0;
}

bool Uring::pop(Completion& completion) {
  std::atomic_ref<uint32_t> head(at(taken_)), tail(at(completed_));
  const uint32_t number = head.load(std::memory_order_relaxed);
  if (number == tail.load(std::memory_order_acquire)) return false;
  const auto& done =
      reinterpret_cast<const io_uring_cqe*>(rings_ + completions_)[number & at(completion_mask_)];
  completion = {done.user_data, done.res};
  head.store(number + 1, std::memory_order_release);
  return true;
}

}  // namespace ptc
