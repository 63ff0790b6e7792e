#include "relay.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <vector>

namespace ptc {
namespace {

constexpr int kTickMs = 20;

sockaddr_in local_address(int port) {
  return {.sin_family = AF_INET,
          .sin_port = htons(static_cast<uint16_t>(port)),
          .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

bool send_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

/// Appends what can be read; false: the end.
bool receive(int fd, std::string& bytes) {
  char buffer[65536];
  ssize_t got = ::recv(fd, buffer, sizeof buffer, 0);
  if (got > 0) bytes.append(buffer, static_cast<size_t>(got));
  return got > 0;
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
    : target_port_(std::stoi(target.substr(target.rfind(':') + 1))),
      listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      decide_([](const std::string&) { return Fate::kPass; }) {
  sockaddr_in address = local_address(0);
  socklen_t length = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  PTC_CHECK(::bind(listener_.get(), any, length) == 0 && ::listen(listener_.get(), 64) == 0 &&
            ::getsockname(listener_.get(), any, &length) == 0);
  port_ = ntohs(address.sin_port);
  accepting_ = std::thread([this] { accept_all(); });
}

HttpRelay::~HttpRelay() {
  stopping_ = true;
  accepting_.join();
  for (std::thread& thread : threads_) thread.join();
}

std::string HttpRelay::url() const { return fmt::format("http://127.0.0.1:{}", port_); }

void HttpRelay::decide(Decide decide) {
  std::lock_guard lock(mutex_);
  decide_ = std::move(decide);
}

void HttpRelay::cut(bool cut) { cut_ = cut; }

void HttpRelay::deliver_late() {
  std::list<std::string> late;
  {
    std::lock_guard lock(mutex_);
    late.swap(late_);
  }
  for (const std::string& request : late) {
    UniqueFd server = connect();
    std::string answer;
    PTC_CHECK(send_all(server.get(), request) && receive(server.get(), answer));
  }
}

void HttpRelay::accept_all() {
  while (!stopping_) {
    pollfd wanted{listener_.get(), POLLIN, 0};
    if (::poll(&wanted, 1, kTickMs) <= 0) continue;
    UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (cut_ || !client.valid()) continue;
    threads_.emplace_back(
        [this, client = std::move(client)]() mutable { serve(std::move(client)); });
  }
}

UniqueFd HttpRelay::connect() const {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = local_address(target_port_);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fd.reset();
  return fd;
}

void HttpRelay::serve(UniqueFd client) {
  UniqueFd server = connect();
  if (!server.valid()) return;
  std::string pending;
  Fate fate = Fate::kPass;
  while (!stopping_ && !cut_) {
    pollfd wanted[] = {{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
    if (::poll(wanted, 2, kTickMs) < 0) return;
    if (wanted[1].revents != 0) {
      std::string answer;
      if (!receive(server.get(), answer) || fate == Fate::kLoseAnswer ||
          !send_all(client.get(), answer))
        return;
    }
    if (wanted[0].revents != 0 && !pass_request(client.get(), server.get(), pending, fate)) return;
  }
}

bool HttpRelay::pass_request(int client, int server, std::string& pending, Fate& fate) {
  if (!receive(client, pending)) return false;
  while (size_t length = request_length(pending)) {
    std::string request = pending.substr(0, length);
    pending.erase(0, length);
    std::lock_guard lock(mutex_);
    fate = decide_(request);
    if (fate == Fate::kDeliverLate) late_.push_back(request);
    if (fate == Fate::kDeliverLate || fate == Fate::kLoseRequest) return false;
    if (!send_all(server, request)) return false;
  }
  return true;
}

}  // namespace ptc
