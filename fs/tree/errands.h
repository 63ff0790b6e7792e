// What goes on when the request that began it has been answered: each in a thread of its own.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "fs/tree/errno.h"
#include "store/base/mutex.h"

namespace ptc {

/// Threads: any.
class Errands {
 public:
  Errands() = default;
  ~Errands() { wait(); }
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;

  /// `errand` throws nothing; its thread lets go of what it holds, and may be the last that had it.
  /// Throws where there is no memory, or no thread, for it.
  void start(std::function<void()> errand);
  /// For somebody who waits, with locks of the kernel's: for 1.7 s at most. EAGAIN: it goes on, and
  /// may come to its end without that; who asks for `what` in the same way (`how`) waits on for it,
  /// and who does so in another waits for its end first.
  FsResult<> ask(const std::string& what, const std::string& how,
                 const std::function<FsResult<>()>& errand);
  /// Until all have ended, those too that are started meanwhile. Not from within one.
  void wait();

 private:
  struct One {
    bool ended = false;  // guarded by mutex_
    std::jthread thread;
  };
  using List = std::list<One>;
  struct Asked {
    const std::string how;
    std::optional<FsResult<>> outcome = {};  // guarded by asked_mutex_
  };
  bool begin(const std::string& what, const std::shared_ptr<Asked>& one,
             const std::function<FsResult<>()>& errand);

  Mutex asked_mutex_;  // before mutex_
  ConditionVariable ended_;
  std::map<std::string, std::shared_ptr<Asked>> asked_ PTC_GUARDED_BY(asked_mutex_);
  Mutex mutex_;
  List under_way_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
