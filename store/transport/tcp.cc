#include "store/transport/tcp.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <latch>
#include <map>
#include <optional>

#include "store/base/mutex.h"
#include "store/net/others_first.h"
#include "store/rpc/connection.h"
#include "store/transport/landing.h"

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kAttempts = 5;  // without one good chunk
constexpr int kAttemptsOfOneOfMany =
    2;  // the kept connection may be that to a daemon before this one
constexpr auto kFirstPause = std::chrono::milliseconds(50);

/// All items of one node, until they are there or the node is given up.
class NodeFetch {
 public:
  NodeFetch(Peers& peers, std::string node, std::vector<FetchItem*> items, std::stop_token stop,
            std::chrono::milliseconds silence)
      : peers_(peers),
        node_(std::move(node)),
        counters_(peers.counters(node_)),
        landing_(std::move(items)),
        stop_(std::move(stop)),
        silence_(std::min(silence, peers.silence())),
        attempts_(silence < peers.silence() ? kAttemptsOfOneOfMany : kAttempts) {}

  Task<> run() {
    while (landing_.bytes_left() > 0) {
      const uint64_t left = landing_.bytes_left();
      auto streamed = co_await stream();
      if (streamed) continue;
      const Error& error = streamed.error();
      if (error.code() == Code::kCancelled || final_ || no_place_) co_return streamed;
      if (landing_.bytes_left() < left) failures_ = 0;
      if (++failures_ >= attempts_ || Clock::now() - since_ >= silence_)
        co_return make_error(Code::kUnavailable, "{}; given up after {} attempts", error.message(),
                             failures_);
      ++counters_->retries;
      const bool damaged = error.code() == Code::kCorrupt;
      spdlog::log(damaged ? spdlog::level::warn : spdlog::level::debug,
                  "fetch: {}; {} bytes are still to come, trying again", error.message(),
                  landing_.bytes_left());
      co_await pause(kFirstPause * (1 << (failures_ - 1)), stop_);
    }
    co_return ok();
  }

 private:
  /// One request and what comes of it. Sets final_ of an error that another connection would not
  /// mend.
  Task<> stream() {
    auto taken = co_await peers_.take(node_, since_ + silence_, stop_);
    if (!taken) {
      final_ = taken.error().code() == Code::kPermissionDenied;
      if (!final_) co_return std::move(taken).error();
      co_return Error(Code::kUnavailable, taken.error().message());
    }
    auto connection = std::move(taken).value();
    const Clock::time_point asked = Clock::now();
    auto received = co_await receive(*connection);
    if (connection->last_received() > asked) since_ = connection->last_received();
    const std::string from = fmt::format("node {} ({})", node_, connection->peer_address());
    final_ = connection->error_was_said();
    if (received || final_) {
      peers_.give_back(node_, std::move(connection));
    } else if (received.error().code() != Code::kCancelled) {
      ++counters_->broken_connections;
    }
    if (received) co_return ok();
    Error error = std::move(received).error().with_context(from);
    if (final_ && error.code() != Code::kCorrupt)
      co_return Error(Code::kUnavailable, error.message());
    co_return error;
  }

  Task<> receive(Connection& connection) {
    // Half of it: time is left for another connection before the node counts as dead.
    connection.set_patience({silence_ / 2, Deadline::max(), stop_});
    auto [request, bytes] = landing_.ask(kMaxFetchItems);
    constexpr uint64_t kRequest = 0;  // the only one of the connection that is under way
    PTC_CO_TRY(co_await connection.send(FrameType::kFetch, kRequest, encode(request)));
    while (bytes > 0) {
      PTC_CO_TRY(auto header, co_await connection.expect_header(FrameType::kData, kRequest));
      if (header.body_bytes == 0 || header.body_bytes > bytes) co_return unexpected(header);
      PTC_CO_TRY(co_await connection.receive_body(header, landing_.place(header.body_bytes)));
      Result<> landed = landing_.accept();
      if (landed.has_error()) {
        no_place_ = true;
        co_return landed;
      }
      bytes -= header.body_bytes;
      co_await let_others_go_first();
    }
    co_return ok();
  }

  Peers& peers_;
  const std::string node_;
  const std::shared_ptr<PeerCounters> counters_;
  Landing landing_;
  const std::stop_token stop_;
  const std::chrono::milliseconds silence_;
  const int attempts_;
  int failures_ = 0;                        // since the last good chunk
  Clock::time_point since_ = Clock::now();  // when the last byte of an answer came
  bool final_ = false;
  bool no_place_ = false;  // here, for what came
};

/// Of several threads.
class FirstError {
 public:
  void note(Result<> result) {
    MutexLock lock(mutex_);
    if (!result && !error_) error_ = std::move(result).error();
  }
  void note(const std::string& node, std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::exception& error) {  // no memory
      note(make_error(Code::kNoSpace, "fetching from node {}: {}", node, error.what()));
    }
  }
  Result<> take() {
    MutexLock lock(mutex_);
    if (error_) return *std::move(error_);
    return ok();
  }

 private:
  Mutex mutex_;
  std::optional<Error> error_ PTC_GUARDED_BY(mutex_);
};

class TcpTransport final : public Transport {
 public:
  TcpTransport(Peers& peers, std::unique_ptr<Transport> local)
      : peers_(peers), local_(std::move(local)) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds silence) override {
    std::map<std::string, std::vector<FetchItem*>> nodes;
    std::vector<FetchItem*> here;
    for (FetchItem& item : items) {
      if (item.source->is_here()) {
        here.push_back(&item);
        continue;
      }
      PTC_TRY(check_in_host_memory({&item, 1}));
      nodes[item.source->node()].push_back(&item);
    }
    if (nodes.empty()) return local_->fetch(items, std::move(stop));

    FirstError first_error;
    std::latch others(static_cast<ptrdiff_t>(nodes.size() - (here.empty() ? 1 : 0)));
    auto mine = nodes.begin();  // by this thread, if there is nothing else for it to do
    for (auto node = here.empty() ? std::next(mine) : mine; node != nodes.end(); ++node) {
      auto fetch = [&, node]() -> asio::awaitable<void> {
        NodeFetch one(peers_, node->first, std::move(node->second), stop, silence);
        first_error.note(co_await one.run());
      };
      auto end = [&, node](std::exception_ptr thrown) {
        first_error.note(node->first, thrown);
        others.count_down();
      };
      asio::co_spawn(peers_.io().next(), std::move(fetch), std::move(end));
    }
    if (here.empty()) {
      NodeFetch one(peers_, mine->first, std::move(mine->second), stop, silence);
      first_error.note(run_here([&](IoExecutor) { return one.run(); }));
    } else {
      first_error.note(fetch_here(here, stop));
    }
    others.wait();
    return first_error.take();
  }

 private:
  Result<> fetch_here(const std::vector<FetchItem*>& wanted, const std::stop_token& stop) {
    std::vector<FetchItem> items;
    for (const FetchItem* item : wanted) items.push_back(*item);
    auto result = local_->fetch(items, stop);
    for (size_t i = 0; i < items.size(); ++i) *wanted[i] = items[i];
    return result;
  }

  Peers& peers_;
  const std::unique_ptr<Transport> local_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(Peers& peers, std::unique_ptr<Transport> local) {
  return std::make_unique<TcpTransport>(peers, std::move(local));
}

}  // namespace ptc
