#include "http_relay.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <utility>

#include "tests/support/sockets.h"

namespace ptc {
namespace {

constexpr int kTickMs = 20;

/// Appends what can be read; false: the end.
bool receive(int fd, std::string& bytes) {
  char buffer[65536];
  ssize_t got = ::recv(fd, buffer, sizeof buffer, 0);
  if (got > 0) bytes.append(buffer, static_cast<size_t>(got));
  return got > 0 || (got < 0 && errno == EAGAIN);
}

/// Bytes of the request that `text` begins with; 0: it is not complete.
size_t request_length(const std::string& text) {
  size_t head = text.find("\r\n\r\n");
  if (head == std::string::npos) return 0;
  constexpr std::string_view kLength = "Content-Length: ";
  size_t at = text.find(kLength);
  size_t body = 0;
  if (at < head) std::from_chars(&text[at + kLength.size()], &text[head], body);
  return text.size() >= head + 4 + body ? head + 4 + body : 0;
}

}  // namespace

HttpRelay::HttpRelay(const std::string& target)
    : decide_([](const std::string&) { return Fate::kPass; }),
      base_(target.substr(target.rfind('/') + 1),
            [this](const RelayBase::Connection& connection) { serve(connection); }) {}

std::string HttpRelay::url() const { return "http://" + base_.address(); }

void HttpRelay::decide(Decide decide) {
  std::lock_guard lock(mutex_);
  decide_ = std::move(decide);
}

void HttpRelay::cut(bool cut) {
  base_.refuse(cut);
  cut_ = cut;
}

void HttpRelay::deliver_late() {
  std::list<std::string> late;
  {
    std::lock_guard lock(mutex_);
    late.swap(late_);
  }
  for (const std::string& request : late) {
    const UniqueFd server = base_.connect().value();
    std::string answer;
    PTC_CHECK(send_all(server.get(), request, {}) && comes(server.get(), POLLIN, Deadline::max()) &&
              receive(server.get(), answer));
  }
}

void HttpRelay::serve(const RelayBase::Connection& connection) {
  std::string pending;
  Fate fate = Fate::kPass;
  while (!connection.stop.stop_requested() && !cut_) {
    pollfd wanted[] = {{connection.client, POLLIN, 0}, {connection.target, POLLIN, 0}};
    if (::poll(wanted, 2, kTickMs) < 0) return;
    if (wanted[1].revents != 0) {
      std::string answer;
      if (!receive(connection.target, answer) || fate == Fate::kLoseAnswer ||
          !send_all(connection.client, answer, connection.stop))
        return;
    }
    if (wanted[0].revents != 0 && !pass_request(connection, pending, fate)) return;
  }
}

bool HttpRelay::pass_request(const RelayBase::Connection& connection, std::string& pending,
                             Fate& fate) {
  if (!receive(connection.client, pending)) return false;
  while (size_t length = request_length(pending)) {
    std::string request = pending.substr(0, length);
    pending.erase(0, length);
    std::lock_guard lock(mutex_);
    fate = decide_(request);
    if (fate == Fate::kDeliverLate) late_.push_back(request);
    if (fate == Fate::kDeliverLate || fate == Fate::kLoseRequest) return false;
    if (!send_all(connection.target, request, connection.stop)) return false;
  }
  return true;
}

}  // namespace ptc
