#include "store/rpc/peers.h"

#include <atomic>
#include <map>
#include <mutex>

#include "store/base/json.h"
#include "store/rpc/connection.h"
#include "store/rpc/handshake.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr auto kKeep = std::chrono::seconds(60);  // shorter than a server's patience
constexpr size_t kKeepCount = 8;                  // for each node

}  // namespace

struct Peers::Impl {
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
  std::mutex mutex;
  std::map<std::string, Peer> peers;  // guarded by mutex

  Result<std::string> address_of(const std::string& node);
  std::unique_ptr<Connection> take_kept(const std::string& node);
  Result<std::unique_ptr<Connection>> connect(const std::string& node, const std::string& address, Deadline deadline,
                                              std::stop_token stop);
};

std::unique_ptr<Connection> Peers::Impl::take_kept(const std::string& node) {
  std::lock_guard lock(mutex);
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
  std::lock_guard lock(mutex);
  auto found = peers.find(node);
  if (found == peers.end())
    return make_error(Code::kUnavailable, "node {} is not there: nobody said its address", node);
  return found->second.address;
}

Result<std::unique_ptr<Connection>> Peers::Impl::connect(const std::string& node, const std::string& text,
                                                         Deadline deadline, std::stop_token stop) {
  auto make = [&]() -> Result<std::unique_ptr<Connection>> {
    PTC_TRY(auto address, PeerAddress::parse(text));
    deadline = std::min(deadline, std::chrono::steady_clock::now() + options.connect);
    PTC_TRY(auto socket, connect_to(address, deadline, stop));
    auto connection = std::make_unique<Connection>(std::move(socket), text);
    auto counted = counters.of(node);
    connection->count_in(counted);
    connection->set_patience({options.connect, deadline, stop});
    PTC_TRY(greet(*connection, self, node));
    ++counted->connections;
    return connection;
  };
  auto made = make();
  if (!made) return std::move(made).error().with_context(fmt::format("node {} ({})", node, text));
  return made;
}

Peers::Peers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Peers::~Peers() = default;

Result<std::unique_ptr<Peers>> Peers::create(PeersOptions options) {
  auto impl = std::make_unique<Impl>();
  PTC_TRY(auto credentials, Credentials::load(options.auth));
  impl->self = {options.node, options.cluster, std::move(credentials)};
  impl->options = std::move(options);
  return std::unique_ptr<Peers>(new Peers(std::move(impl)));
}

void Peers::set(const std::string& node, const std::string& address) {
  std::vector<Impl::Kept> old;  // closed without the lock
  std::lock_guard lock(impl_->mutex);
  Impl::Peer& peer = impl_->peers[node];
  if (peer.address == address) return;
  peer.address = address;
  old.swap(peer.kept);
}

void Peers::remove(const std::string& node) {
  std::lock_guard lock(impl_->mutex);
  impl_->peers.erase(node);
}

Result<std::unique_ptr<Connection>> Peers::take(const std::string& node, Deadline deadline,
                                                std::stop_token stop) {
  if (auto kept = impl_->take_kept(node)) return kept;
  PTC_TRY(auto address, impl_->address_of(node));
  return impl_->connect(node, address, deadline, std::move(stop));
}

Result<> Peers::meet(const std::string& node, const std::string& address) {
  PTC_TRY(impl_->connect(node, address, Deadline::max(), {}));
  return ok();
}

void Peers::give_back(const std::string& node, std::unique_ptr<Connection> connection) {
  connection->set_patience({});
  std::lock_guard lock(impl_->mutex);
  auto found = impl_->peers.find(node);
  if (found == impl_->peers.end() || found->second.address != connection->dialed()) return;
  auto& kept = found->second.kept;
  if (kept.size() < kKeepCount)
    kept.push_back({std::move(connection), std::chrono::steady_clock::now() + kKeep});
}

Result<std::string> Peers::call(const std::string& node, std::string_view method,
                                std::string_view body, std::chrono::milliseconds timeout,
                                std::stop_token stop) {
  if (body.size() > kMaxCallBytes || method.empty() || method.size() > kMaxNameBytes)
    return invalid_argument("a call of {} with {} bytes, more than {}", quoted(method),
                            body.size(), kMaxCallBytes);
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;
  PTC_TRY(auto connection, take(node, deadline, stop));
  connection->set_patience({impl_->options.silence, deadline, stop});
  const uint64_t request = impl_->next_request++;
  auto exchange = [&]() -> Result<std::string> {
    PTC_TRY(connection->send(FrameType::kCall, request,
                             encode(CallHeader{std::string(method), body.size()})));
    PTC_TRY(connection->send_data(request, body));
    PTC_TRY(auto announced, connection->expect(FrameType::kReply, request));
    PTC_TRY(auto reply, decode_call(announced));
    if (reply.body_bytes > kMaxCallBytes)
      return make_error(Code::kCorrupt, "an answer of {} bytes", reply.body_bytes);
    return connection->receive_data(request, reply.body_bytes);
  };
  auto answer = exchange();
  if (answer || connection->error_was_said()) {
    give_back(node, std::move(connection));
    return answer;
  }
  if (answer.error().code() == Code::kCancelled) return answer;
  ++counters(node)->broken_connections;
  return make_error(Code::kUnavailable,
                    "node {} ({}): {}; whether it has done {} is not known", node,
                    connection->peer_address(), answer.error().message(), quoted(method));
}

std::shared_ptr<PeerCounters> Peers::counters(const std::string& node) {
  return impl_->counters.of(node);
}
std::chrono::milliseconds Peers::silence() const { return impl_->options.silence; }
std::vector<PeerNumbers> Peers::numbers() const { return impl_->counters.numbers(); }

}  // namespace ptc
