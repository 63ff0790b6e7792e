#include "fs/tree/stats.h"

#include <algorithm>

namespace ptc {
namespace {

constexpr std::array<std::string_view, kOpCount> kNames = {
    "lookup",    "forget", "getattr",  "setattr",  "readlink",  "mknod",       "mkdir",
    "unlink",    "rmdir",  "symlink",  "rename",   "link",      "open",        "read",
    "write",     "flush",  "release",  "fsync",    "opendir",   "readdir",     "releasedir",
    "fsyncdir",  "statfs", "setxattr", "getxattr", "listxattr", "removexattr", "create",
    "fallocate", "lseek",  "ioctl"};

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Threads are numbered as they come.
size_t this_thread() {
  static std::atomic<size_t> next{0};
  static thread_local const size_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

}  // namespace

std::string_view op_name(Op op) { return kNames[static_cast<size_t>(op)]; }

Stats::Counter& Stats::counter(Op op) {
  return counters_[this_thread() % kParts][static_cast<size_t>(op)];
}

Stats::OpCounts Stats::counts(Op op) const {
  OpCounts sum;
  for (const auto& part : counters_) {
    const Counter& counter = part[static_cast<size_t>(op)];
    sum.requests += counter.requests.load(std::memory_order_relaxed);
    sum.errors += counter.errors.load(std::memory_order_relaxed);
    sum.bytes += counter.bytes.load(std::memory_order_relaxed);
    sum.duration_ns += counter.duration_ns.load(std::memory_order_relaxed);
    for (size_t i = 0; i < sum.answered.size(); ++i)
      sum.answered[i] += counter.answered[i].load(std::memory_order_relaxed);
  }
  return sum;
}

uint64_t Stats::requests() const {
  uint64_t sum = 0;
  for (const auto& part : counters_)
    for (const Counter& counter : part) sum += counter.requests.load(std::memory_order_relaxed);
  return sum;
}

void Stats::add_bytes(Op op, uint64_t bytes) {
  counter(op).bytes.fetch_add(bytes, std::memory_order_relaxed);
}

std::vector<Stats::Pending> Stats::in_flight() const {
  std::vector<Pending> result;
  int64_t now = steady_ns();
  for (const Slot& slot : slots_) {
    int64_t started = slot.started_ns.load(std::memory_order_acquire);
    if (started <= 1) continue;
    result.push_back({slot.op.load(std::memory_order_relaxed),
                      slot.node.load(std::memory_order_relaxed),
                      slot.pid.load(std::memory_order_relaxed),
                      std::chrono::milliseconds((now - started) / 1000000)});
  }
  return result;
}

InFlight::InFlight(Stats& stats, Op op, uint64_t node, uint32_t pid)
    : stats_(stats), op_(op), started_ns_(steady_ns()) {
  stats.counter(op).requests.fetch_add(1, std::memory_order_relaxed);
  // Each thread begins its search at a place of its own, so that it nearly always finds that free.
  const size_t home = this_thread();
  for (size_t i = 0; i < stats.slots_.size(); ++i) {
    Stats::Slot& slot = stats.slots_[(home + i) % stats.slots_.size()];
    int64_t free = 0;
    if (!slot.started_ns.compare_exchange_strong(free, 1, std::memory_order_acquire)) continue;
    slot.node.store(node, std::memory_order_relaxed);
    slot.pid.store(pid, std::memory_order_relaxed);
    slot.op.store(op, std::memory_order_relaxed);
    slot.started_ns.store(started_ns_, std::memory_order_release);
    slot_ = &slot;
    return;
  }
}

InFlight::~InFlight() {
  const int64_t took_ns = steady_ns() - started_ns_;
  const size_t bucket = static_cast<size_t>(
      std::lower_bound(kDurationBuckets.begin(), kDurationBuckets.end(), took_ns) -
      kDurationBuckets.begin());
  Stats::Counter& counter = stats_.counter(op_);
  counter.duration_ns.fetch_add(static_cast<uint64_t>(took_ns), std::memory_order_relaxed);
  counter.answered[bucket].fetch_add(1, std::memory_order_relaxed);
  if (slot_ != nullptr) slot_->started_ns.store(0, std::memory_order_release);
}

void InFlight::failed() { stats_.counter(op_).errors.fetch_add(1, std::memory_order_relaxed); }

}  // namespace ptc
