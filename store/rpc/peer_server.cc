#include "store/rpc/peer_server.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <exception>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "store/base/json.h"
#include "store/base/log_rate.h"
#include "store/base/mutex.h"
#include "store/base/spare_threads.h"
#include "store/net/address.h"
#include "store/rpc/connection.h"
#include "store/rpc/device_sender.h"
#include "store/rpc/fetch_sender.h"
#include "store/rpc/handshake.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr auto kPingEvery = std::chrono::seconds(1);
constexpr size_t kReadAtOnce = 16;  // chunks that come from disks
constexpr unsigned kLinesOfStrangers = 5;
constexpr auto kEach = std::chrono::seconds(10);

Deadline in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

}  // namespace

struct PeerServer::Impl {
  PeerServerOptions options;
  Identity self;
  std::optional<Socket> listener;
  std::string address;
  uint16_t port = 0;
  std::stop_source stop;
  std::atomic<uint64_t> refused{0};
  PeerCounterTable counters;
  LogRate told{kLinesOfStrangers, kEach};
  mutable Mutex mutex;
  ConditionVariable one_less;
  struct Stranger {
    Connection* connection;
    std::string host;
  };
  bool accepting PTC_GUARDED_BY(mutex) = false;
  std::set<Connection*> open PTC_GUARDED_BY(mutex);
  std::list<Stranger> strangers
      PTC_GUARDED_BY(mutex);  // of those the ones that are not let in yet, as they came
  std::set<Connection*> admitted PTC_GUARDED_BY(mutex);  // those that are, and were not cut since
  std::list<Connection*> idle
      PTC_GUARDED_BY(mutex);  // of these the ones between two requests, longest first
  std::unordered_map<Connection*, std::list<Connection*>::iterator> idle_at PTC_GUARDED_BY(mutex);
  struct Method {
    Handler handler;
    Pace pace;
  };
  using MethodRef = std::shared_ptr<const Method>;
  std::map<std::string, MethodRef> methods PTC_GUARDED_BY(mutex);
  bool handles_all PTC_GUARDED_BY(mutex) = false;
  std::atomic<size_t> waiting{0};  // calls that may wait
  SpareThreads calls{"ptcfs-call"}, calls_at_once{"ptcfs-answer", kThreadsAtOnce};
  SpareThreads readers{"ptcfs-read", kReadAtOnce};
  SpareThreads senders{"ptcfs-link"};  // as many as there are links

  bool stopping() const { return stop.stop_requested(); }
  asio::awaitable<void> accept_all();
  void take_in(UniqueFd socket);
  void has_ended(Connection* connection);
  void cut_a_stranger() PTC_REQUIRES(mutex);
  void is_no_stranger(const Connection* connection);
  std::optional<Connection*> longest_idle() PTC_REQUIRES(mutex);
  void is_not_idle(Connection* connection) PTC_REQUIRES(mutex);
  void let_in(Connection& connection);
  void set_idle(Connection& connection, bool is_idle);
  asio::awaitable<void> serve(Connection& connection);
  Task<> serve_requests(Connection& connection, const std::string& from_node);
  Task<> serve_call(Connection& connection, FrameHeader header, const std::string& from_node);
  Task<std::string> run(Connection& connection, uint64_t request, const std::string& method,
                        std::string body, const std::string& from_node);
  Result<MethodRef> method_of(const std::string& name) const;
  bool may_begin(Pace pace);
  void has_answered(Pace pace);
};

asio::awaitable<void> PeerServer::Impl::accept_all() {
  while (!stopping()) {
    auto ready = co_await listener->wait(Socket::For::kReading);
    if (!ready) continue;
    UniqueFd socket(::accept4(listener->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (stopping()) co_return;
    if (socket.valid()) {
      take_in(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      spdlog::error("peers: a connection waits: {}", ::strerror(errno));
      co_await pause(std::chrono::milliseconds(100), stop.get_token());
    }
  }
}

void PeerServer::Impl::take_in(UniqueFd socket) {
  auto connection = std::make_shared<Connection>(std::move(socket));
  {
    MutexLock lock(mutex);
    if (admitted.size() >= options.max_connections && !longest_idle()) {
      ++refused;
      if (const auto more = told.pass())
        spdlog::warn("peers: {} is refused, {} connections are open, and none is idle{}",
                     connection->peer_address(), admitted.size(), *more);
      return;
    }
    if (strangers.size() >= options.max_strangers) cut_a_stranger();
    open.insert(connection.get());
    const std::string& peer = connection->peer_address();
    strangers.push_back({connection.get(), peer.substr(0, peer.rfind(':'))});
  }
  const IoExecutor executor = options.io->next();
  auto end = [this, connection](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::exception& error) {  // no memory
      spdlog::error("peers: {}: {}", connection->peer_address(), error.what());
    }
    has_ended(connection.get());
  };
  auto begin = [this, connection, executor]() -> asio::awaitable<void> {
    connection->attach(executor);
    co_await serve(*connection);
  };
  asio::co_spawn(executor, std::move(begin), std::move(end));
}

void PeerServer::Impl::has_ended(Connection* connection) {
  connection->cut();
  connection->detach();
  is_no_stranger(connection);
  MutexLock lock(mutex);
  admitted.erase(connection);
  is_not_idle(connection);
  open.erase(connection);
  one_less.notify_all();
}

/// One that has just got a request is none; where the next few are none, too, nobody
/// looks at all the others.
std::optional<Connection*> PeerServer::Impl::longest_idle() {
  constexpr int kLookedAt = 8;
  for (int looked = 0; looked < kLookedAt && !idle.empty(); ++looked) {
    if (idle.front()->looks_alive()) return idle.front();
    idle.splice(idle.end(), idle, idle.begin());
  }
  return std::nullopt;
}

void PeerServer::Impl::is_not_idle(Connection* connection) {
  const auto known = idle_at.find(connection);
  if (known == idle_at.end()) return;
  idle.erase(known->second);
  idle_at.erase(known);
}

/// Each peer keeps some connections for later (Peers), and makes others when these are closed.
void PeerServer::Impl::let_in(Connection& connection) {
  is_no_stranger(&connection);
  MutexLock lock(mutex);
  if (admitted.size() >= options.max_connections) {
    if (const auto gives_way =
            longest_idle()) {  // else there are as many more as were strangers at once
      (*gives_way)->cut();
      is_not_idle(*gives_way);
      admitted.erase(*gives_way);
    }
  }
  admitted.insert(&connection);
}

void PeerServer::Impl::set_idle(Connection& connection, bool is_idle) {
  MutexLock lock(mutex);
  is_not_idle(&connection);
  if (is_idle && admitted.contains(&connection))
    idle_at[&connection] = idle.insert(idle.end(), &connection);
}

/// Whoever holds connections open and says nothing takes the places of its own.
void PeerServer::Impl::cut_a_stranger() {
  std::map<std::string_view, size_t> of_host;
  for (const Stranger& one : strangers) ++of_host[one.host];
  size_t most = 0;
  for (const auto& [host, count] : of_host) most = std::max(most, count);
  const auto oldest = std::find_if(strangers.begin(), strangers.end(),
                                   [&](const Stranger& one) { return of_host[one.host] == most; });
  oldest->connection->cut();
  strangers.erase(oldest);
}

void PeerServer::Impl::is_no_stranger(const Connection* connection) {
  MutexLock lock(mutex);
  strangers.remove_if([&](const Stranger& one) { return one.connection == connection; });
}

asio::awaitable<void> PeerServer::Impl::serve(Connection& connection) {
  connection.set_patience({options.handshake, in(options.handshake), {}});
  auto from_node = co_await admit(connection, self);
  if (!from_node) {
    is_no_stranger(&connection);
    ++refused;
    if (const auto more = stopping() ? std::nullopt : told.pass())
      spdlog::warn("peers: {} was not let in: {}{}", connection.peer_address(),
                   from_node.error().message(), *more);
    co_return co_await connection.linger();
  }
  let_in(connection);
  auto counted = counters.of(from_node.value());
  connection.count_in(counted);
  ++counted->connections;
  auto served = co_await serve_requests(connection, from_node.value());
  if (served || stopping()) co_return;
  ++counted->broken_connections;
  const bool nonsense = served.error().code() == Code::kCorrupt;
  spdlog::log(nonsense ? spdlog::level::warn : spdlog::level::debug, "peers: node {} ({}): {}",
              from_node.value(), connection.peer_address(), served.error().message());
}

Task<> PeerServer::Impl::serve_requests(Connection& connection, const std::string& from_node) {
  connection.set_patience({options.silence, Deadline::max(), {}});
  for (;;) {
    set_idle(connection, true);
    auto request = co_await connection.wait_for_request(options.idle);
    set_idle(connection, false);
    if (!request || !request.value()) co_return ok();
    PTC_CO_TRY(auto header, co_await connection.receive_header());
    if (header.type == FrameType::kCall) {
      PTC_CO_TRY(co_await serve_call(connection, header, from_node));
    } else if (header.type == FrameType::kFetch) {
      PTC_CO_TRY(auto body, co_await connection.receive_body(header));
      PTC_CO_TRY(auto fetch, decode_fetch(body));
      FetchSender sender(connection, *options.images, readers);
      PTC_CO_TRY(co_await sender.send(header.request, fetch));
    } else if (header.type == FrameType::kDeviceFetch) {
      PTC_CO_TRY(auto body, co_await connection.receive_body(header));
      PTC_CO_TRY(auto fetch, decode_device_fetch(body));
      DeviceSender sender(connection, options.links, *options.images, senders, from_node);
      PTC_CO_TRY(co_await sender.send(header.request, fetch));
    } else {
      co_return unexpected(header);
    }
  }
}

Task<> PeerServer::Impl::serve_call(Connection& connection, FrameHeader header,
                                    const std::string& from_node) {
  PTC_CO_TRY(auto announced, co_await connection.receive_body(header));
  PTC_CO_TRY(auto call, decode_call(announced));
  if (call.body_bytes > kMaxCallBytes)
    co_return make_error(Code::kCorrupt, "a call of {} bytes", call.body_bytes);
  PTC_CO_TRY(auto body, co_await connection.receive_data(header.request, call.body_bytes));
  auto answer = co_await run(connection, header.request, call.method, std::move(body), from_node);
  if (answer && answer.value().size() > kMaxCallBytes)
    answer = make_error(Code::kInternal, "the answer to {} has {} bytes, more than {}", call.method,
                        answer.value().size(), kMaxCallBytes);
  if (!answer)
    co_return co_await connection.send(FrameType::kError, header.request, encode(answer.error()));
  const CallHeader reply{"", answer.value().size()};
  PTC_CO_TRY(co_await connection.send(FrameType::kReply, header.request, encode(reply)));
  co_return co_await connection.send_data(header.request, answer.value());
}

bool PeerServer::Impl::may_begin(Pace pace) {
  if (pace == Pace::kAtOnce) return true;
  if (waiting++ < options.max_calls) return true;
  --waiting;
  return false;
}

void PeerServer::Impl::has_answered(Pace pace) {
  if (pace == Pace::kMayWait) --waiting;
}

/// Runs the handler on another thread; meanwhile the peer hears that this node lives.
Task<std::string> PeerServer::Impl::run(Connection& connection, uint64_t request,
                                        const std::string& method, std::string body,
                                        const std::string& from_node) {
  auto found = method_of(method);
  if (!found) co_return std::move(found).error();
  const MethodRef to_run = std::move(found).value();
  std::optional<Result<std::string>> answer;  // written on this executor
  asio::steady_timer woken(co_await asio::this_coro::executor);
  std::function<void()> work = [&] {
    auto run_handler = [&]() -> Result<std::string> {
      try {
        return to_run->handler(body, from_node);
      } catch (const std::exception& error) {
        spdlog::error("peers: {} of node {}: {}", method, from_node, error.what());
        return make_error(Code::kInternal, "{}", error.what());
      }
    };
    auto result = std::make_shared<Result<std::string>>(run_handler());
    if (!*result && is_too_busy(result->error()))  // another node, perhaps; this one has begun
      *result = Error(Code::kUnavailable, result->error().message());
    has_answered(to_run->pace);
    asio::post(woken.get_executor(), [&answer, &woken, result] {
      answer = std::move(*result);
      woken.cancel();
    });
  };
  if (!may_begin(to_run->pace))
    co_return too_busy(
        fmt::format("node {} is busy: it answers {} calls already", self.node, options.max_calls));
  try {
    (to_run->pace == Pace::kAtOnce ? calls_at_once : calls).run(std::move(work));
  } catch (const std::exception& error) {  // no thread, no memory
    has_answered(to_run->pace);
    co_return too_busy(
        fmt::format("node {} has no thread for {}: {}", self.node, quoted(method), error.what()));
  }
  for (bool listening = true; !answer;) {
    woken.expires_after(kPingEvery);
    co_await woken.async_wait(kTuple);
    if (!answer && listening) {
      auto sent = co_await connection.send(FrameType::kPing, request);
      listening = sent.has_value();
    }
  }
  co_return *std::move(answer);
}

Result<PeerServer::Impl::MethodRef> PeerServer::Impl::method_of(const std::string& method) const {
  MutexLock lock(mutex);
  if (const auto found = methods.find(method); found != methods.end()) return found->second;
  if (!handles_all)
    return make_error(Code::kUnavailable, "node {} does not answer {} yet", self.node,
                      quoted(method));
  return invalid_argument("node {} knows no method {}: all nodes of a cluster run the same ptcfs",
                          self.node, quoted(method));
}

PeerServer::PeerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<PeerServer>> PeerServer::start(PeerServerOptions options) {
  PTC_CHECK(options.images != nullptr);
  auto impl = std::make_unique<Impl>();
  PTC_TRY(auto credentials, Credentials::load(options.auth));
  PTC_TRY(auto address, PeerAddress::parse(options.listen));
  PTC_TRY(auto listener, listen_on(address));
  if (!listener.loopback && !credentials->authenticates()) {
    if (!options.auth.insecure)
      return invalid_argument(
          "listening for nodes on {}, where others than this machine can connect, needs a shared "
          "secret or certificates, or the word that it may be without",
          listener.address);
    spdlog::warn("peers: {} takes connections of anybody: there is no authentication",
                 listener.address);
  }
  spdlog::debug("peers: listens on {}", listener.address);
  impl->address = std::move(listener.address);
  impl->port = listener.port;
  impl->self = {options.node, options.cluster, std::move(credentials)};
  impl->options = std::move(options);
  if (!impl->options.io) {
    PTC_TRY(impl->options.io, IoThreads::start());
  }
  impl->listener.emplace(std::move(listener.fd));
  impl->listener->set_patience({std::chrono::hours(1), Deadline::max(), impl->stop.get_token()});
  const IoExecutor executor = impl->options.io->next();
  impl->listener->attach(executor);
  {
    MutexLock lock(impl->mutex);
    impl->accepting = true;
  }
  auto end = [impl = impl.get()](std::exception_ptr) {
    impl->listener->detach();
    MutexLock lock(impl->mutex);
    impl->accepting = false;
    impl->one_less.notify_all();
  };
  asio::co_spawn(executor, impl->accept_all(), std::move(end));
  return std::unique_ptr<PeerServer>(new PeerServer(std::move(impl)));
}

PeerServer::~PeerServer() {
  impl_->stop.request_stop();
  MutexLock lock(impl_->mutex);
  impl_->one_less.wait(impl_->mutex,
                       [&]() PTC_REQUIRES(impl_->mutex) { return !impl_->accepting; });
  for (Connection* connection : impl_->open) connection->cut();
  impl_->one_less.wait(impl_->mutex,
                       [&]() PTC_REQUIRES(impl_->mutex) { return impl_->open.empty(); });
}

uint16_t PeerServer::port() const { return impl_->port; }
std::string PeerServer::address() const { return impl_->address; }

void PeerServer::handle(std::string method, Handler handler, Pace pace) {
  MutexLock lock(impl_->mutex);
  impl_->methods[std::move(method)] =
      std::make_shared<const Impl::Method>(Impl::Method{std::move(handler), pace});
}

void PeerServer::handles_all() {
  MutexLock lock(impl_->mutex);
  impl_->handles_all = true;
}

std::vector<PeerNumbers> PeerServer::numbers() const { return impl_->counters.numbers(); }
uint64_t PeerServer::refused() const { return impl_->refused; }

}  // namespace ptc
