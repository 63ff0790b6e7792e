// Jobs that are made and removed for somebody who does not wait for long: in a mount who asks for
// it keeps the root locked, and who lists that waits, too, while etcd may say nothing for its whole
// patience.
//
// Each change goes on in a thread of its own when nobody waits for it any more, up to its decision;
// that is made only while somebody waits. So who was told EAGAIN finds that nothing has changed,
// and the same again goes on where it was: etcd has answered by then. Where the transaction was on
// its way already, it is settled first what became of it. If it was made, the same again is told
// so, once.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "reshard/job/job.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/base/spare_threads.h"

namespace ptc {

/// Of each name one at a time. Threads: any.
class JobChanges {
 public:
  using Clock = std::chrono::steady_clock;

  /// Who asks for the same joins what goes on.
  struct Wish {
    std::string name;
    std::string removed = {};       // id of the job that shall go; empty: one shall be made …
    JobAttributes attributes = {};  // … with these, its owner among them
    friend bool operator==(const Wish&, const Wish&) = default;
  };

  /// A change that goes on, as its thread sees it.
  class Change {
   public:
    /// Before the decision, without a lock: returns while somebody waits. kCancelled: nobody came.
    Result<> wait_for_somebody();
    /// At the decision: false, and nothing is to be decided now. put_off() says so afterwards,
    /// once.
    bool wanted();
    bool put_off() { return std::exchange(put_off_, false); }
    /// Calls it now and then, until it does not fail. kCancelled: the store is closed.
    Result<> until_done(const std::function<Result<>()>& step);

   private:
    friend class JobChanges;
    Change(JobChanges& all, Wish wish) : all_(all), wish_(std::move(wish)) {}

    JobChanges& all_;
    const Wish wish_;
    const Clock::time_point begun_ = Clock::now();
    bool put_off_ = false;  // of its thread
    // Guarded by all_.mutex_.
    int waiting_ = 0, others_ = 0;  // who want this, or that it makes room for something else
    bool heard_ = false;            // somebody was told that it was done
    std::optional<Result<JobRef>> outcome_;  // null: of a removal
    Clock::time_point ended_{};
  };
  using Steps = std::function<Result<JobRef>(Change&)>;
  using Unheard = std::function<void(const Wish&, const Result<JobRef>&)>;

  /// `unheard`: of what ended while nobody waited; it outlives stop().
  explicit JobChanges(Unheard unheard) : unheard_(std::move(unheard)) {}
  ~JobChanges() { stop(); }

  /// `steps` in a thread of its own, unless they are under way. EAGAIN, and what to do: they take
  /// longer than `patience`.
  Result<JobRef> ask(const Wish& wish, std::chrono::milliseconds patience, const Steps& steps);
  /// Nothing is decided any more; returns when all have ended.
  void stop();

 private:
  using ChangeRef = std::shared_ptr<Change>;
  ChangeRef begin(const Wish& wish, const Steps& steps) PTC_REQUIRES(mutex_);
  void carry_out(const ChangeRef& change, const Steps& steps);
  void forget(const ChangeRef& change) PTC_REQUIRES(mutex_);
  /// Somebody has waited in vain for as long as that: how long another waits for something new.
  std::chrono::milliseconds patience_now(std::chrono::milliseconds patience) const
      PTC_REQUIRES(mutex_);

  const Unheard unheard_;
  Mutex mutex_;
  ConditionVariable changed_;
  bool stopping_ PTC_GUARDED_BY(mutex_) = false;
  std::map<std::string, ChangeRef> changes_ PTC_GUARDED_BY(mutex_);  // also those not heard of yet
  SpareThreads threads_{"ptcfs-jobs"};                               // last: uses all of the above
};

}  // namespace ptc
