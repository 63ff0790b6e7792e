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
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "fs/tree/errno.h"
#include "fs/tree/node.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {

/// What the ioctl answers.
struct PageTicket {
  uint32_t version = 1;
  uint32_t reserved = 0;
  std::array<std::byte, 16> token = {};
  char socket[104] = {};  // a path, with its 0
};
static_assert(sizeof(PageTicket) == 128);

/// Descriptors that are to be fetched. There is a thread while there are some. Threads: any.
class PageFiles {
 public:
  static constexpr size_t kMostTickets = 256;  // that nobody has fetched yet
  static constexpr auto kTicketLife = std::chrono::seconds(10);
  static constexpr size_t kMostClients = 64;  // of the socket, at a time

  PageFiles() = default;
  ~PageFiles() { stop(); }
  PageFiles(const PageFiles&) = delete;
  PageFiles& operator=(const PageFiles&) = delete;

  /// Where the socket is to be, from the first offer on. None was said: nothing is offered.
  void set_socket(std::string path);
  /// Before anybody may have files open no more.
  void stop();

  /// The caller's alone. EOPNOTSUPP: there can be no socket; EBUSY: too many are waiting.
  FsResult<PageTicket> offer(const Caller& caller, UniqueFd file);

 private:
  using Clock = std::chrono::steady_clock;
  struct Offer {
    std::array<std::byte, 16> token;
    uid_t user;
    Clock::time_point until;
    UniqueFd file;
  };
  struct Client {
    UniqueFd socket;
    Clock::time_point until;
  };
  bool listen() PTC_REQUIRES(mutex_);
  void serve();
  void answer(int client);
  /// Takes out what nobody has come for. Closed without the mutex.
  std::vector<UniqueFd> expired(Clock::time_point now) PTC_REQUIRES(mutex_);

  Mutex mutex_;
  std::string path_ PTC_GUARDED_BY(mutex_);
  std::deque<Offer> offers_ PTC_GUARDED_BY(mutex_);  // by their age
  UniqueFd listener_ PTC_GUARDED_BY(mutex_);
  bool stopped_ PTC_GUARDED_BY(mutex_) = false;
  UniqueFd wake_;  // an eventfd; set before the thread
  std::thread thread_;
};

/// `file`, opened anew with these flags of open(2), for `caller`. EPERM: he owns it and is not who
/// runs the daemon, so that with it he could write what is to stay as it is.
FsResult<UniqueFd> pages_of(int file, int flags, const Caller& caller);

}  // namespace ptc
