#include "reshard/node/job_changes.h"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "store/base/mutex.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;

constexpr auto kAsksAgain = std::chrono::seconds(10);  // who was told EAGAIN
constexpr auto kTellsFor = std::chrono::seconds(60);   // that it was done
constexpr auto kSettlesEvery = std::chrono::seconds(1);
constexpr milliseconds kMoment{200};
constexpr ptrdiff_t kMostAtOnce = 32;

Error goes_on(const JobChanges::Wish& wish) {
  const char* command = wish.removed.empty() ? "mkdir" : "rmdir";
  return Error(Code::kUnavailable,
               fmt::format("what the nodes agree through does not answer, or not soon; the same {} "
                           "again goes on with it",
                           command),
               EAGAIN);
}

}  // namespace

Result<> JobChanges::Change::wait_for_somebody() {
  MutexLock lock(all_.mutex_);
  const auto until = Clock::now() + kAsksAgain;
  (void)all_.changed_.wait_until(all_.mutex_, until, [&]() PTC_REQUIRES(all_.mutex_) {
    return waiting_ > 0 || others_ > 0 || all_.stopping_;
  });
  if (waiting_ > 0 && !all_.stopping_) return ok();
  return make_error(Code::kCancelled, "nobody waits for it any more");
}

bool JobChanges::Change::wanted() {
  MutexLock lock(all_.mutex_);
  put_off_ = waiting_ == 0 || all_.stopping_;
  return !put_off_;
}

Result<> JobChanges::Change::until_done(const std::function<Result<>()>& step) {
  for (;;) {
    if (step().has_value()) return ok();
    MutexLock lock(all_.mutex_);
    if (all_.changed_.wait_for(all_.mutex_, kSettlesEvery,
                               [&]() PTC_REQUIRES(all_.mutex_) { return all_.stopping_; }))
      return make_error(Code::kCancelled, "the store is being closed");
  }
}

JobChanges::ChangeRef JobChanges::begin(const Wish& wish, const Steps& steps) {
  const auto now = Clock::now();
  std::erase_if(changes_, [&](const auto& known) {
    return known.second->outcome_ && now - known.second->ended_ >= kTellsFor;
  });
  if (std::count_if(changes_.begin(), changes_.end(),
                    [](const auto& one) { return !one.second->outcome_; }) >= kMostAtOnce)
    return nullptr;
  const ChangeRef change(new Change(*this, wish));
  const auto known = changes_.emplace(wish.name, change).first;
  try {
    threads_.run([this, change, steps] { carry_out(change, steps); });
  } catch (const std::exception&) {  // no thread, no memory
    changes_.erase(known);
    return nullptr;
  }
  return change;
}

milliseconds JobChanges::patience_now(milliseconds patience) const {
  const auto now = Clock::now();
  const bool in_vain = std::any_of(changes_.begin(), changes_.end(), [&](const auto& one) {
    return !one.second->outcome_ && now - one.second->begun_ > patience;
  });
  return in_vain ? std::min(patience, kMoment) : patience;
}

Result<JobRef> JobChanges::ask(const Wish& wish, milliseconds patience, const Steps& steps) {
  MutexLock lock(mutex_);
  auto until = Clock::now() + patience;
  for (;;) {
    if (stopping_) return make_error(Code::kUnavailable, "the store is being closed");
    const auto known = changes_.find(wish.name);
    ChangeRef one = known != changes_.end() ? known->second : nullptr;
    if (one == nullptr) {
      until = std::min(until, Clock::now() + patience_now(patience));
      one = begin(wish, steps);
    }
    if (one == nullptr) return goes_on(wish);
    const bool same = one->wish_ == wish;
    int& waiting = same ? one->waiting_ : one->others_;
    ++waiting;
    changed_.notify_all();
    const bool ended =
        changed_.wait_until(mutex_, until, [&] { return one->outcome_.has_value(); });
    --waiting;
    if (!ended) return goes_on(wish);
    forget(one);
    // That it was done only one is told: for the next it is there already, or gone.
    if (same && !(one->outcome_->has_value() && std::exchange(one->heard_, true)))
      return *one->outcome_;
  }
}

void JobChanges::forget(const ChangeRef& change) {
  const auto known = changes_.find(change->wish_.name);
  if (known != changes_.end() && known->second == change) changes_.erase(known);
}

void JobChanges::carry_out(const ChangeRef& change, const Steps& steps) {
  const Result<JobRef> outcome = [&]() -> Result<JobRef> {
    try {
      return steps(*change);
    } catch (const std::exception& error) {
      return make_error(Code::kUnavailable, "{}", error.what());
    }
  }();
  {
    MutexLock lock(mutex_);
    change->outcome_ = outcome;
    change->ended_ = Clock::now();
    changed_.notify_all();
    if (change->waiting_ > 0) return;
    if (outcome.has_error()) forget(change);
  }
  unheard_(change->wish_, outcome);
}

void JobChanges::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  threads_.end();
}

}  // namespace ptc
