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
  kLookup,
  kForget,
  kGetattr,
  kSetattr,
  kReadlink,
  kMknod,
  kMkdir,
  kUnlink,
  kRmdir,
  kSymlink,
  kRename,
  kLink,
  kOpen,
  kRead,
  kWrite,
  kFlush,
  kRelease,
  kFsync,
  kOpendir,
  kReaddir,
  kReleasedir,
  kFsyncdir,
  kStatfs,
  kSetxattr,
  kGetxattr,
  kListxattr,
  kRemovexattr,
  kCreate,
  kFallocate,
  kLseek,
  kIoctl,
};
inline constexpr size_t kOpCount = static_cast<size_t>(Op::kIoctl) + 1;
std::string_view op_name(Op op);

/// Upper ends of the buckets that durations of requests are counted in, in nanoseconds; what takes
/// longer is in a last one of its own.
inline constexpr std::array<int64_t, 11> kDurationBuckets = {
    10'000,     30'000,      100'000,     300'000,       1'000'000,     3'000'000,
    10'000'000, 100'000'000, 300'000'000, 1'000'000'000, 10'000'000'000};

/// Counters and the requests in flight. Threads: any; no locks, and no cache line that two threads
/// of a few write: each counts in a part of its own.
class Stats {
 public:
  struct OpCounts {
    uint64_t requests = 0, errors = 0, bytes = 0;
    uint64_t duration_ns = 0;  // of those answered, all together
    std::array<uint64_t, kDurationBuckets.size() + 1> answered{};  // by duration
  };
  OpCounts counts(Op op) const;
  uint64_t requests() const;  // of all operations
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
    std::atomic<uint64_t> requests{0}, errors{0}, bytes{0}, duration_ns{0};
    std::array<std::atomic<uint64_t>, kDurationBuckets.size() + 1> answered{};
  };
  struct alignas(64) Slot {
    std::atomic<int64_t> started_ns{0};  // 0: free
    std::atomic<uint64_t> node{0};
    std::atomic<uint32_t> pid{0};
    std::atomic<Op> op{Op::kLookup};
  };
  Counter& counter(Op op);  // of this thread
  static constexpr size_t kParts = 16;
  std::array<std::array<Counter, kOpCount>, kParts> counters_;
  std::array<Slot, 512> slots_;  // more requests at once than this are counted, not listed
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
  const Op op_;
  const int64_t started_ns_;
  Stats::Slot* slot_ = nullptr;
};

}  // namespace ptc
