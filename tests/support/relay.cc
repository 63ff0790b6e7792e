#include "tests/support/relay.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/support/sockets.h"

namespace ptc {
namespace {

constexpr size_t kTwoWords = 4;

/// Ends a connection by a reset, not in order. By the system call itself: ThreadSanitizer takes
/// connect() for the birth of the descriptor, which the other direction's thread is using.
void reset(int socket) {
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  ::syscall(SYS_connect, socket, &nobody, sizeof nobody);
}

}  // namespace

Relay::Relay(std::string target, Plans plans)
    : target_(PeerAddress::parse(target).value()),
      plans_(std::move(plans)),
      listener_(listen_on({"127.0.0.1", "0"}).value()),
      acceptor_([this] { accept_all(); }) {}

Relay::~Relay() {
  stop_.request_stop();
  acceptor_.join();
  for (Pair& pair : pairs_) {
    pair.out.join();
    pair.back.join();
  }
}

void Relay::accept_all() {
  while (!stop_.stop_requested()) {
    if (!comes(listener_.fd.get(), POLLIN, Deadline::max(), stop_.get_token())) continue;
    UniqueFd client(::accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client.valid()) continue;
    auto target = connect_here(target_, stop_.get_token());
    if (!target) continue;
    Pair& pair = pairs_.emplace_back();
    pair.client = std::move(client);
    pair.target = std::move(target).value();
    const Plan plan = plans_(count_++);
    pair.out = std::thread([this, &pair] { pump(pair.client.get(), pair.target.get(), Plan{}); });
    pair.back =
        std::thread([this, &pair, plan] { pump(pair.target.get(), pair.client.get(), plan); });
  }
}

void Relay::pump(int from, int to, Plan plan) {
  const std::stop_token stop = stop_.get_token();
  uint64_t passed = 0;
  std::vector<char> buffer(std::max(plan.piece_bytes, kTwoWords));
  for (;;) {
    if (passed >= plan.stall_after) {
      while (!stop.stop_requested()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return;
    }
    if (passed >= plan.cut_after) {
      reset(from);
      reset(to);
      return;
    }
    if (!comes(from, POLLIN, Deadline::max(), stop)) return;
    uint64_t most =
        std::min({plan.cut_after - passed, plan.stall_after - passed, uint64_t{buffer.size()}});
    if (passed < plan.swap_at) most = std::min(most, plan.swap_at - passed);
    if (passed == plan.swap_at) {
      most = kTwoWords;
      if (::recv(from, buffer.data(), most, MSG_PEEK) < static_cast<ssize_t>(kTwoWords)) continue;
    }
    const ssize_t got = ::recv(from, buffer.data(), most, 0);
    if (got < 0 && errno == EAGAIN) continue;
    if (got <= 0) break;
    std::this_thread::sleep_for(plan.delay);
    const size_t bytes = static_cast<size_t>(got);
    if (passed == plan.swap_at) {
      std::swap(buffer[0], buffer[2]);
      std::swap(buffer[1], buffer[3]);
    }
    for (size_t sent = 0; sent < bytes;) {
      if (!comes(to, POLLOUT, Deadline::max(), stop)) return;
      const ssize_t moved = ::send(to, buffer.data() + sent, bytes - sent, MSG_NOSIGNAL);
      if (moved < 0 && errno != EAGAIN) return reset(from);
      if (moved > 0) sent += static_cast<size_t>(moved);
    }
    passed += bytes;
  }
  ::shutdown(to, SHUT_WR);
}

}  // namespace ptc
