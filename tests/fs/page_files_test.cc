#include "fs/tree/page_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "fs/tree/node.h"

namespace ptc {
namespace {

class PageFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/dev/shm/ptcfs-pages-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory_ = name;
    pages_.set_place(directory_ + "/socket", directory_);
    path_ = directory_ + "/image";
    file_ = UniqueFd(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0400));
    ASSERT_EQ(::write(file_.get(), "bytes", 5), 5);
  }
  void TearDown() override {
    pages_.stop();
    ::unlink(path_.c_str());
    EXPECT_EQ(::rmdir(directory_.c_str()), 0);
  }

  std::string in_proc(int fd) { return "/proc/self/fd/" + std::to_string(fd); }
  /// The errno that a ticket is answered with; 0: a descriptor came.
  int change(const PageTicket& ticket) {
    UniqueFd link(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, ticket.socket, sizeof ticket.socket);
    if (::connect(link.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      return errno;
    ::send(link.get(), ticket.token.data(), ticket.token.size(), 0);
    uint32_t error = 0;
    return ::recv(link.get(), &error, sizeof error, 0) == sizeof error ? static_cast<int>(error)
                                                                       : -1;
  }

  std::string directory_, path_;
  UniqueFd file_;
  PageFiles pages_;
};

/// It may be passed to the file's owner, who could change its mode and open it anew.
TEST_F(PageFilesTest, NobodyWritesWhatIsHandedOutForReading) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a mount that cannot be written";
  for (const uid_t caller : {uid_t{0}, uid_t{65534}}) {
    auto pages = pages_.of(file_.get(), O_RDONLY, Caller{.uid = caller});
    ASSERT_TRUE(pages) << caller;
    const int fd = pages.value().descriptor.get();
    EXPECT_EQ(::fchmod(fd, 0600), -1);
    EXPECT_EQ(errno, EROFS);
    EXPECT_FALSE(UniqueFd(::open(in_proc(fd).c_str(), O_RDWR | O_CLOEXEC)).valid());
    EXPECT_EQ(errno, EROFS);
    void* const mapped = ::mmap(nullptr, 5, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    EXPECT_EQ(std::memcmp(mapped, "bytes", 5), 0);
    ::munmap(mapped, 5);
  }
}

TEST_F(PageFilesTest, ForWritingItIsForWhoRunsTheDaemon) {
  const auto mine = pages_.of(file_.get(), O_RDWR, Caller{.uid = ::geteuid()});
  EXPECT_TRUE(mine);
  const auto his = pages_.of(file_.get(), O_RDWR, Caller{.uid = ::geteuid() + 1});
  ASSERT_FALSE(his);
  EXPECT_EQ(his.error().value, EPERM);
}

TEST_F(PageFilesTest, AnOfferEndsWithItsOpenFile) {
  const Caller caller{.uid = ::geteuid()};
  auto offer = [&](uint64_t open_file) {
    auto pages = pages_.of(file_.get(), O_RDWR, caller);
    return pages_.offer(caller, open_file, std::move(pages).value());
  };
  const auto first = offer(1), second = offer(2);
  ASSERT_TRUE(first);
  ASSERT_TRUE(second);
  pages_.closed(1);
  EXPECT_EQ(change(first.value()), ENOENT);
  EXPECT_EQ(change(second.value()), 0);
}

TEST_F(PageFilesTest, OneUserLocksNobodyElseOut) {
  auto offer = [&](uid_t uid) {
    return pages_.offer(Caller{.uid = uid}, 1, Pages{UniqueFd(::dup(file_.get()))});
  };
  for (size_t i = 0; i < PageFiles::kMostTicketsOfOne; ++i) ASSERT_TRUE(offer(65534)) << i;
  EXPECT_FALSE(offer(65534));
  const auto other = offer(::geteuid());
  ASSERT_TRUE(other);
  // Those who connect and say nothing are as many as may be.
  std::vector<UniqueFd> silent;
  for (size_t i = 0; i < 2 * PageFiles::kMostClients; ++i) {
    UniqueFd link(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, other.value().socket, sizeof other.value().socket);
    ASSERT_EQ(::connect(link.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << i;
    silent.push_back(std::move(link));
  }
  EXPECT_EQ(change(other.value()), 0);
}

TEST_F(PageFilesTest, AnEndingDaemonLeavesTheSocketOfTheNextOne) {
  const Caller caller{.uid = ::geteuid()};
  PageFiles next;
  next.set_place(directory_ + "/socket", directory_);
  ASSERT_TRUE(pages_.offer(caller, 1, Pages{UniqueFd(::dup(file_.get()))}));
  const auto ticket = next.offer(caller, 1, Pages{UniqueFd(::dup(file_.get()))});
  ASSERT_TRUE(ticket);
  pages_.stop();
  EXPECT_EQ(change(ticket.value()), 0);
  next.stop();
}

}  // namespace
}  // namespace ptc
