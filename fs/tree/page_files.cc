#include "fs/tree/page_files.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
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

#include "fs/tree/node.h"

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

/// Invalid: that needs CAP_SYS_ADMIN, and Linux 5.12.
UniqueFd read_only_mount(const std::string& directory) {
  if (directory.empty()) return {};
  UniqueFd tree(::open_tree(AT_FDCWD, directory.c_str(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
  mount_attr attributes = {};
  attributes.attr_set =
      MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
  if (!tree.valid() ||
      ::mount_setattr(tree.get(), "", AT_EMPTY_PATH, &attributes, sizeof attributes) != 0)
    return {};
  return tree;
}

/// The very file, for reading, in another mount of its file system.
FsResult<UniqueFd> open_in(int tree, int file) {
  union {
    file_handle handle;
    char bytes[sizeof(file_handle) + MAX_HANDLE_SZ];
  } found = {};
  found.handle.handle_bytes = MAX_HANDLE_SZ;
  int mount = 0;
  if (::name_to_handle_at(file, "", &found.handle, &mount, AT_EMPTY_PATH) != 0) return last_errno();
  UniqueFd opened(::open_by_handle_at(tree, &found.handle, O_RDONLY | O_CLOEXEC));
  if (!opened.valid()) return last_errno();
  return opened;
}

}  // namespace

FsResult<Pages> PageFiles::of(int file, int flags, const Caller& caller) {
  if ((flags & O_ACCMODE) == O_RDONLY) {
    std::call_once(tree_once_, [this] {
      MutexLock lock(mutex_);
      mount_ = read_only_mount(directory_);
      if (mount_.valid())
        tree_ = UniqueFd(::openat(mount_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    });
    if (tree_.valid()) {
      PTC_TRY(UniqueFd opened, open_in(tree_.get(), file));
      return Pages{std::move(opened)};
    }
  }
  // Its owner could change the mode and open it anew, to write what is to stay as it is; whoever
  // has a descriptor can pass it to him.
  if (caller.uid != ::geteuid()) return Errno{EPERM};
  UniqueFd opened(::open(fmt::format("/proc/self/fd/{}", file).c_str(), flags | O_CLOEXEC));
  if (!opened.valid()) return last_errno();
  return Pages{std::move(opened)};
}

FsResult<Pages> PageFiles::of(const DeviceBytes& bytes, uid_t owner, const Caller& caller) {
  if (caller.uid != 0 && caller.uid != ::geteuid() && caller.uid != owner) return Errno{EPERM};
  const MemoryPointer begin = bytes.memory.begin();
  Device* const device = bytes.devices->find(begin.memory());
  if (device == nullptr) return Errno{EOPNOTSUPP};
  auto shared = device->share(begin);
  if (!shared) return Errno{EOPNOTSUPP};
  return Pages{std::move(shared.value().descriptor), device->id(), shared.value().bytes};
}

void PageFiles::set_place(std::string socket, std::string directory) {
  MutexLock lock(mutex_);
  path_ = std::move(socket);
  directory_ = std::move(directory);
}

void PageFiles::stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    offers_.clear();
    offered_ = 0;
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
  // Left by a daemon that was killed, or ends: one mount has one.
  ::unlink(path_.c_str());
  struct stat stat = {};
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(path_.c_str(), 0666) != 0 ||  // a ticket opens it, to whom it was given
      ::stat(path_.c_str(), &stat) != 0 || ::listen(socket.get(), kMostClients) != 0)
    return false;
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return false;
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error&) {  // there are no threads left
    return false;
  }
  listener_ = std::move(socket);
  socket_inode_ = stat.st_ino;
  return true;
}

FsResult<PageTicket> PageFiles::offer(const Caller& caller, uint64_t open_file, Pages pages) {
  PageTicket ticket;
  if (::getrandom(ticket.token.data(), ticket.token.size(), 0) !=
      static_cast<ssize_t>(ticket.token.size()))
    return last_errno();
  std::vector<UniqueFd> old;
  MutexLock lock(mutex_);
  old = expired(Clock::now());
  if (!listen()) return Errno{EOPNOTSUPP};
  const auto of_him = std::ranges::count(offers_, caller.uid, &Offer::user);
  if (offers_.size() >= kMostTickets || static_cast<size_t>(of_him) >= kMostTicketsOfOne)
    return Errno{EBUSY};
  std::memcpy(ticket.socket, path_.c_str(), path_.size() + 1);
  ticket.kind = pages.device ? 1 : 0;
  ticket.device = pages.device.value_or(Device::Id{});
  ticket.bytes = pages.bytes;
  offers_.push_back({ticket.token, caller.uid, open_file, Clock::now() + kTicketLife,
                     std::move(pages.descriptor)});
  offered_ = offers_.size();
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);  // it has something to wait for
  return ticket;
}

void PageFiles::closed(uint64_t open_file) {
  if (offered_.load() == 0) return;
  std::vector<UniqueFd> gone;
  MutexLock lock(mutex_);
  std::erase_if(offers_, [&](Offer& offer) {
    if (offer.open_file != open_file) return false;
    gone.push_back(std::move(offer.file));
    return true;
  });
  offered_ = offers_.size();
}

std::vector<UniqueFd> PageFiles::expired(Clock::time_point now) {
  std::vector<UniqueFd> gone;
  while (!offers_.empty() && offers_.front().until <= now) {
    gone.push_back(std::move(offers_.front().file));
    offers_.pop_front();
  }
  offered_ = offers_.size();
  return gone;
}

void PageFiles::answer(const Client& client) {
  std::array<std::byte, 16> token = {};
  if (::recv(client.socket.get(), token.data(), token.size(), MSG_DONTWAIT) !=
      static_cast<ssize_t>(token.size()))
    return hand_over(client.socket.get(), -1, EINVAL);
  UniqueFd file;
  {
    MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(offers_, [&](const Offer& offer) {
      return offer.token == token && offer.user == client.user && offer.until > Clock::now();
    });
    if (found != offers_.end()) {
      file = std::move(found->file);
      offers_.erase(found);
      offered_ = offers_.size();
    }
  }
  hand_over(client.socket.get(), file.get(), file.valid() ? 0 : ENOENT);
}

void PageFiles::take(std::vector<Client>& clients, UniqueFd socket) {
  ucred who = {};
  socklen_t size = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return;
  const auto of_him = std::ranges::count(clients, who.uid, &Client::user);
  // Who comes and says nothing keeps nobody else out.
  if (static_cast<size_t>(of_him) >= kMostClientsOfOne) {
    clients.erase(std::ranges::find(clients, who.uid, &Client::user));
  } else if (clients.size() >= kMostClients) {
    clients.erase(clients.begin());
  }
  clients.push_back({std::move(socket), who.uid, Clock::now() + kPatienceWithClient});
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
        struct stat stat = {};  // it may be another daemon's by now
        if (::stat(path_.c_str(), &stat) == 0 && stat.st_ino == socket_inode_)
          ::unlink(path_.c_str());
        listener_.reset();
        return;
      }
      old = expired(now);
      if (!offers_.empty()) next = std::min(next, offers_.front().until);
      polled.push_back({listener_.get(), POLLIN, 0});
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
      if ((polled[i + 2].revents & POLLIN) != 0) answer(clients[i]);
      clients.erase(clients.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if ((polled[0].revents & POLLIN) == 0) continue;
    UniqueFd client(::accept4(polled[0].fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (client.valid()) take(clients, std::move(client));
    else std::this_thread::sleep_for(std::chrono::milliseconds(20));  // no descriptor is left
  }
}

}  // namespace ptc
