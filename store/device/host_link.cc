#include "store/device/host_link.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "store/base/random_id.h"

namespace ptc {
namespace {

constexpr uint64_t kPieceBytes = 1 << 20;

/// A file, so that daemons in networks of their own find each other. The id comes from another
/// node: it names no other file than one of these.
Result<sockaddr_un> link_address(const std::string& id) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  constexpr size_t kDigits = 16;
  if (id.size() != kDigits || id.find_first_not_of("0123456789abcdef") != std::string::npos)
    return invalid_argument("no link has this name");
  const std::string path = "/tmp/ptcfs-link-" + id;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

void remove_link_file(const std::string& id) {
  if (const auto address = link_address(id)) (void)::unlink(address.value().sun_path);
}

Result<UniqueFd> link_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno_error(errno, "a socket for a link");
  return fd;
}

class HostLink final : public DeviceLink {
 public:
  /// `socket`: listens, of the end that asks; is to be connected to `id`, of the other.
  HostLink(Device& device, std::unique_ptr<DeviceStream> stream, std::string id, UniqueFd socket,
           UniqueFd aborted, bool listens)
      : device_(device),
        stream_(std::move(stream)),
        id_(std::move(id)),
        socket_(std::move(socket)),
        aborted_(std::move(aborted)),
        listens_(listens),
        buffer_(kPieceBytes) {}
  ~HostLink() override {
    if (listens_) remove_link_file(id_);
  }

  Result<> connect(Deadline deadline) override { return sticky(do_connect(deadline)); }

  Result<> send(ConstMemoryPointer bytes, uint64_t count) override {
    return begin({bytes, {}, count});
  }
  Result<> receive(MemoryPointer to, uint64_t count) override { return begin({{}, to, count}); }

  Result<> wait(Deadline deadline) override {
    while (!failed_.has_error() && !work_.empty()) {
      const Work work = work_.front();
      failed_ = work.to == MemoryPointer() ? send_now(work, deadline) : receive_now(work, deadline);
      work_.pop_front();
    }
    return failure();
  }

  void abort() override {
    const uint64_t one = 1;
    (void)!::write(aborted_.get(), &one, sizeof one);
  }

 private:
  struct Work {
    ConstMemoryPointer from;
    MemoryPointer to;  // null: it is sent
    uint64_t count;
  };

  Result<> failure() const {
    if (failed_.has_error()) return Error(failed_.error());
    return ok();
  }
  Result<> sticky(Result<> result) {
    if (!failed_.has_error()) failed_ = std::move(result);
    return failure();
  }

  Result<> begin(const Work& work) {
    PTC_TRY(failure());
    const NodeMemory memory = work.to == MemoryPointer() ? work.from.memory() : work.to.memory();
    if (memory != device_.memory())
      return invalid_argument("{} bytes in {} are not in the memory of {}", work.count,
                              memory.to_string(), device_.memory().to_string());
    work_.push_back(work);
    return ok();
  }

  Result<> do_connect(Deadline deadline) {
    if (listens_) {
      PTC_TRY(wait_for(POLLIN, deadline));
      UniqueFd connected(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!connected.valid()) return errno_error(errno, "accepting a link");
      socket_ = std::move(connected);
      remove_link_file(id_);
      return ok();
    }
    PTC_TRY(const sockaddr_un address, link_address(id_));
    if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return ok();
    return make_error(Code::kUnavailable, "connecting a link: {}", ::strerror(errno));
  }

  Result<> wait_for(short what, Deadline deadline) {
    const auto left = deadline - std::chrono::steady_clock::now();
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    pollfd fds[] = {{socket_.get(), what, 0}, {aborted_.get(), POLLIN, 0}};
    const int ready = ::poll(fds, 2, static_cast<int>(std::clamp<int64_t>(ms, 0, 1 << 30)));
    if (ready < 0 && errno != EINTR) return errno_error(errno, "waiting for a link");
    if (fds[1].revents != 0) return Error(Code::kCancelled, "the link was given up");
    if (ready == 0) return Error(Code::kUnavailable, "the other end of the link says nothing");
    return ok();
  }

  Result<> send_now(const Work& work, Deadline deadline) {
    for (uint64_t at = 0; at < work.count; at += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, work.count - at);
      PTC_TRY(stream_->copy(in_host_memory(buffer_.data()), work.from + at, bytes));
      PTC_TRY(stream_->wait());
      for (uint64_t done = 0; done < bytes;) {
        PTC_TRY(wait_for(POLLOUT, deadline));
        const ssize_t sent =
            ::send(socket_.get(), buffer_.data() + done, bytes - done, MSG_NOSIGNAL);
        if (sent > 0) done += static_cast<uint64_t>(sent);
        else if (sent < 0 && errno != EAGAIN) return gone(errno);
      }
    }
    return ok();
  }

  Result<> receive_now(const Work& work, Deadline deadline) {
    for (uint64_t at = 0; at < work.count; at += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, work.count - at);
      for (uint64_t done = 0; done < bytes;) {
        PTC_TRY(wait_for(POLLIN, deadline));
        const ssize_t got = ::recv(socket_.get(), buffer_.data() + done, bytes - done, 0);
        if (got > 0) done += static_cast<uint64_t>(got);
        else if (got == 0 || errno != EAGAIN) return gone(got == 0 ? EPIPE : errno);
      }
      PTC_TRY(stream_->copy(work.to + at, in_host_memory(std::as_const(buffer_).data()), bytes));
      PTC_TRY(stream_->wait());
    }
    return ok();
  }

  static Error gone(int why) {
    return make_error(Code::kUnavailable, "the other end of the link is gone: {}", ::strerror(why));
  }

  Device& device_;
  const std::unique_ptr<DeviceStream> stream_;
  const std::string id_;
  UniqueFd socket_;
  const UniqueFd aborted_;  // readable from abort() on
  const bool listens_;
  std::vector<std::byte> buffer_;
  std::deque<Work> work_;
  Result<> failed_ = ok();
};

}  // namespace

HostLinkMaker::~HostLinkMaker() {
  for (const auto& [id, fd] : listening_) remove_link_file(id);
}

Result<std::string> HostLinkMaker::make_id() {
  PTC_TRY(std::string id, random_id());
  PTC_TRY(const sockaddr_un address, link_address(id));
  PTC_TRY(UniqueFd fd, link_socket());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), 1) != 0)
    return errno_error(errno, "listening for a link");
  MutexLock lock(mutex_);
  listening_[id] = std::move(fd);
  return id;
}

Result<std::unique_ptr<DeviceLink>> HostLinkMaker::make(Device& device, const std::string& id,
                                                        End end) {
  UniqueFd socket;
  if (end == End::kAsks) {
    MutexLock lock(mutex_);
    auto listens = listening_.extract(id);
    if (listens.empty()) return invalid_argument("no link of this name was begun here");
    socket = std::move(listens.mapped());
  } else {
    PTC_TRY(link_address(id));
    PTC_TRY(socket, link_socket());
  }
  UniqueFd aborted(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!aborted.valid()) return errno_error(errno, "a descriptor for a link");
  PTC_TRY(auto stream, device.stream());
  return std::make_unique<HostLink>(device, std::move(stream), id, std::move(socket),
                                    std::move(aborted), end == End::kAsks);
}

}  // namespace ptc
