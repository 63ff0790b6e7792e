#include "fs/stats.h"

#include <functional>
#include <thread>

namespace ptc {
namespace {

constexpr std::array<std::string_view, kOpCount> kNames = {
    "lookup", "forget", "getattr", "setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir",
    "symlink", "rename", "link", "open", "read", "write", "flush", "release", "fsync", "opendir",
    "readdir", "releasedir", "fsyncdir", "statfs", "setxattr", "getxattr", "listxattr",
    "removexattr", "create", "fallocate", "lseek"};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string_view op_name(Op op) { return kNames[static_cast<size_t>(op)]; }

Stats::OpCounts Stats::counts(Op op) const {
  const Counter& counter = counters_[static_cast<size_t>(op)];
  return {counter.requests.load(std::memory_order_relaxed),
          counter.errors.load(std::memory_order_relaxed),
          counter.bytes.load(std::memory_order_relaxed)};
}

void Stats::add_bytes(Op op, uint64_t bytes) {
  counters_[static_cast<size_t>(op)].bytes.fetch_add(bytes, std::memory_order_relaxed);
}

std::vector<Stats::Pending> Stats::in_flight() const {
  std::vector<Pending> result;
  int64_t now = now_ns();
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

InFlight::InFlight(Stats& stats, Op op, uint64_t node, uint32_t pid) : stats_(stats), op_(op) {
  stats.counters_[static_cast<size_t>(op)].requests.fetch_add(1, std::memory_order_relaxed);
  // Each thread begins its search at a place of its own, so that it nearly always finds that free.
  static thread_local const size_t home = std::hash<std::thread::id>()(std::this_thread::get_id());
  for (size_t i = 0; i < stats.slots_.size(); ++i) {
    Stats::Slot& slot = stats.slots_[(home + i) % stats.slots_.size()];
    int64_t free = 0;
    if (!slot.started_ns.compare_exchange_strong(free, 1, std::memory_order_acquire)) continue;
    slot.node.store(node, std::memory_order_relaxed);
    slot.pid.store(pid, std::memory_order_relaxed);
    slot.op.store(op, std::memory_order_relaxed);
    slot.started_ns.store(now_ns(), std::memory_order_release);
    slot_ = &slot;
    return;
  }
}

InFlight::~InFlight() {
  if (slot_ != nullptr) slot_->started_ns.store(0, std::memory_order_release);
}

void InFlight::failed() {
  stats_.counters_[static_cast<size_t>(op_)].errors.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace ptc
