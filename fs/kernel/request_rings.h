// The kernel's requests by io_uring (Linux 6.14): a queue for each processor, and threads that stay
// on it, so that a request and its reply wake nobody on another.
//
// A request occupies an entry of its processor's queue until it is replied to, and the reply
// fetches the next. Two threads of each processor have an io_uring with one entry each: whoever is
// at work has none that the kernel could fill, so no request lies behind another. An entry whose
// request waits for others, served or queued, is held: where fewer than two of a queue are not, it
// gets another. What is replied to on another thread than its own goes on with a thread of that
// queue that has no entry, or with a new one. Beyond kMostDirect of them, and on processors that
// are not running, the keeper has the entries: a thread that never serves, and starts another for
// each request.
//
// Forgets, interrupts and INIT come by /dev/fuse as ever, and so more slowly: after something was
// removed, the next requests look there first, since what is forgotten frees space.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "fs/kernel/uring.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Order: prepare(), the reply to INIT, start(), stop(). Threads: any, unless it says otherwise.
class RequestRings {
 public:
  struct Options {
    int device = -1;           // /dev/fuse
    size_t payload_bytes = 0;  // the largest that is read or written at once
    int wake_signal = 0;       // interrupts a thread that waits; its handler does nothing
    /// Serves the request in this memory, as it would come from /dev/fuse.
    std::function<void(void* memory, size_t size)> process;
    /// Serves what waits at /dev/fuse, and waits for nothing.
    std::function<void()> process_forgets;
    std::function<void()> ended;  // is_over() may be true now
  };
  explicit RequestRings(Options options);
  ~RequestRings();

  /// Whether there can be rings; before the kernel is told that there will be.
  Result<> prepare();
  /// Whether there are; where not, the kernel sends its requests as ever.
  Result<> start();
  /// Ends all threads; those that wait for others when these have answered.
  void stop();
  /// Unmounted, or stopped, and nobody serves, except for those that wait for others.
  bool is_over() const { return over_.load() && running_.load() <= waiting_.load(); }

  /// Takes what goes to /dev/fuse. False: it is no reply to a request that came by a ring.
  bool reply(const iovec* parts, int count);
  /// A thread begins to serve what may wait (+1), or has done so (−1). False: it is no such thread.
  bool note_waiting(int change);
  /// The same goes on with another request: what it has replied to must not wait for that.
  void send_reply();

 private:
  struct Entry;
  struct Queue;
  struct Serving;

  void begin_direct(Queue& queue, bool first);
  void serve_queue(Queue& queue, bool first);
  void keep(std::promise<Result<>> started);
  int register_all(Uring& ring);
  void look_after(Uring& ring);
  void serve_alone(Entry& entry);
  bool serve(Entry& entry, bool direct);
  Entry* new_entry(Queue& queue);
  Entry* adopt(Queue& queue);
  Entry* find(uint64_t unique);
  void hold(Entry& entry, uint64_t unique);
  void release(Entry& entry);
  void hand_over(Entry& entry);
  void push(Uring& ring, uint32_t operation, Entry& entry);
  void wake_keeper() const;
  void end();
  void one_less();

  static thread_local Serving serving;
  const Options options_;
  std::vector<std::unique_ptr<Queue>> queues_;
  int keepers_event_ = -1;
  Mutex mutex_;
  ConditionVariable ended_;
  std::vector<std::thread> threads_ PTC_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Entry>> entries_
      PTC_GUARDED_BY(mutex_);  // the kernel knows them until the end
  std::atomic<int> running_{0}, waiting_{0};
  std::atomic<bool> over_{false};
  std::atomic<int> looks_{0};  // for forgets; of the next requests
};

}  // namespace ptc
