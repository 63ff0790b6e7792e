#include "tests/support/relay.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
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

void pump(int from, int to, const Relay::Plan& plan, const std::stop_token& stop) {
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
    if (!send_all(to, {buffer.data(), bytes}, stop)) {
      if (!stop.stop_requested()) reset(from);
      return;
    }
    passed += bytes;
  }
  ::shutdown(to, SHUT_WR);
}

void pass_on(const RelayBase::Connection& connection, const Relay::Plan& plan) {
  std::thread out(
      [&] { pump(connection.client, connection.target, Relay::Plan{}, connection.stop); });
  pump(connection.target, connection.client, plan, connection.stop);
  out.join();
}

}  // namespace

Relay::Relay(const std::string& target, Plans plans)
    : base_(target, [plans = std::move(plans)](const RelayBase::Connection& connection) {
        pass_on(connection, plans(connection.number));
      }) {}

}  // namespace ptc
