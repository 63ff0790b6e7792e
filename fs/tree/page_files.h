// The file that has an open file's bytes in memory, for who wants its very pages: a GPU's driver
// pins those of a tmpfs for long, and copies from and to them at the rate of the link. Of a file of
// FUSE it may not pin what it writes to, and reads come through a second copy.
//
// Who has a file open asks with an ioctl (PTCFS_GET_PAGES in tools/include/ptcfs/pages.h has what
// is said on both sides) and gets a ticket. Over a socket the ticket is changed for a descriptor,
// once. So the right to open the path, which the kernel has checked, is the right to its pages.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fs/tree/errno.h"
#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/image/image_store.h"

namespace ptc {

struct Caller;

/// The memory that has a file's bytes, by what another process maps it by.
struct Pages {
  UniqueFd descriptor;
  /// Of a device's memory, which one, and how much is mapped; null: of the host's, in a file.
  std::optional<Device::Id> device;
  uint64_t bytes = 0;
};

/// What the ioctl answers.
struct PageTicket {
  uint32_t version = 1;
  uint32_t kind = 0;  // 0: a file in the host's memory, 1: memory of a GPU of NVIDIA's
  std::array<std::byte, 16> token = {};
  char socket[80] = {};  // a path, with its 0
  Device::Id device = {};
  uint64_t bytes = 0;
};
static_assert(sizeof(PageTicket) == 128);

/// Descriptors that are to be fetched. There is a thread from the first one on. Threads: any.
class PageFiles {
 public:
  // That nobody has fetched yet, and clients of the socket at a time; and of one user.
  static constexpr size_t kMostTickets = 256, kMostTicketsOfOne = 32;
  static constexpr size_t kMostClients = 64, kMostClientsOfOne = 16;
  static constexpr auto kTicketLife = std::chrono::seconds(10);

  PageFiles() = default;
  ~PageFiles() { stop(); }
  PageFiles(const PageFiles&) = delete;
  PageFiles& operator=(const PageFiles&) = delete;

  /// Where the socket is to be, from the first offer on, and the directory that has all files. None
  /// was said: nothing is offered.
  void set_place(std::string socket, std::string directory);
  /// Before anybody may have files open no more.
  void stop();

  /// `file`, opened anew with these flags of open(2), for `caller`. For reading it is one of a
  /// mount that cannot be written, whoever gets it and whatever rights he has to the file. EPERM:
  /// for writing, or where there is no such mount, this is for the user alone who runs the daemon.
  FsResult<Pages> of(int file, int flags, const Caller& caller);
  /// Memory of a device for `caller`, who can write to it then: EPERM, unless he is root, who runs
  /// the daemon, or `owner`. EOPNOTSUPP: it is not shared.
  static FsResult<Pages> of(const DeviceBytes& bytes, uid_t owner, const Caller& caller);

  /// A ticket for the caller alone, until `open_file` is closed. EOPNOTSUPP: there can be no
  /// socket; EBUSY: too many are waiting.
  FsResult<PageTicket> offer(const Caller& caller, uint64_t open_file, Pages pages);
  /// It is closed.
  void closed(uint64_t open_file);

 private:
  using Clock = std::chrono::steady_clock;
  struct Offer {
    std::array<std::byte, 16> token;
    uid_t user;
    uint64_t open_file;
    Clock::time_point until;
    UniqueFd file;
  };
  struct Client {
    UniqueFd socket;
    uid_t user;
    Clock::time_point until;
  };
  bool listen() PTC_REQUIRES(mutex_);
  void serve();
  void take(std::vector<Client>& clients, UniqueFd socket);
  void answer(const Client& client);
  /// Takes out what nobody has come for. Closed without the mutex.
  std::vector<UniqueFd> expired(Clock::time_point now) PTC_REQUIRES(mutex_);

  Mutex mutex_;
  std::string path_ PTC_GUARDED_BY(mutex_), directory_ PTC_GUARDED_BY(mutex_);
  std::deque<Offer> offers_ PTC_GUARDED_BY(mutex_);  // by their age
  std::atomic<size_t> offered_{0};                   // how many these are
  UniqueFd listener_ PTC_GUARDED_BY(mutex_);
  ino_t socket_inode_ PTC_GUARDED_BY(mutex_) = 0;
  bool stopped_ PTC_GUARDED_BY(mutex_) = false;
  UniqueFd wake_;  // an eventfd; set before the thread
  std::thread thread_;
  std::once_flag tree_once_;
  UniqueFd mount_, tree_;  // of its own, that cannot be written, and the directory in it
};

}  // namespace ptc
