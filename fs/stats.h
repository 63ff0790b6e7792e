// What this mount has done and is doing: .ptc/stats, .ptc/requests, .ptc/metrics.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ptc {

enum class Op : uint8_t {
  kLookup, kForget, kGetattr, kSetattr, kReadlink, kMknod, kMkdir, kUnlink, kRmdir, kSymlink,
  kRename, kLink, kOpen, kRead, kWrite, kFlush, kRelease, kFsync, kOpendir, kReaddir, kReleasedir,
  kFsyncdir, kStatfs, kSetxattr, kGetxattr, kListxattr, kRemovexattr, kCreate, kFallocate, kLseek,
};
inline constexpr size_t kOpCount = static_cast<size_t>(Op::kLseek) + 1;
std::string_view op_name(Op op);

/// Counters and the requests in flight. Threads: any; no locks.
class Stats {
 public:
  struct OpCounts {
    uint64_t requests, errors, bytes;
  };
  OpCounts counts(Op op) const;
  void add_bytes(Op op, uint64_t bytes);

  struct Pending {
    Op op;
    uint64_t node;
    uint32_t pid;
    std::chrono::milliseconds age;
  };
  std::vector<Pending> in_flight() const;

 private:
  friend class InFlight;
  struct alignas(64) Counter {
    std::atomic<uint64_t> requests{0}, errors{0}, bytes{0};
  };
  struct alignas(64) Slot {
    std::atomic<int64_t> started_ns{0};  // 0: free
    std::atomic<uint64_t> node{0};
    std::atomic<uint32_t> pid{0};
    std::atomic<Op> op{Op::kLookup};
  };
  std::array<Counter, kOpCount> counters_;
  std::array<Slot, 128> slots_;  // more requests at once than this are counted, not listed
};

/// Counts one request, and lists it while it lives.
class InFlight {
 public:
  InFlight(Stats& stats, Op op, uint64_t node, uint32_t pid);
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
  void failed();

 private:
  Stats& stats_;
  Op op_;
  Stats::Slot* slot_ = nullptr;
};

}  // namespace ptc
