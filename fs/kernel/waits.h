// Requests that may have to wait for others: for another node, or for the file system that a data
// set's shards lie on.
//
// Each is served on the thread that received it, which is counted as waiting meanwhile: the session
// sees to it that enough others are left to receive. So what answers at once costs no change of
// threads. For each of those waited for there is a limit; what exceeds it waits in a queue, and
// takes no thread. A request whose caller is killed, or that takes too long, is answered by a
// thread that looks after all of them, which is there while there are any; the thread that serves
// it may be in the kernel for ever.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fs/tree/node.h"
#include "fs/tree/tree.h"
#include "store/base/mutex.h"

struct fuse_req;

namespace ptc {

class FuseRequest;
class Waits;

/// One such request. Replied to by whoever claims it.
class WaitingRequest {
 public:
  using Body = std::function<void(FuseRequest&)>;
  /// `awaited` lives as long as `body`.
  WaitingRequest(fuse_req* raw, Tree& tree, const Caller& caller, Op op, uint64_t inode,
                 const Awaited& awaited, Body body);
  WaitingRequest(const WaitingRequest&) = delete;
  WaitingRequest& operator=(const WaitingRequest&) = delete;

  /// True for one caller, who replies, and calls ended().
  bool claim();
  void ended(bool failed);
  bool interrupted() const { return interrupted_.load(std::memory_order_relaxed); }

 private:
  friend class Waits;
  static void on_interrupt(fuse_req* raw, void* self);
  void serve();
  void fail(int error);

  fuse_req* const raw_;
  Tree& tree_;
  const Caller caller_;
  const Op op_;
  const uint64_t inode_;
  const Awaited& awaited_;
  Body body_;
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  std::atomic<bool> claimed_{false}, interrupted_{false};
  std::optional<InFlight> in_flight_;  // of the one who claimed it
  Waits* waits_ = nullptr;
  bool watched_ = false;                                        // guarded by the shard's mutex
  std::list<std::shared_ptr<WaitingRequest>>::iterator place_;  // there
};
using WaitingRef = std::shared_ptr<WaitingRequest>;

/// Threads: any.
class Waits {
 public:
  struct Options {
    std::chrono::milliseconds patience{60000};  // what takes longer fails with ETIMEDOUT
    /// Called with +1 and −1: a thread begins to serve what may wait, and has done so. False: no
    /// other thread is left to receive, so what may wait for ever is refused. Called without a
    /// lock.
    std::function<bool(int)> counted;
    /// Called where the same thread goes on with another.
    std::function<void()> goes_on;
  };
  explicit Waits(Options options);
  ~Waits();

  /// Serves the request now, and then those that queue for the same; or queues it.
  void run(WaitingRef request);

 private:
  friend class WaitingRequest;
  struct Lane {  // of one who is waited for
    unsigned running = 0;
    std::deque<WaitingRef> queue;
  };
  /// The kernel asks once more for what it could not read ahead: that was waited for already.
  struct GivenUp {
    int32_t process;
    uint64_t inode;
    std::chrono::steady_clock::time_point until;
  };
  struct Shard {
    Mutex mutex;
    std::deque<GivenUp> given_up PTC_GUARDED_BY(mutex);  // reads, by `until`
    void give_up(const WaitingRequest& request) PTC_REQUIRES(mutex);
    bool has_given_up(const WaitingRequest& request) PTC_REQUIRES(mutex);
    std::unordered_map<std::string, Lane> lanes PTC_GUARDED_BY(mutex);
    std::list<WaitingRef> watched PTC_GUARDED_BY(mutex);  // by age
    std::vector<WaitingRef> over(std::chrono::steady_clock::time_point begun_before, bool all)
        PTC_REQUIRES(mutex);
    void watch(const WaitingRef& request) PTC_REQUIRES(mutex);
    void unwatch(WaitingRequest& request) PTC_REQUIRES(mutex);
  };
  Shard& shard_of(const std::string& name);
  bool begin(const WaitingRef& request);    // false: it queues, or was refused
  WaitingRef next(const WaitingRef& done);  // of the same lane
  WaitingRef starving();                    // of any
  void wake();
  bool watch();  // false: there is no thread for it
  void look_after(std::stop_token stop);

  // That wait, for whomever, and may do so for long: from the first number on only one for each who
  // is waited for.
  static constexpr int kManyThreads = 256, kMostThreads = 1024;
  static constexpr size_t kMostQueued = 10000;  // for one
  const Options options_;
  std::array<Shard, 16> shards_;
  std::atomic<int> held_up_{0};  // threads that serve what does not end by itself
  std::atomic<bool> starved_{false}, watching_{false}, interrupts_{false};
  Mutex mutex_;
  bool has_watcher_ PTC_GUARDED_BY(mutex_) = false;
  StoppableConditionVariable wake_;
  std::jthread watcher_ PTC_GUARDED_BY(mutex_);  // last: uses all of the above
};

}  // namespace ptc
