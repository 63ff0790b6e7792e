#include "fs/fuse_readdir.h"

#include <mutex>
#include <string>
#include <vector>

namespace ptc {
namespace {

/// An open directory: the listing as it was when reading began at its start, so that offsets stay
/// what they are while names come and go. rewinddir() takes a new one.
struct DirStream {
  std::mutex mutex;
  std::vector<DirEntry> entries;  // guarded
  bool filled = false;            // guarded
};

DirStream& stream_of(const fuse_file_info* info) { return *reinterpret_cast<DirStream*>(info->fh); }

/// Offsets: 0 and 1 are "." and "..", then the entries. An entry carries the offset of the next.
struct Page {
  fuse_req_t raw;
  std::string bytes;
  size_t room;

  bool add(const std::string& name, const struct stat& stat, off_t next) {
    size_t need = fuse_add_direntry(raw, nullptr, 0, name.c_str(), nullptr, 0);
    if (bytes.size() + need > room) return false;
    size_t at = bytes.size();
    bytes.resize(at + need);
    fuse_add_direntry(raw, bytes.data() + at, need, name.c_str(), &stat, next);
    return true;
  }
  bool fits_plus(const std::string& name) const {
    return bytes.size() + fuse_add_direntry_plus(raw, nullptr, 0, name.c_str(), nullptr, 0) <= room;
  }
  void add_plus(const std::string& name, const fuse_entry_param& entry, off_t next) {
    size_t need = fuse_add_direntry_plus(raw, nullptr, 0, name.c_str(), nullptr, 0);
    size_t at = bytes.size();
    bytes.resize(at + need);
    fuse_add_direntry_plus(raw, bytes.data() + at, need, name.c_str(), &entry, next);
  }
};

struct stat brief(mode_t type, ino_t inode) {
  struct stat stat = {};
  stat.st_mode = type;
  stat.st_ino = inode;
  return stat;
}

FsResult<> read_directory(FuseRequest& request, fuse_ino_t inode, size_t size, off_t offset,
                          fuse_file_info* info, bool plus) {
  Node& node = node_of(request.raw(), inode);
  DirStream& stream = stream_of(info);
  std::unique_lock lock(stream.mutex);
  // Not only at 0: the kernel may have served the beginning from its own cache.
  if (offset == 0 || !stream.filled) {
    PTC_TRY(stream.entries, node.list());
    stream.filled = true;
  }
  // Attributes only where the kernel may keep them; otherwise it would ask again all the same.
  bool with_attributes = plus && node.immutable();
  NodeTable& table = request.tree().table();
  Page page{request.raw(), {}, size};
  std::vector<NodeRef> told;  // what the kernel must let go of if the reply does not arrive
  for (size_t at = static_cast<size_t>(offset); at < stream.entries.size() + 2; ++at) {
    off_t next = static_cast<off_t>(at) + 1;
    bool dot = at < 2;
    std::string name = at == 0 ? "." : at == 1 ? ".." : stream.entries[at - 2].name;
    struct stat stat = dot ? brief(S_IFDIR, inode_of(node.key()))
                           : brief(stream.entries[at - 2].type, stream.entries[at - 2].inode);
    if (!plus) {
      if (!page.add(name, stat, next)) break;
      continue;
    }
    if (!page.fits_plus(name)) break;
    fuse_entry_param entry = {};
    entry.attr = stat;
    if (with_attributes && !dot) {
      auto child = node.lookup(name);
      if (!child && child.error().value == ENOENT) continue;  // gone since it was listed
      if (!child) {
        page.add_plus(name, entry, next);  // without attributes; asking for them says what is wrong
        continue;
      }
      if (auto full = entry_of(*child.value())) {
        entry = full.value();
        table.remember(child.value());
        told.push_back(std::move(child).value());
      }
    }
    page.add_plus(name, entry, next);
  }
  lock.unlock();  // with the reply the kernel may close the stream, on another thread
  bool delivered = request.reply([&](fuse_req_t raw) {
    return fuse_reply_buf(raw, page.bytes.data(), page.bytes.size());
  });
  if (!delivered) {
    for (const NodeRef& child : told) table.forget(child.get(), 1);
  }
  return ok();
}

}  // namespace

void on_opendir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info) {
  serve(raw, Op::kOpendir, inode, [&](FuseRequest& request) -> FsResult<> {
    auto stream = std::make_unique<DirStream>();
    bool stable = node_of(raw, inode).list_is_stable();
    info->cache_readdir = stable;
    info->keep_cache = stable;
    info->fh = reinterpret_cast<uint64_t>(stream.get());
    if (request.reply([&](fuse_req_t r) { return fuse_reply_open(r, info); })) {
      (void)stream.release();  // on_releasedir() has it now
    }
    return ok();
  });
}

void on_readdir(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset,
                fuse_file_info* info) {
  serve(raw, Op::kReaddir, inode, [&](FuseRequest& request) {
    return read_directory(request, inode, size, offset, info, false);
  });
}

void on_readdirplus(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset,
                    fuse_file_info* info) {
  serve(raw, Op::kReaddir, inode, [&](FuseRequest& request) {
    return read_directory(request, inode, size, offset, info, true);
  });
}

void on_releasedir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info) {
  serve(raw, Op::kReleasedir, inode, [&](FuseRequest& request) -> FsResult<> {
    delete &stream_of(info);
    request.done_ok();
    return ok();
  });
}

}  // namespace ptc
