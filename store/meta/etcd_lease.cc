#include "store/meta/etcd_lease.h"

#include <algorithm>
#include <atomic>

namespace ptc {

using Clock = MetaLease::Clock;
namespace {
constexpr std::chrono::milliseconds kPauseOfLease{100};
constexpr Clock::duration kTurn = std::chrono::seconds(1);  // then other leases are renewed
}

class EtcdLeases::Lease : public MetaLease {
 public:
  Lease(EtcdLeases& leases, int64_t id, Clock::duration ttl, Clock::time_point asked)
      : leases_(leases), id_(id) {
    renewed(ttl, asked);
  }
  ~Lease() override { leases_.end(*this); }

  int64_t id() const override { return id_; }
  Clock::time_point deadline() const override { return deadline_; }

  void renewed(Clock::duration ttl, Clock::time_point asked) {
    ttl_ = ttl;
    deadline_ = asked + ttl;
    next_renewal_ = asked + ttl / 3;
  }
  void not_renewed(Clock::time_point now) { next_renewal_ = now + std::min(ttl_ / 10, kTurn); }
  void ended() {
    deadline_ = Clock::time_point::min();
    next_renewal_ = Clock::time_point::max();
  }
  Clock::duration ttl() const { return ttl_; }
  Clock::time_point next_renewal() const { return next_renewal_; }

 private:
  EtcdLeases& leases_;
  int64_t id_;
  std::atomic<Clock::time_point> deadline_;
  // Of the thread that renews.
  Clock::duration ttl_;
  Clock::time_point next_renewal_;
};

EtcdLeases::EtcdLeases(std::shared_ptr<const EtcdAccess> access) : renewals_(access), calls_(access) {}

EtcdLeases::~EtcdLeases() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  renewals_.stop();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<MetaLease>> EtcdLeases::grant(std::chrono::seconds ttl) {
  auto last_ask = Clock::now() + calls_.patience();
  for (;;) {
    // Asked once at a time, for the deadline counts from the moment of asking. A lease whose answer
    // is lost ends by itself.
    auto asked = Clock::now();
    bool sent = false;
    auto answer = calls_.call_once("lease/grant", {{"TTL", std::to_string(ttl.count())}}, last_ask, sent);
    if (!answer && sent && Clock::now() < last_ask) {
      std::this_thread::sleep_for(kPauseOfLease);
      continue;
    }
    PTC_TRY(json::object granted, std::move(answer));
    PTC_TRY(int64_t id, number_field(granted, "ID"));
    PTC_TRY(int64_t seconds, number_field(granted, "TTL"));
    auto lease = std::make_unique<Lease>(*this, id, std::chrono::seconds(seconds), asked);
    std::lock_guard lock(mutex_);
    leases_.insert(lease.get());
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
    return lease;
  }
}

void EtcdLeases::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    auto first = std::min_element(leases_.begin(), leases_.end(), [](const Lease* a, const Lease* b) {
      return a->next_renewal() < b->next_renewal();
    });
    if (first == leases_.end() || (*first)->next_renewal() > Clock::now()) {
      // A time of its own: while waiting unlocked, the lease may go.
      auto until = first == leases_.end() ? Clock::time_point::max() : (*first)->next_renewal();
      if (until == Clock::time_point::max())
        changed_.wait(lock);
      else
        changed_.wait_until(lock, until);
      continue;
    }
    renewing_ = *first;
    lock.unlock();
    renew(*renewing_);
    lock.lock();
    renewing_ = nullptr;
    changed_.notify_all();
  }
}

void EtcdLeases::renew(Lease& lease) {
  auto asked = Clock::now();
  auto answer = renewals_.call("lease/keepalive", {{"ID", std::to_string(lease.id())}},
                               asked + std::min(lease.ttl() / 4, kTurn));
  auto seconds = answer ? number_field(object_field(answer.value(), "result"), "TTL")
                        : Result<int64_t>(std::move(answer).error());
  if (!seconds)
    lease.not_renewed(Clock::now());
  else if (seconds.value() > 0)
    lease.renewed(std::chrono::seconds(seconds.value()), asked);
  else
    lease.ended();
}

void EtcdLeases::end(Lease& lease) {
  {
    std::unique_lock lock(mutex_);
    leases_.erase(&lease);
    changed_.wait(lock, [&] { return renewing_ != &lease; });
  }
  // Else it ends by itself.
  if (lease.deadline() == Clock::time_point::min()) return;
  (void)calls_.call("lease/revoke", {{"ID", std::to_string(lease.id())}},
                    Clock::now() + std::chrono::seconds(1));
}

}  // namespace ptc
