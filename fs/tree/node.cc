#include "fs/tree/node.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "fs/tree/node_table.h"

namespace ptc {

const Awaited kAgreement{"the agreement of the nodes", 64, true};

bool Caller::is_dying() const {
  if (pid == 0) return false;  // of a PID namespace that is not seen from here
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  if (!status) return true;  // it has ended; or it is out of sight
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("State:") &&
        line.find_first_of("ZX", sizeof "State:") != std::string::npos)
      return true;
    if (!line.starts_with("SigPnd:") && !line.starts_with("ShdPnd:")) continue;
    const uint64_t pending = std::strtoull(line.c_str() + sizeof "SigPnd:", nullptr, 16);
    if ((pending >> (SIGKILL - 1) & 1) != 0) return true;
  }
  return false;
}

bool Caller::is_in(gid_t group) const {
  if (gid == group) return true;
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("Groups:")) continue;
    std::istringstream groups(line.substr(sizeof("Groups:") - 1));
    return std::find(std::istream_iterator<gid_t>(groups), std::istream_iterator<gid_t>(), group) !=
           std::istream_iterator<gid_t>();
  }
  return false;
}

bool Caller::may(uid_t owner, gid_t group, mode_t mode, mode_t rights) const {
  if (uid == 0 || uid == ::geteuid()) return true;
  const unsigned shift = uid == owner ? 6 : is_in(group) ? 3 : 0;
  return (mode >> shift & rights) == rights;
}

FsResult<size_t> Handle::read(std::span<std::byte>, uint64_t, const Interrupted&) {
  return Errno{EBADF};
}
FsResult<size_t> Handle::write(std::span<const std::byte>, uint64_t) { return Errno{EBADF}; }
FsResult<> Handle::allocate(int, off_t, off_t) { return Errno{EOPNOTSUPP}; }

FsResult<off_t> Handle::seek(off_t offset, int whence, uint64_t size) {
  // Without holes to tell of: data up to the end, where the one hole begins.
  if (offset < 0 || static_cast<uint64_t>(offset) >= size) return Errno{ENXIO};
  if (whence == SEEK_DATA) return offset;
  if (whence == SEEK_HOLE) return static_cast<off_t>(size);
  return Errno{EINVAL};
}

Node::~Node() {
  if (table_ != nullptr) table_->erase_expired(*this);
}

FsResult<> Node::set_attributes(const AttributeChange&, Handle*) { return refusal(); }
FsResult<Opened> Node::open(const Caller&, int) { return Errno{EISDIR}; }
FsResult<std::string> Node::read_link() { return Errno{EINVAL}; }
FsResult<NodeRef> Node::lookup(const std::string&) { return Errno{ENOTDIR}; }
FsResult<std::vector<DirEntry>> Node::list() { return Errno{ENOTDIR}; }
FsResult<Created> Node::create(const Caller&, const std::string&, mode_t, int) { return refusal(); }
FsResult<NodeRef> Node::make_directory(const Caller&, const std::string&, mode_t) {
  return refusal();
}
FsResult<NodeRef> Node::make_node(const Caller&, const std::string&, mode_t) { return refusal(); }
FsResult<NodeRef> Node::make_symlink(const Caller&, const std::string&, const std::string&) {
  return refusal();
}
FsResult<NodeRef> Node::make_link(Node&, const std::string&) { return refusal(); }
FsResult<> Node::unlink(const std::string&) { return refusal(); }
FsResult<> Node::remove_directory(const std::string&) { return refusal(); }
FsResult<> Node::rename(const Caller&, const std::string&, Node&, const std::string&, unsigned) {
  return refusal();
}
FsResult<std::string> Node::get_xattr(const std::string&) { return Errno{ENODATA}; }
FsResult<> Node::set_xattr(const std::string&, std::string_view, int) {
  return Errno{immutable() ? EROFS : EOPNOTSUPP};
}
FsResult<> Node::remove_xattr(const std::string&) {
  return Errno{immutable() ? EROFS : EOPNOTSUPP};
}

timespec later(timespec a, timespec b) {
  return std::pair(a.tv_sec, a.tv_nsec) < std::pair(b.tv_sec, b.tv_nsec) ? b : a;
}

struct stat virtual_stat(mode_t mode, uid_t uid, gid_t gid, timespec time, ino_t inode) {
  struct stat result = {};
  result.st_mode = mode;
  result.st_uid = uid;
  result.st_gid = gid;
  result.st_nlink = S_ISDIR(mode) ? 2 : 1;
  result.st_ino = inode;
  result.st_atim = result.st_mtim = result.st_ctim = time;
  result.st_blksize = 1 << 20;
  return result;
}

}  // namespace ptc
