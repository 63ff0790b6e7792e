// What the daemon answers to numbers that it has not given, or that have gone. The test is the
// kernel: its requests come through a socket in place of /dev/fuse.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/fuse.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "fs/kernel/fuse_session.h"
#include "reshard/node/job_store.h"
#include "tests/support/job_fixture.h"

namespace ptc {
namespace {

template <class Wire>
std::string wire(const Wire& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
std::string wire_name(std::string_view name) { return std::string(name) + '\0'; }

struct WireReply {
  int error = 0;
  std::string body;
  template <class Wire>
  Wire as() const {
    Wire value = {};
    EXPECT_GE(body.size(), sizeof value);
    std::memcpy(&value, body.data(), std::min(body.size(), sizeof value));
    return value;
  }
};

class KernelNumbers : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets_), 0);
    const timeval patience{.tv_sec = 60, .tv_usec = 0};
    ::setsockopt(sockets_[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    store_ =
        JobStore::open({.directory = dir_.path(), .node = "n0", .copy_threads = 1}, &tree_).value();
    ASSERT_TRUE(tree_.attach(store_.get(), (dir_.path() / "root").string()));
    fuse_init_in init = {};
    init.major = 7;
    init.minor = 38;
    send(FUSE_INIT, 0, wire(init));
    auto session = FuseSession::mount(
        tree_, {.mount_point = fmt::format("/dev/fd/{}", sockets_[1]), .threads = 1});
    ASSERT_TRUE(session.has_value()) << session.error().message();
    session_ = std::move(session).value();
    ASSERT_EQ(receive().error, 0);
  }
  void TearDown() override {
    ::shutdown(sockets_[0], SHUT_RDWR);
    if (session_ != nullptr) session_->wait(std::chrono::seconds(60));
    session_.reset();
    tree_.detach();
    store_.reset();
    ::close(sockets_[0]);
  }

  void send(uint32_t opcode, uint64_t node, std::string_view body) {
    fuse_in_header header = {};
    header.len = static_cast<uint32_t>(sizeof header + body.size());
    header.opcode = opcode;
    header.unique = ++requests_;
    header.nodeid = node;
    header.uid = ::geteuid();
    header.gid = ::getegid();
    header.pid = static_cast<uint32_t>(::getpid());
    const std::string bytes = wire(header) + std::string(body);
    ASSERT_EQ(::send(sockets_[0], bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  WireReply receive() {
    for (;;) {
      std::string bytes(1 << 20, '\0');
      const ssize_t got = ::recv(sockets_[0], bytes.data(), bytes.size(), 0);
      if (got < static_cast<ssize_t>(sizeof(fuse_out_header))) {
        ADD_FAILURE() << "no reply: " << std::strerror(errno);
        return {EIO, {}};
      }
      fuse_out_header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      if (header.unique == 0) continue;  // a notification
      EXPECT_EQ(header.unique, requests_);
      bytes.resize(static_cast<size_t>(got));
      return {-header.error, bytes.substr(sizeof header)};
    }
  }
  WireReply ask(uint32_t opcode, uint64_t node, std::string_view body) {
    send(opcode, node, body);
    return receive();
  }

  uint64_t look_up(uint64_t parent, std::string_view name) {
    const WireReply reply = ask(FUSE_LOOKUP, parent, wire_name(name));
    EXPECT_EQ(reply.error, 0) << name;
    return reply.as<fuse_entry_out>().nodeid;
  }
  int error_of_getattr(uint64_t node) {
    return ask(FUSE_GETATTR, node, wire(fuse_getattr_in{})).error;
  }
  /// Has no reply.
  void forget(uint64_t node, uint64_t lookups) {
    send(FUSE_FORGET, node, wire(fuse_forget_in{.nlookup = lookups}));
  }

  testing::TempDir dir_;
  Tree tree_;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<FuseSession> session_;
  int sockets_[2] = {-1, -1};
  uint64_t requests_ = 0;
};

TEST_F(KernelNumbers, WrongNodeIdsAreStale) {
  const uint64_t known = look_up(FUSE_ROOT_ID, ".ptc");
  const std::string name = wire_name("name"), other = wire_name("other");
  const struct {
    uint32_t opcode;
    std::string body;
  } requests[] = {
      {FUSE_LOOKUP, name},
      {FUSE_GETATTR, wire(fuse_getattr_in{})},
      {FUSE_SETATTR, wire(fuse_setattr_in{.valid = FATTR_MODE, .mode = 0600})},
      {FUSE_READLINK, ""},
      {FUSE_SYMLINK, name + other},
      {FUSE_MKNOD, wire(fuse_mknod_in{.mode = S_IFREG | 0600}) + name},
      {FUSE_MKDIR, wire(fuse_mkdir_in{.mode = 0700}) + name},
      {FUSE_UNLINK, name},
      {FUSE_RMDIR, name},
      {FUSE_RENAME2, wire(fuse_rename2_in{.newdir = FUSE_ROOT_ID}) + name + other},
      {FUSE_LINK, wire(fuse_link_in{.oldnodeid = known}) + name},
      {FUSE_OPEN, wire(fuse_open_in{})},
      {FUSE_CREATE, wire(fuse_create_in{.flags = O_RDWR, .mode = 0600}) + name},
      {FUSE_STATFS, ""},
      {FUSE_READDIR, wire(fuse_read_in{.size = 4096})},
      {FUSE_READDIRPLUS, wire(fuse_read_in{.size = 4096})},
      {FUSE_FSYNCDIR, wire(fuse_fsync_in{})},
      {FUSE_LSEEK, wire(fuse_lseek_in{})},
      {FUSE_GETXATTR, wire(fuse_getxattr_in{.size = 100}) + wire_name("user.a")},
      {FUSE_LISTXATTR, wire(fuse_getxattr_in{.size = 100})},
      {FUSE_REMOVEXATTR, wire_name("user.a")},
  };
  const auto address = reinterpret_cast<uint64_t>(&tree_.root());
  for (const uint64_t wrong : {uint64_t{0}, uint64_t{2}, known + 1, known + NodeTable::kParts,
                               address, uint64_t{UINT64_MAX}}) {
    for (const auto& request : requests)
      EXPECT_EQ(ask(request.opcode, wrong, request.body).error, ESTALE)
          << "operation " << request.opcode << " on " << wrong;
    EXPECT_EQ(ask(FUSE_LINK, FUSE_ROOT_ID, wire(fuse_link_in{.oldnodeid = wrong}) + name).error,
              ESTALE);
    EXPECT_EQ(ask(FUSE_RENAME2, FUSE_ROOT_ID, wire(fuse_rename2_in{.newdir = wrong}) + name + other)
                  .error,
              ESTALE);
    forget(wrong, 3);
    send(FUSE_BATCH_FORGET, 0,
         wire(fuse_batch_forget_in{.count = 2}) + wire(fuse_forget_one{wrong, 1}) +
             wire(fuse_forget_one{wrong, UINT64_MAX}));
  }
  EXPECT_EQ(error_of_getattr(known), 0);
}

TEST_F(KernelNumbers, AForgottenNodeIdIsStaleForEver) {
  const uint64_t directory = look_up(FUSE_ROOT_ID, ".ptc");
  const uint64_t old = look_up(directory, "version");
  EXPECT_EQ(look_up(directory, "version"), old);
  forget(old, 1);
  EXPECT_EQ(error_of_getattr(old), 0);
  forget(old, 1);
  EXPECT_EQ(error_of_getattr(old), ESTALE);
  const uint64_t now = look_up(directory, "version");
  EXPECT_NE(now, old);
  EXPECT_EQ(error_of_getattr(now), 0);
  EXPECT_EQ(error_of_getattr(old), ESTALE);
  forget(old, 1);
  forget(FUSE_ROOT_ID, 1);
  EXPECT_EQ(error_of_getattr(now), 0);
  EXPECT_EQ(error_of_getattr(FUSE_ROOT_ID), 0);
}

TEST_F(KernelNumbers, WrongAndClosedHandlesAreBad) {
  const uint64_t node = look_up(look_up(FUSE_ROOT_ID, ".ptc"), "version");
  const auto opened = ask(FUSE_OPEN, node, wire(fuse_open_in{.flags = O_RDONLY}));
  ASSERT_EQ(opened.error, 0);
  const uint64_t handle = opened.as<fuse_open_out>().fh;
  auto read = [&](uint64_t fh) {
    return ask(FUSE_READ, node, wire(fuse_read_in{.fh = fh, .size = 100}));
  };
  EXPECT_FALSE(read(handle).body.empty());
  auto check_bad = [&](uint64_t fh) {
    const struct {
      uint32_t opcode;
      std::string body;
    } requests[] = {
        {FUSE_READ, wire(fuse_read_in{.fh = fh, .size = 100})},
        {FUSE_WRITE, wire(fuse_write_in{.fh = fh, .size = 1}) + "x"},
        {FUSE_FLUSH, wire(fuse_flush_in{.fh = fh})},
        {FUSE_FSYNC, wire(fuse_fsync_in{.fh = fh})},
        {FUSE_FALLOCATE, wire(fuse_fallocate_in{.fh = fh, .length = 1})},
        {FUSE_LSEEK, wire(fuse_lseek_in{.fh = fh, .whence = SEEK_DATA})},
        {FUSE_SETATTR, wire(fuse_setattr_in{.valid = FATTR_FH | FATTR_SIZE, .fh = fh})},
        {FUSE_RELEASE, wire(fuse_release_in{.fh = fh})},
    };
    for (const auto& request : requests)
      EXPECT_EQ(ask(request.opcode, node, request.body).error, EBADF)
          << "operation " << request.opcode << " on " << fh;
  };
  for (const uint64_t wrong : {uint64_t{0}, handle + 1, handle + 64, node, uint64_t{UINT64_MAX}})
    if (wrong != handle) check_bad(wrong);
  EXPECT_FALSE(read(handle).body.empty());
  EXPECT_EQ(ask(FUSE_RELEASE, node, wire(fuse_release_in{.fh = handle})).error, 0);
  check_bad(handle);
}

/// Before the kernel hears of it, so that it is there whenever this process ends.
TEST_F(KernelNumbers, WhatTheKernelKnowsCanBeWrittenDown) {
  ASSERT_TRUE(store_->create_job("job"));
  tree_.jobs_changed();
  const uint64_t job = look_up(FUSE_ROOT_ID, "job"), incoming = look_up(job, "incoming");
  const auto made = ask(FUSE_CREATE, incoming,
                        wire(fuse_create_in{.flags = O_RDWR, .mode = 0600}) + wire_name("a"));
  ASSERT_EQ(made.error, 0);
  const uint64_t file = made.as<fuse_entry_out>().nodeid;
  auto place_of = [&](uint64_t id) {
    std::string place = "unknown";
    for (size_t part = 0; part < NodeTable::kParts; ++part)
      tree_.table().each_known(part, [&](const KnownNode& known) {
        if (known.id == id) place = fmt::format("{}/{}", known.parent, known.name);
      });
    return place;
  };
  EXPECT_EQ(place_of(job), "1/job");
  EXPECT_EQ(place_of(incoming), fmt::format("{}/incoming", job));
  EXPECT_EQ(place_of(file), fmt::format("{}/a", incoming));
  auto rename = [&](const char* from, uint64_t to_directory, const char* to, uint32_t flags) {
    return ask(FUSE_RENAME2, incoming,
               wire(fuse_rename2_in{.newdir = to_directory, .flags = flags}) + wire_name(from) +
                   wire_name(to))
        .error;
  };
  ASSERT_EQ(rename("a", job, "b", 0), 0);
  EXPECT_EQ(place_of(file), fmt::format("{}/b", job));
  const auto second = ask(FUSE_MKDIR, incoming, wire(fuse_mkdir_in{.mode = 0700}) + wire_name("d"));
  ASSERT_EQ(second.error, 0);
  const uint64_t directory = second.as<fuse_entry_out>().nodeid;
  ASSERT_EQ(rename("d", job, "b", RENAME_EXCHANGE), 0);
  EXPECT_EQ(place_of(directory), fmt::format("{}/b", job));
  EXPECT_EQ(place_of(file), fmt::format("{}/d", incoming));

  int open = 0;
  session_->open_files().each([&](uint64_t, const OpenFile& one) {
    ++open;
    EXPECT_EQ(one.node, file);
    EXPECT_EQ(one.flags & O_ACCMODE, O_RDWR);
  });
  EXPECT_EQ(open, 1);
}

}  // namespace
}  // namespace ptc
