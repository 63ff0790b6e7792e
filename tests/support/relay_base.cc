#include "tests/support/relay_base.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "tests/support/sockets.h"

namespace ptc {

RelayBase::RelayBase(const std::string& target, Serve serve)
    : target_(PeerAddress::parse(target).value()),
      serve_(std::move(serve)),
      listener_(listen_on({"127.0.0.1", "0"}).value()),
      acceptor_([this] { accept_all(); }) {}

RelayBase::~RelayBase() {
  stop_.request_stop();
  acceptor_.join();
  for (std::thread& thread : threads_) thread.join();
}

Result<UniqueFd> RelayBase::connect() const { return connect_here(target_, stop_.get_token()); }

void RelayBase::accept_all() {
  const std::stop_token stop = stop_.get_token();
  while (!stop.stop_requested()) {
    if (!comes(listener_.fd.get(), POLLIN, Deadline::max(), stop)) continue;
    UniqueFd client(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client.valid() || refuses_) continue;
    auto target = connect();
    if (!target) continue;
    threads_.emplace_back([this, stop, number = count_++, client = std::move(client),
                           target = std::move(target).value()] {
      serve_({number, client.get(), target.get(), stop});
    });
  }
}

bool send_all(int socket, std::string_view bytes, const std::stop_token& stop) {
  while (!bytes.empty()) {
    if (!comes(socket, POLLOUT, Deadline::max(), stop)) return false;
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

}  // namespace ptc
