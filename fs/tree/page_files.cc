#include "fs/tree/page_files.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace ptc {
namespace {

constexpr auto kPatienceWithClient = std::chrono::seconds(2);

/// One message with a descriptor, or with none (-1) and why.
void hand_over(int client, int file, uint32_t error) {
  iovec said = {&error, sizeof error};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &said;
  message.msg_iovlen = 1;
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
  }
  ::sendmsg(client, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

FsResult<UniqueFd> pages_of(int file, int flags, const Caller& caller) {
  struct stat stat = {};
  if (::fstat(file, &stat) != 0) return last_errno();
  // An owner may change the mode, and then open it anew: to write an image, or past its checks.
  if (stat.st_uid == caller.uid && ::geteuid() != caller.uid) return Errno{EPERM};
  UniqueFd opened(::open(fmt::format("/proc/self/fd/{}", file).c_str(), flags | O_CLOEXEC));
  if (!opened.valid()) return last_errno();
  return opened;
}

void PageFiles::set_socket(std::string path) {
  MutexLock lock(mutex_);
  path_ = std::move(path);
}

void PageFiles::stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    offers_.clear();
  }
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  thread_.join();
}

bool PageFiles::listen() {
  if (listener_.valid()) return true;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path_.empty() || path_.size() >= sizeof(PageTicket::socket) || stopped_) return false;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return false;
  // Left by a daemon that was killed: one mount has one.
  ::unlink(path_.c_str());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(path_.c_str(), 0666) != 0 ||  // a ticket opens it, to whom it was given
      ::listen(socket.get(), kMostClients) != 0)
    return false;
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return false;
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error&) {  // there are no threads left
    return false;
  }
  listener_ = std::move(socket);
  return true;
}

FsResult<PageTicket> PageFiles::offer(const Caller& caller, UniqueFd file) {
  PageTicket ticket;
  if (::getrandom(ticket.token.data(), ticket.token.size(), 0) !=
      static_cast<ssize_t>(ticket.token.size()))
    return last_errno();
  std::vector<UniqueFd> old;
  MutexLock lock(mutex_);
  old = expired(Clock::now());
  if (!listen()) return Errno{EOPNOTSUPP};
  if (offers_.size() >= kMostTickets) return Errno{EBUSY};
  std::memcpy(ticket.socket, path_.c_str(), path_.size() + 1);
  offers_.push_back({ticket.token, caller.uid, Clock::now() + kTicketLife, std::move(file)});
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);  // it has something to wait for
  return ticket;
}

std::vector<UniqueFd> PageFiles::expired(Clock::time_point now) {
  std::vector<UniqueFd> gone;
  while (!offers_.empty() && offers_.front().until <= now) {
    gone.push_back(std::move(offers_.front().file));
    offers_.pop_front();
  }
  return gone;
}

void PageFiles::answer(int client) {
  std::array<std::byte, 16> token = {};
  const ssize_t got = ::recv(client, token.data(), token.size(), MSG_DONTWAIT);
  ucred who = {};
  socklen_t size = sizeof who;
  if (got != static_cast<ssize_t>(token.size()) ||
      ::getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0)
    return hand_over(client, -1, EINVAL);
  UniqueFd file;
  {
    MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(offers_, [&](const Offer& offer) {
      return offer.token == token && offer.user == who.uid && offer.until > Clock::now();
    });
    if (found != offers_.end()) {
      file = std::move(found->file);
      offers_.erase(found);
    }
  }
  hand_over(client, file.get(), file.valid() ? 0 : ENOENT);
}

void PageFiles::serve() {
  ::pthread_setname_np(::pthread_self(), "ptcfs-pages");
  std::vector<Client> clients;
  for (;;) {
    std::vector<UniqueFd> old;
    std::vector<pollfd> polled;
    auto next = Clock::time_point::max();
    const auto now = Clock::now();
    std::erase_if(clients, [&](const Client& client) { return client.until <= now; });
    for (const Client& client : clients) next = std::min(next, client.until);
    {
      MutexLock lock(mutex_);
      if (stopped_) {
        ::unlink(path_.c_str());
        listener_.reset();
        return;
      }
      old = expired(now);
      if (!offers_.empty()) next = std::min(next, offers_.front().until);
      // One more waits in the socket's queue.
      const bool takes = clients.size() < kMostClients;
      polled.push_back({takes ? listener_.get() : -1, POLLIN, 0});
    }
    old.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    for (const Client& client : clients) polled.push_back({client.socket.get(), POLLIN, 0});
    const int patience =
        next == Clock::time_point::max()
            ? -1
            : static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count());
    if (::poll(polled.data(), polled.size(), patience) < 0 && errno != EINTR) continue;
    if ((polled[1].revents & POLLIN) != 0) {
      uint64_t woken = 0;
      (void)!::read(wake_.get(), &woken, sizeof woken);
    }
    for (size_t i = clients.size(); i-- > 0;) {
      if (polled[i + 2].revents == 0) continue;
      if ((polled[i + 2].revents & POLLIN) != 0) answer(clients[i].socket.get());
      clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if ((polled[0].revents & POLLIN) == 0) continue;
    UniqueFd client(::accept4(polled[0].fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (client.valid()) clients.push_back({std::move(client), Clock::now() + kPatienceWithClient});
    else std::this_thread::sleep_for(std::chrono::milliseconds(20));  // no descriptor is left
  }
}

}  // namespace ptc
