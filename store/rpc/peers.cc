#include "store/rpc/peers.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/net/address.h"
#include "store/rpc/connection.h"
#include "store/rpc/handshake.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr auto kKeep = std::chrono::seconds(60);  // shorter than a server's patience
constexpr size_t kKeepCount = 8;                  // for each node
constexpr size_t kConnectAtOnce = 256;            // of one thread
// Of the nodes that one meets: as many join, and each of these has others at its door.
constexpr size_t kMeetAtOnce = 64;
constexpr std::chrono::milliseconds kFirstPause{20}, kLongestPause{1000};

}  // namespace

Error broken_off(std::string message) {
  return Error(Code::kUnavailable, std::move(message), ECONNRESET);
}

bool is_broken_off(const Error& error) {
  return error.code() == Code::kUnavailable && error.errno_value() == ECONNRESET;
}

/// Of coroutines of one executor: so many at a time.
class Peers::Turns {
 public:
  Turns(const IoExecutor& executor, size_t at_once)
      : left_(at_once), next_(executor, asio::steady_timer::time_point::max()) {}
  struct GiveBack {
    void operator()(Turns* turns) const {
      ++turns->left_;
      turns->next_.cancel_one();
    }
  };
  using Held = std::unique_ptr<Turns, GiveBack>;
  asio::awaitable<Held> take() {
    while (left_ == 0) co_await next_.async_wait(kTuple);
    --left_;
    co_return Held(this);
  }

 private:
  size_t left_;
  asio::steady_timer next_;  // never ends by itself
};

struct Peers::Turn {
  Turns::Held held;
};

struct Peers::Impl {
  /// Who was turned away comes again later and later, and not all at the same moment.
  class Pauses {
   public:
    std::chrono::milliseconds next() {
      thread_local std::minstd_rand random{std::random_device()()};
      const auto longest = std::exchange(longest_, std::min(2 * longest_, kLongestPause));
      return std::chrono::milliseconds(
          std::uniform_int_distribution<int64_t>(longest.count() / 2, longest.count())(random));
    }

   private:
    std::chrono::milliseconds longest_ = kFirstPause;
  };

  struct Kept {
    std::unique_ptr<Connection> connection;
    Deadline until;
  };
  struct Peer {
    std::string address;
    std::vector<Kept> kept;  // the last one was used last
  };

  PeersOptions options;
  Identity self;
  PeerCounterTable counters;
  std::atomic<uint64_t> next_request{1};
  Mutex mutex;
  std::map<std::string, Peer> peers PTC_GUARDED_BY(mutex);

  Result<std::string> address_of(const std::string& node);
  std::unique_ptr<Connection> take_kept(const std::string& node);
  Task<std::unique_ptr<Connection>> connect(const std::string& node, const std::string& address,
                                            Deadline deadline, std::stop_token stop);
  Task<std::unique_ptr<Connection>> make(const std::string& node, const std::string& address,
                                         Deadline deadline, std::stop_token stop);
  Task<std::string> exchange(Connection& connection, std::string_view method,
                             std::string_view body);
};

std::unique_ptr<Connection> Peers::Impl::take_kept(const std::string& node) {
  MutexLock lock(mutex);
  auto found = peers.find(node);
  if (found == peers.end()) return nullptr;
  auto& kept = found->second.kept;
  std::erase_if(kept, [now = std::chrono::steady_clock::now()](const Kept& one) {
    return one.until < now || !one.connection->looks_alive();
  });
  if (kept.empty()) return nullptr;
  auto connection = std::move(kept.back().connection);
  kept.pop_back();
  return connection;
}

Result<std::string> Peers::Impl::address_of(const std::string& node) {
  MutexLock lock(mutex);
  auto found = peers.find(node);
  if (found == peers.end())
    return make_error(Code::kUnavailable, "node {} is not there: nobody said its address", node);
  return found->second.address;
}

Task<std::unique_ptr<Connection>> Peers::Impl::make(const std::string& node,
                                                    const std::string& text, Deadline deadline,
                                                    std::stop_token stop) {
  PTC_CO_TRY(auto address, PeerAddress::parse(text));
  deadline = std::min(deadline, std::chrono::steady_clock::now() + options.connect);
  Patience patience{options.connect, deadline, std::move(stop)};
  PTC_CO_TRY(auto socket, co_await connect_to(std::move(address), patience));
  auto connection = std::make_unique<Connection>(std::move(socket), text);
  auto counted = counters.of(node);
  connection->count_in(counted);
  connection->set_patience(std::move(patience));
  connection->attach(co_await asio::this_coro::executor);
  auto greeted = co_await greet(*connection, self, node);
  if (!greeted) {
    const bool closed = greeted.error().code() == Code::kUnavailable &&
                        !connection->error_was_said() && !connection->looks_alive();
    if (closed) co_return broken_off(greeted.error().message());
    co_return std::move(greeted).error();
  }
  ++counted->connections;
  co_return connection;
}

Task<std::unique_ptr<Connection>> Peers::Impl::connect(const std::string& node,
                                                       const std::string& text, Deadline deadline,
                                                       std::stop_token stop) {
  auto made = co_await make(node, text, deadline, std::move(stop));
  if (!made)
    co_return std::move(made).error().with_context(fmt::format("node {} ({})", node, text));
  co_return made;
}

Task<std::string> Peers::Impl::exchange(Connection& connection, std::string_view method,
                                        std::string_view body) {
  const uint64_t request = next_request++;
  const CallHeader call{std::string(method), body.size()};
  PTC_CO_TRY(co_await connection.send(FrameType::kCall, request, encode(call)));
  PTC_CO_TRY(co_await connection.send_data(request, body));
  PTC_CO_TRY(auto announced, co_await connection.expect(FrameType::kReply, request));
  PTC_CO_TRY(auto reply, decode_call(announced));
  if (reply.body_bytes > kMaxCallBytes)
    co_return make_error(Code::kCorrupt, "an answer of {} bytes", reply.body_bytes);
  co_return co_await connection.receive_data(request, reply.body_bytes);
}

Peers::Peers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Peers::~Peers() = default;

Result<std::unique_ptr<Peers>> Peers::create(PeersOptions options) {
  auto impl = std::make_unique<Impl>();
  PTC_TRY(auto credentials, Credentials::load(options.auth));
  impl->self = {options.node, options.cluster, std::move(credentials)};
  impl->options = std::move(options);
  if (!impl->options.io) {
    PTC_TRY(impl->options.io, IoThreads::start());
  }
  return std::unique_ptr<Peers>(new Peers(std::move(impl)));
}

void Peers::set(const std::string& node, const std::string& address) {
  std::vector<Impl::Kept> old;  // closed without the lock
  MutexLock lock(impl_->mutex);
  Impl::Peer& peer = impl_->peers[node];
  if (peer.address == address) return;
  peer.address = address;
  old.swap(peer.kept);
}

void Peers::remove(const std::string& node) {
  MutexLock lock(impl_->mutex);
  impl_->peers.erase(node);
}

Task<std::unique_ptr<Connection>> Peers::take(const std::string& node, Deadline deadline,
                                              std::stop_token stop) {
  if (auto kept = impl_->take_kept(node)) {
    kept->attach(co_await asio::this_coro::executor);
    co_return kept;
  }
  PTC_CO_TRY(auto address, impl_->address_of(node));
  co_return co_await impl_->connect(node, address, deadline, std::move(stop));
}

Task<> Peers::meet_until(const std::string& node, const std::string& address, Deadline last_try,
                         bool keep) {
  auto met = co_await impl_->connect(node, address, Deadline::max(), {});
  for (Impl::Pauses pauses; !met && is_broken_off(met.error());) {
    const auto wait = pauses.next();
    if (std::chrono::steady_clock::now() + wait >= last_try) break;
    co_await pause(wait, {});
    met = co_await impl_->connect(node, address, last_try, {});
  }
  if (!met) co_return std::move(met).error();
  if (keep) give_back(node, std::move(met).value());
  else met.value()->detach();
  co_return ok();
}

Result<> Peers::meet(const std::string& node, const std::string& address) {
  const Deadline last_try = std::chrono::steady_clock::now() + impl_->options.connect;
  return run_here([&](IoExecutor) { return meet_until(node, address, last_try, false); });
}

std::vector<Peers::Met> Peers::meet_all(const std::vector<Place>& places, std::string_view method,
                                        std::string_view body, std::chrono::milliseconds timeout) {
  const Error not_met(Code::kUnavailable, "was not met");
  std::vector<Met> results(places.size(), Met{not_met, not_met});
  auto one = [&](size_t i) -> asio::awaitable<void> {
    const Place& place = places[i];
    Met& result = results[i];
    const Deadline last_try = std::chrono::steady_clock::now() + timeout;
    result.let_in = co_await meet_until(place.node, place.address, last_try, true);
    if (!result.let_in) co_return;
    const Deadline deadline = std::chrono::steady_clock::now() + timeout;
    result.answer = co_await ask(place.node, method, body, deadline, {});
    if (!result.answer && is_broken_off(result.answer.error()))
      result.answer = co_await ask(place.node, method, body, deadline, {});
  };
  auto all = [&](IoExecutor) -> Task<> {
    std::function<asio::awaitable<void>(size_t)> work = one;
    co_await for_each_of(places.size(), kMeetAtOnce, std::move(work));
    co_return ok();
  };
  auto met = run_here(all);
  for (Met& one_of_them : results)
    if (!met && !one_of_them.let_in) one_of_them.let_in = met.error();
  return results;
}

void Peers::give_back(const std::string& node, std::unique_ptr<Connection> connection) {
  connection->detach();
  connection->set_patience({});
  MutexLock lock(impl_->mutex);
  auto found = impl_->peers.find(node);
  if (found == impl_->peers.end() || found->second.address != connection->dialed()) return;
  auto& kept = found->second.kept;
  if (kept.size() < kKeepCount)
    kept.push_back({std::move(connection), std::chrono::steady_clock::now() + kKeep});
}

/// A node that is too busy has not begun: it is asked again while there is time.
Task<std::string> Peers::ask(const std::string& node, std::string_view method,
                             std::string_view body, Deadline deadline, std::stop_token stop,
                             Turn* turn) {
  auto answer = co_await ask_once(node, method, body, deadline, stop, turn);
  for (Impl::Pauses pauses; !answer && is_too_busy(answer.error());) {
    const auto wait = pauses.next();
    if (std::chrono::steady_clock::now() + wait >= deadline) break;
    co_await pause(wait, stop);
    if (stop.stop_requested()) co_return Error(Code::kCancelled, "cancelled");
    answer = co_await ask_once(node, method, body, deadline, stop, turn);
  }
  co_return answer;
}

/// Counted, unless nobody wants its answer any more.
Task<std::string> Peers::ask_once(const std::string& node, std::string_view method,
                                  std::string_view body, Deadline deadline, std::stop_token stop,
                                  Turn* turn) {
  const auto began = std::chrono::steady_clock::now();
  bool said = false;
  auto answer = co_await ask_over_one(node, method, body, deadline, std::move(stop), turn, said);
  if (!answer && answer.error().code() == Code::kCancelled) co_return answer;
  const std::shared_ptr<PeerCounters> counted = counters(node);
  ++counted->calls;
  if (!said) ++counted->failed_calls;
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
  counted->call_ns += static_cast<uint64_t>(took.count());
  co_return answer;
}

Task<std::string> Peers::ask_over_one(const std::string& node, std::string_view method,
                                      std::string_view body, Deadline deadline,
                                      std::stop_token stop, Turn* turn, bool& said) {
  if (body.size() > kMaxCallBytes || method.empty() || method.size() > kMaxNameBytes)
    co_return invalid_argument("a call of {} with {} bytes, more than {}", quoted(method),
                               body.size(), kMaxCallBytes);
  auto taken = co_await take(node, deadline, stop);
  if (turn != nullptr) turn->held.reset();
  PTC_CO_TRY(auto connection, std::move(taken));
  connection->set_patience({impl_->options.silence, deadline, stop});
  const Deadline asked = std::chrono::steady_clock::now();
  auto answer = co_await impl_->exchange(*connection, method, body);
  said = answer || connection->error_was_said();
  if (said) {
    give_back(node, std::move(connection));
    co_return answer;
  }
  if (answer.error().code() == Code::kCancelled) co_return answer;
  ++counters(node)->broken_connections;
  std::string message =
      fmt::format("node {} ({}): {}; whether it has done {} is not known", node,
                  connection->peer_address(), answer.error().message(), quoted(method));
  const Deadline now = std::chrono::steady_clock::now();
  const Deadline heard = std::max(asked, connection->last_received());
  if (now >= deadline || now - heard >= impl_->options.silence)
    co_return Error(Code::kUnavailable, std::move(message));
  co_return broken_off(std::move(message));
}

Result<std::string> Peers::call(const std::string& node, std::string_view method,
                                std::string_view body, std::chrono::milliseconds timeout,
                                std::stop_token stop) {
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;
  return run_here([&](IoExecutor) { return ask(node, method, body, deadline, stop); });
}

/// Its time begins when it is its turn.
Task<std::string> Peers::ask_in_turn(const Call& call, const Manner& manner,
                                     std::chrono::milliseconds timeout, std::stop_token stop,
                                     Turns& turns) {
  Turn turn;
  turn.held = co_await turns.take();
  const Deadline now = std::chrono::steady_clock::now();
  if (now >= manner.until)
    co_return make_error(Code::kUnavailable, "node {}: there was no time left to ask it",
                         call.node);
  const Deadline deadline = timeout < manner.until - now ? now + timeout : manner.until;
  auto answer = co_await ask(call.node, call.method, call.body, deadline, stop, &turn);
  if (!manner.again || answer || !is_broken_off(answer.error())) co_return answer;
  if (stop.stop_requested() || std::chrono::steady_clock::now() >= deadline) co_return answer;
  turn.held = co_await turns.take();
  co_return co_await ask(call.node, call.method, call.body, deadline, std::move(stop), &turn);
}

std::vector<Result<std::string>> Peers::call_all(const std::vector<Call>& calls, Manner manner,
                                                 std::chrono::milliseconds timeout,
                                                 std::stop_token stop) {
  std::vector<Result<std::string>> answers(calls.size(),
                                           Error(Code::kUnavailable, "was not asked"));
  std::optional<Turns> turns;
  auto one = [&](size_t i) -> asio::awaitable<void> {
    Call call = calls[i];
    answers[i] = co_await ask_in_turn(call, manner, timeout, stop, *turns);
    for (std::string body; manner.then;) {
      std::optional<NextCall> next = manner.then(i, answers[i]);
      if (!next) break;
      body = std::move(next->body);
      call.body = body;
      if (next->after > next->after.zero()) co_await pause(next->after, stop);
      if (stop.stop_requested()) {
        answers[i] = Error(Code::kCancelled, "cancelled");
        break;
      }
      answers[i] = co_await ask_in_turn(call, manner, timeout, stop, *turns);
    }
  };
  auto all = [&](IoExecutor executor) -> Task<> {
    turns.emplace(executor, kConnectAtOnce);
    std::function<asio::awaitable<void>(size_t)> work = one;
    co_await for_each_of(calls.size(), manner.at_once, std::move(work));
    co_return ok();
  };
  auto asked = run_here(all);
  for (auto& answer : answers)
    if (!asked && !answer) answer = asked.error();
  return answers;
}

std::shared_ptr<PeerCounters> Peers::counters(const std::string& node) {
  return impl_->counters.of(node);
}
std::chrono::milliseconds Peers::silence() const { return impl_->options.silence; }
IoThreads& Peers::io() const { return *impl_->options.io; }
std::vector<PeerNumbers> Peers::numbers() const { return impl_->counters.numbers(); }

}  // namespace ptc
