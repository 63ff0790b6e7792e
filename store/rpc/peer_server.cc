#include "store/rpc/peer_server.h"

#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "store/base/json.h"
#include "store/base/log_rate.h"
#include "store/rpc/connection.h"
#include "store/rpc/fetch_sender.h"
#include "store/rpc/handshake.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr auto kPingEvery = std::chrono::seconds(1);
constexpr unsigned kLinesOfStrangers = 5;
constexpr auto kEach = std::chrono::seconds(10);

Deadline in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

}  // namespace

struct PeerServer::Impl {
  PeerServerOptions options;
  Identity self;
  Listener listener;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> refused{0};
  PeerCounterTable counters;
  LogRate told{kLinesOfStrangers, kEach};
  std::thread acceptor;
  mutable std::mutex mutex;
  std::condition_variable one_less;
  struct Stranger {
    Connection* connection;
    std::string host;
  };
  std::set<Connection*> open;                                        // guarded by mutex
  std::list<Stranger> strangers;  // of those the ones that are not let in yet, as they came; guarded by mutex
  std::set<Connection*> admitted;  // those that are, and were not cut since; guarded by mutex
  std::map<Connection*, Deadline> idle;  // of these the ones between two requests, and since when; guarded by mutex
  std::map<std::string, std::shared_ptr<const Handler>> handlers;  // guarded by mutex

  void accept_all();
  void take_in(UniqueFd socket);
  void cut_a_stranger();
  void is_no_stranger(const Connection* connection);
  std::optional<Connection*> longest_idle() const;
  void let_in(Connection& connection);
  void set_idle(Connection& connection, bool is_idle);
  void forget(Connection* connection);
  void serve(Connection& connection);
  Result<> serve_requests(Connection& connection, const std::string& from_node);
  Result<> serve_call(Connection& connection, const FrameHeader& header,
                      const std::string& from_node);
  Result<std::string> run(Connection& connection, uint64_t request, const std::string& method,
                          const std::string& body, const std::string& from_node);
  std::shared_ptr<const Handler> handler_of(const std::string& method) const;
};

void PeerServer::Impl::accept_all() {
  while (!stopping) {
    pollfd waiting{listener.fd.get(), POLLIN, 0};
    if (::poll(&waiting, 1, -1) < 0) continue;
    UniqueFd socket(::accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (stopping) return;
    if (socket.valid()) {
      take_in(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      spdlog::error("peers: a connection waits: {}", ::strerror(errno));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
}

void PeerServer::Impl::take_in(UniqueFd socket) {
  auto connection = std::make_shared<Connection>(std::move(socket));
  {
    std::lock_guard lock(mutex);
    if (admitted.size() >= options.max_connections && !longest_idle()) {
      ++refused;
      if (const auto more = told.pass())
        spdlog::warn("peers: {} is refused, {} connections are open, and none is idle{}", connection->peer_address(),
                     admitted.size(), *more);
      return;
    }
    if (strangers.size() >= options.max_strangers) cut_a_stranger();
    open.insert(connection.get());
    const std::string& address = connection->peer_address();
    strangers.push_back({connection.get(), address.substr(0, address.rfind(':'))});
  }
  auto work = [this, connection] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-peer");
    try {
      serve(*connection);
    } catch (const std::exception& error) {  // no memory
      spdlog::error("peers: {}: {}", connection->peer_address(), error.what());
    }
    connection->cut();
    forget(connection.get());
  };
  try {
    std::thread(work).detach();
  } catch (const std::system_error& error) {
    spdlog::error("peers: no thread for {}: {}", connection->peer_address(), error.what());
    forget(connection.get());
  }
}

void PeerServer::Impl::forget(Connection* connection) {
  is_no_stranger(connection);
  std::lock_guard lock(mutex);
  admitted.erase(connection);
  idle.erase(connection);
  open.erase(connection);
  one_less.notify_all();
}

/// Under `mutex`. One that has just got a request is none.
std::optional<Connection*> PeerServer::Impl::longest_idle() const {
  std::optional<Connection*> found;
  Deadline since = Deadline::max();
  for (const auto& [connection, began] : idle)
    if (began < since && connection->looks_alive()) {
      found = connection;
      since = began;
    }
  return found;
}

/// Each peer keeps some connections for later (Peers), and makes others when these are closed.
void PeerServer::Impl::let_in(Connection& connection) {
  is_no_stranger(&connection);
  std::lock_guard lock(mutex);
  if (admitted.size() >= options.max_connections) {
    if (const auto gives_way = longest_idle()) {  // else there are as many more as were strangers at once
      (*gives_way)->cut();
      idle.erase(*gives_way);
      admitted.erase(*gives_way);
    }
  }
  admitted.insert(&connection);
}

void PeerServer::Impl::set_idle(Connection& connection, bool is_idle) {
  std::lock_guard lock(mutex);
  if (!is_idle) idle.erase(&connection);
  else if (admitted.contains(&connection)) idle[&connection] = std::chrono::steady_clock::now();
}

/// Whoever holds connections open and says nothing takes the places of its own: under `mutex`.
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
  std::lock_guard lock(mutex);
  strangers.remove_if([&](const Stranger& one) { return one.connection == connection; });
}

void PeerServer::Impl::serve(Connection& connection) {
  connection.set_patience({options.handshake, in(options.handshake), {}});
  auto from_node = admit(connection, self);
  if (!from_node) {
    is_no_stranger(&connection);
    ++refused;
    if (const auto more = stopping ? std::nullopt : told.pass())
      spdlog::warn("peers: {} was not let in: {}{}", connection.peer_address(), from_node.error().message(), *more);
    return connection.linger();
  }
  let_in(connection);
  auto counted = counters.of(from_node.value());
  connection.count_in(counted);
  ++counted->connections;
  auto served = serve_requests(connection, from_node.value());
  if (served || stopping) return;
  ++counted->broken_connections;
  const bool nonsense = served.error().code() == Code::kCorrupt;
  spdlog::log(nonsense ? spdlog::level::warn : spdlog::level::debug, "peers: node {} ({}): {}",
              from_node.value(), connection.peer_address(), served.error().message());
}

Result<> PeerServer::Impl::serve_requests(Connection& connection, const std::string& from_node) {
  connection.set_patience({options.silence, Deadline::max(), {}});
  for (;;) {
    set_idle(connection, true);
    auto request = connection.wait_for_request(options.idle);
    set_idle(connection, false);
    if (!request || !request.value()) return ok();
    PTC_TRY(auto header, connection.receive_header());
    if (header.type == FrameType::kCall) {
      PTC_TRY(serve_call(connection, header, from_node));
    } else if (header.type == FrameType::kFetch) {
      PTC_TRY(auto body, connection.receive_body(header));
      PTC_TRY(auto fetch, decode_fetch(body));
      PTC_TRY(FetchSender(connection, *options.images).send(header.request, fetch));
    } else {
      return unexpected(header);
    }
  }
}

Result<> PeerServer::Impl::serve_call(Connection& connection, const FrameHeader& header,
                                      const std::string& from_node) {
  PTC_TRY(auto body, connection.receive_body(header));
  PTC_TRY(auto call, decode_call(body));
  if (call.body_bytes > kMaxCallBytes)
    return make_error(Code::kCorrupt, "a call of {} bytes", call.body_bytes);
  PTC_TRY(body, connection.receive_data(header.request, call.body_bytes));
  auto answer = run(connection, header.request, call.method, body, from_node);
  if (answer && answer.value().size() > kMaxCallBytes)
    answer = make_error(Code::kInternal, "the answer to {} has {} bytes, more than {}",
                        call.method, answer.value().size(), kMaxCallBytes);
  if (!answer) return connection.send(FrameType::kError, header.request, encode(answer.error()));
  PTC_TRY(connection.send(FrameType::kReply, header.request,
                          encode(CallHeader{"", answer.value().size()})));
  return connection.send_data(header.request, answer.value());
}

/// Runs the handler on a thread of its own; meanwhile the peer hears that this node lives.
Result<std::string> PeerServer::Impl::run(Connection& connection, uint64_t request,
                                          const std::string& method, const std::string& body,
                                          const std::string& from_node) {
  auto handler = handler_of(method);
  if (!handler)
    return make_error(Code::kUnavailable, "node {} does not answer {}, or not yet", self.node,
                      quoted(method));
  auto answer = std::async(std::launch::async, [&]() -> Result<std::string> {
    ::pthread_setname_np(::pthread_self(), "ptcfs-call");
    try {
      return (*handler)(body, from_node);
    } catch (const std::exception& error) {
      spdlog::error("peers: {} of node {}: {}", method, from_node, error.what());
      return make_error(Code::kInternal, "{}", error.what());
    }
  });
  bool listening = true;
  while (answer.wait_for(kPingEvery) != std::future_status::ready)
    listening = listening && connection.send(FrameType::kPing, request).has_value();
  return answer.get();
}

std::shared_ptr<const PeerServer::Handler> PeerServer::Impl::handler_of(
    const std::string& method) const {
  std::lock_guard lock(mutex);
  auto found = handlers.find(method);
  return found == handlers.end() ? nullptr : found->second;
}

PeerServer::PeerServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<PeerServer>> PeerServer::start(PeerServerOptions options) {
  PTC_CHECK(options.images != nullptr);
  auto impl = std::make_unique<Impl>();
  PTC_TRY(auto credentials, Credentials::load(options.auth));
  PTC_TRY(auto address, PeerAddress::parse(options.listen));
  PTC_TRY(impl->listener, listen_on(address));
  if (!impl->listener.loopback && !credentials->authenticates()) {
    if (!options.auth.insecure)
      return invalid_argument(
          "listening for nodes on {}, where others than this machine can connect, needs a shared "
          "secret or certificates, or the word that it may be without",
          impl->listener.address);
    spdlog::warn("peers: {} takes connections of anybody: there is no authentication",
                 impl->listener.address);
  }
  spdlog::debug("peers: listens on {}", impl->listener.address);
  impl->self = {options.node, options.cluster, std::move(credentials)};
  impl->options = std::move(options);
  impl->acceptor = std::thread([impl = impl.get()] {
    ::pthread_setname_np(::pthread_self(), "ptcfs-peers");
    impl->accept_all();
  });
  return std::unique_ptr<PeerServer>(new PeerServer(std::move(impl)));
}

PeerServer::~PeerServer() {
  impl_->stopping = true;
  ::shutdown(impl_->listener.fd.get(), SHUT_RDWR);  // wakes poll
  impl_->acceptor.join();
  std::unique_lock lock(impl_->mutex);
  for (Connection* connection : impl_->open) connection->cut();
  impl_->one_less.wait(lock, [&] { return impl_->open.empty(); });
}

uint16_t PeerServer::port() const { return impl_->listener.port; }
std::string PeerServer::address() const { return impl_->listener.address; }

void PeerServer::handle(std::string method, Handler handler) {
  std::lock_guard lock(impl_->mutex);
  impl_->handlers[std::move(method)] = std::make_shared<const Handler>(std::move(handler));
}

std::vector<PeerNumbers> PeerServer::numbers() const { return impl_->counters.numbers(); }
uint64_t PeerServer::refused() const { return impl_->refused; }

}  // namespace ptc
