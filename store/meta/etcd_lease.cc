#include "store/meta/etcd_lease.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace ptc {

using Clock = MetaLease::Clock;
namespace {
constexpr std::chrono::milliseconds kPauseOfLease{100};
constexpr Clock::duration kTurn =
    std::chrono::seconds(1);  // that one try to renew takes at most, and then until the next
}  // namespace

class EtcdLeases::Lease : public MetaLease {
 public:
  Lease(EtcdGateway& gateway, int64_t id, Clock::duration ttl, Clock::time_point asked)
      : gateway_(gateway), id_(id) {
    renewed(ttl, asked);
  }
  ~Lease() override {
    renewing_.stop();
    // Else it ends by itself.
    if (deadline() == Clock::time_point::min()) return;
    (void)gateway_.call("lease/revoke", {{"ID", std::to_string(id_)}},
                        Clock::now() + std::chrono::seconds(1));
  }

  int64_t id() const override { return id_; }
  Clock::time_point deadline() const override { return deadline_; }

  void keep_alive(const IoExecutor& executor) {
    renewing_.start(executor, [this](std::stop_token stop) { return run(std::move(stop)); });
  }

 private:
  asio::awaitable<void> run(std::stop_token stop) {
    while (!stop.stop_requested() && deadline() != Clock::time_point::min()) {
      const auto until = std::chrono::ceil<std::chrono::milliseconds>(next_renewal_ - Clock::now());
      if (until.count() > 0) co_await pause(until, stop);
      else co_await renew(stop);
    }
  }

  asio::awaitable<void> renew(std::stop_token stop) try {
    const auto asked = Clock::now();
    const auto until = asked + std::min(ttl_ / 4, kTurn);
    json::object request{{"ID", std::to_string(id_)}};
    auto answer =
        co_await gateway_.ask("lease/keepalive", std::move(request), until, std::move(stop));
    auto seconds = answer ? number_field(object_field(answer.value(), "result"), "TTL")
                          : Result<int64_t>(std::move(answer).error());
    if (!seconds) next_renewal_ = Clock::now() + std::min(ttl_ / 10, kTurn);
    else if (seconds.value() > 0) renewed(std::chrono::seconds(seconds.value()), asked);
    else deadline_ = Clock::time_point::min();
  } catch (const std::exception&) {  // no memory
    next_renewal_ = Clock::now() + kTurn;
  }

  void renewed(Clock::duration ttl, Clock::time_point asked) {
    ttl_ = ttl;
    deadline_ = asked + ttl;
    next_renewal_ = asked + ttl / 3;
  }

  EtcdGateway& gateway_;
  const int64_t id_;
  std::atomic<Clock::time_point> deadline_;  // min(): etcd has ended it
  // Of the coroutine.
  Clock::duration ttl_;
  Clock::time_point next_renewal_;
  Background renewing_;  // last: it uses the rest
};

EtcdLeases::EtcdLeases(std::shared_ptr<const EtcdAccess> access, NeededIo io)
    : gateway_(std::move(access)), io_(std::move(io)) {}

Result<std::unique_ptr<MetaLease>> EtcdLeases::grant(std::chrono::seconds ttl) {
  PTC_TRY(auto io, io_());
  auto last_ask = Clock::now() + gateway_.patience();
  for (;;) {
    // Asked once at a time, for the deadline counts from the moment of asking. A lease whose answer
    // is lost ends by itself.
    auto asked = Clock::now();
    bool sent = false;
    auto answer =
        gateway_.call_once("lease/grant", {{"TTL", std::to_string(ttl.count())}}, last_ask, sent);
    if (!answer && sent && Clock::now() < last_ask) {
      std::this_thread::sleep_for(kPauseOfLease);
      continue;
    }
    PTC_TRY(json::object granted, std::move(answer));
    PTC_TRY(int64_t id, number_field(granted, "ID"));
    PTC_TRY(int64_t seconds, number_field(granted, "TTL"));
    auto lease = std::make_unique<Lease>(gateway_, id, std::chrono::seconds(seconds), asked);
    lease->keep_alive(io->next());
    return lease;
  }
}

}  // namespace ptc
