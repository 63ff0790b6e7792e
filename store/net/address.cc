#include "store/net/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

using Addresses = std::shared_ptr<addrinfo>;

Result<Addresses> resolve(const PeerAddress& address, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int reason = ::getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &found);
  if (reason != 0)
    return make_error(Code::kUnavailable, "{}: {}", address.host, ::gai_strerror(reason));
  return Addresses(found, &::freeaddrinfo);
}

constexpr size_t kLookupsAtOnce = 8;

/// Names that are being looked up, each once, however many want to know, and a few at a time. A
/// name server that does not answer keeps getaddrinfo for as long as resolv.conf says (half a
/// minute, as a rule), and nothing can stop it. So that happens in detached threads of its own, of
/// which there are never more than these, and which the end of the process does not wait for. While
/// all of them are kept by it, other names wait behind, each until who wants to know has no time
/// left: then that is an error, as where the name server had been asked.
class Lookups {
 public:
  /// `known`, now or later, on any thread, once.
  using Known = std::function<void(Result<Addresses>)>;

  static void begin(const PeerAddress& address, Known known) {
    static const auto all = std::make_shared<Lookups>();
    const std::string name = address.host + ":" + address.port;
    std::vector<Known> in_vain;
    std::string why;
    {
      MutexLock lock(all->mutex_);
      auto& waiting = all->waiting_[name];
      waiting.push_back(std::move(known));
      if (waiting.size() > 1) return;
      all->next_.push_back({name, address});
      if (all->threads_ == kLookupsAtOnce) return;
      try {
        std::thread([all = all] { all->look_up(); }).detach();
        ++all->threads_;
        return;
      } catch (const std::system_error& error) {
        if (all->threads_ > 0) return;  // one of them does it
        all->next_.pop_back();
        in_vain = std::move(all->waiting_.extract(name).mapped());
        why = error.what();
      }
    }
    for (Known& one : in_vain)
      one(make_error(Code::kUnavailable, "looking up {}: {}", address.host, why));
  }

 private:
  struct Name {
    std::string text;
    PeerAddress address;
  };

  std::optional<Name> take() {
    MutexLock lock(mutex_);
    if (next_.empty()) {
      --threads_;
      return std::nullopt;
    }
    Name name = std::move(next_.front());
    next_.pop_front();
    return name;
  }

  void look_up() {
    ::pthread_setname_np(::pthread_self(), "ptcfs-names");
    while (const std::optional<Name> name = take())
      finish(name->text, resolve(name->address, AI_ADDRCONFIG));
  }

  void finish(const std::string& name, const Result<Addresses>& found) {
    std::vector<Known> waiting;
    {
      MutexLock lock(mutex_);
      waiting = std::move(waiting_.extract(name).mapped());
    }
    for (Known& one : waiting) one(found);
  }

  Mutex mutex_;
  std::map<std::string, std::vector<Known>> waiting_ PTC_GUARDED_BY(mutex_);
  std::deque<Name> next_ PTC_GUARDED_BY(mutex_);  // of these, that nobody has begun
  size_t threads_ PTC_GUARDED_BY(mutex_) = 0;
};

/// Between a lookup, which may end long after nobody waits any more, and a coroutine, whose
/// executor may be gone then.
class Answer : public std::enable_shared_from_this<Answer> {
 public:
  Answer(const IoExecutor& executor, Deadline deadline) : executor_(executor) {
    known.emplace(executor, deadline);
  }

  /// Threads: any.
  void give(Result<Addresses> found) {
    MutexLock lock(mutex_);
    if (!awaited_) return;
    found_ = std::move(found);
    wake();
  }
  /// While it is awaited.
  void wake() {
    asio::post(executor_, [self = shared_from_this()] {
      if (self->known) self->known->cancel();
    });
  }
  /// Nobody waits any more. On the executor, of which nothing is left here then.
  std::optional<Result<Addresses>> leave() {
    MutexLock lock(mutex_);
    awaited_ = false;
    known.reset();
    executor_ = {};
    return std::move(found_);
  }

  std::optional<asio::steady_timer> known;  // used on the executor

 private:
  IoExecutor executor_;
  Mutex mutex_;
  bool awaited_ PTC_GUARDED_BY(mutex_) = true;
  std::optional<Result<Addresses>> found_ PTC_GUARDED_BY(mutex_);
};

Task<Addresses> resolve_until(const PeerAddress& address, const Patience& patience) {
  if (auto literal = resolve(address, AI_NUMERICHOST)) co_return literal;
  const IoExecutor executor = co_await asio::this_coro::executor;
  auto answer = std::make_shared<Answer>(executor, patience.deadline);
  Lookups::Known known = [answer](Result<Addresses> found) { answer->give(std::move(found)); };
  Lookups::begin(address, std::move(known));
  {
    std::function<void()> stop = [answer] { answer->wake(); };
    std::stop_callback<std::function<void()>> stopped(patience.stop, std::move(stop));
    co_await answer->known->async_wait(kTuple);
  }
  if (auto found = answer->leave()) co_return *std::move(found);
  if (patience.stop.stop_requested()) co_return Error(Code::kCancelled, "cancelled");
  co_return make_error(Code::kUnavailable, "the name {} is not resolved in time", address.host);
}

std::string numeric(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(address, size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "an unknown address";
  return address->sa_family == AF_INET6 ? fmt::format("[{}]:{}", host, port)
                                        : fmt::format("{}:{}", host, port);
}

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address.ai_addr);
  return address.ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

Task<UniqueFd> connect_one(const addrinfo& address, const Patience& patience) {
  const std::string name = numeric(address.ai_addr, address.ai_addrlen);
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) co_return errno_error(errno, "socket");
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) co_return fd;
  if (errno != EINPROGRESS)
    co_return make_error(Code::kUnavailable, "connecting to {}: {}", name, ::strerror(errno));
  Socket socket(std::move(fd));
  socket.set_patience(patience);
  socket.attach(co_await asio::this_coro::executor);
  auto ready = co_await socket.wait(Socket::For::kWriting);
  if (!ready) co_return std::move(ready).error().with_context("connecting to " + name);
  int reason = 0;
  socklen_t size = sizeof reason;
  ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &reason, &size);
  if (reason != 0)
    co_return make_error(Code::kUnavailable, "connecting to {}: {}", name, ::strerror(reason));
  co_return socket.release();
}

}  // namespace

Result<PeerAddress> PeerAddress::parse(std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon);
  std::string_view port = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  unsigned number = 0;
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  const bool bracketed = host.starts_with('[') && host.ends_with(']');
  if (bracketed) host = host.substr(1, host.size() - 2);
  const bool plain = host.find_first_of("[]/@ ") == std::string_view::npos &&
                     (bracketed || host.find(':') == std::string_view::npos);
  if (host.empty() || port.empty() || error != std::errc() || end != port.data() + port.size() ||
      number > 65535 || !plain || host.size() > NI_MAXHOST)
    return invalid_argument(
        "{} is no address of a node; it is like w1:7070, 10.0.0.1:7070 or "
        "[::1]:7070",
        quoted(text));
  return PeerAddress{std::string(host), std::string(port)};
}

bool is_wildcard(const PeerAddress& address) {
  auto found = resolve(address, AI_NUMERICHOST);
  if (!found) return false;
  const addrinfo& one = *found.value();
  if (one.ai_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(one.ai_addr)->sin_addr.s_addr == htonl(INADDR_ANY);
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(one.ai_addr)->sin6_addr;
  constexpr unsigned char kMapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};
  return IN6_IS_ADDR_UNSPECIFIED(&v6) || std::memcmp(&v6, kMapped, sizeof kMapped) == 0;
}

Result<> check_node_name(std::string_view name) {
  constexpr size_t kMaxLabel = 63;
  auto is_plain = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  auto fits = [&](std::string_view text) {
    return !text.empty() && text.size() <= kMaxLabel && is_plain(text.front()) &&
           is_plain(text.back()) &&
           std::all_of(text.begin(), text.end(), [&](char c) { return is_plain(c) || c == '-'; });
  };
  if (fits(name)) return ok();
  std::string other(name.substr(0, name.find('.')));
  for (char& c : other)
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c == '_' ? '-' : c;
  return invalid_argument(
      "{} cannot be the name of a node: it is a DNS label, at most {} of a-z, 0-9 and '-' "
      "between them{}",
      quoted(name), kMaxLabel, fits(other) ? fmt::format("; {} would do", other) : "");
}

Task<UniqueFd> connect_to(PeerAddress address, Patience patience) {
  PTC_CO_TRY(auto found, co_await resolve_until(address, patience));
  Result<UniqueFd> result = make_error(Code::kUnavailable, "{} has no address", address.host);
  for (const addrinfo* one = found.get(); one != nullptr && !result; one = one->ai_next)
    result = co_await connect_one(*one, patience);
  co_return result;
}

Result<Listener> listen_on(const PeerAddress& address) {
  auto failed = [&](const char* what) {
    const int reason = errno;
    const char* advice = reason == EADDRINUSE
                             ? "; another program listens there: choose another port"
                         : reason == EACCES        ? "; ports below 1024 are root's: choose another"
                         : reason == EADDRNOTAVAIL ? "; give an address of this machine"
                                                   : "";
    return make_error(Code::kUnavailable, "{} on {}:{}: {}{}", what, address.host, address.port,
                      ::strerror(reason), advice);
  };
  PTC_TRY(auto found, resolve(address, AI_PASSIVE));
  Listener listener;
  listener.fd.reset(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.fd.valid()) return failed("socket");
  const int fd = listener.fd.get();
  int one = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(fd, found->ai_addr, found->ai_addrlen) != 0) return failed("binding");
  // Who comes when it is full comes again a second later, if it waits for so long: as many as may.
  if (::listen(fd, SOMAXCONN) != 0) return failed("listening");
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    return failed("getsockname");
  listener.address = numeric(reinterpret_cast<sockaddr*>(&bound), size);
  listener.port =
      ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  listener.loopback = is_loopback(*found);
  return listener;
}

std::string name_of_peer(int socket) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size) != 0)
    return "an unknown address";
  return numeric(reinterpret_cast<sockaddr*>(&peer), size);
}

}  // namespace ptc
