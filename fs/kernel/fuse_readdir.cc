#include "fs/kernel/fuse_readdir.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "fs/tree/listings.h"

namespace ptc {
namespace {

/// Offsets: 0 and 1 are "." and "..", then the entries by their places. An entry carries the offset
/// where the one behind it is looked for.
constexpr uint64_t kDots = 2;

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

/// The entry with its attributes, counted as known to the kernel; nullopt: it is gone.
std::optional<fuse_entry_param> full_entry(FuseRequest& request, Node& directory,
                                           const DirEntry& entry, ToldNodes& told) {
  fuse_entry_param bare = {};
  bare.attr = brief(entry.type, entry.inode);
  auto child = directory.lookup(entry.name);
  if (!child && child.error().value == ENOENT) return std::nullopt;
  if (!child) return bare;  // asking for its attributes will say what is wrong
  auto full = entry_of(request.tree(), *child.value());
  if (!full) return bare;
  full.value().ino = told.remember(child.value(), directory, entry.name);
  return full.value();
}

FsResult<> read_directory(FuseRequest& request, Node& node, size_t size, off_t offset, bool plus) {
  Listings& listings = request.tree().listings();
  PTC_TRY(auto listing, offset == 0 ? listings.fresh(node) : listings.kept(node));
  Page page{request.raw(), {}, size};
  page.bytes.reserve(size);
  bool room = true;
  for (uint64_t at = static_cast<uint64_t>(offset); room && at < kDots; ++at) {
    const char* name = at == 0 ? "." : "..";
    struct stat stat = brief(S_IFDIR, inode_of(node.key()));
    fuse_entry_param entry = {};
    entry.attr = stat;
    off_t next = static_cast<off_t>(at) + 1;
    room = plus ? page.fits_plus(name) : page.add(name, stat, next);
    if (room && plus) page.add_plus(name, entry, next);
  }
  // Attributes only where the kernel may keep them; otherwise it would ask again all the same.
  const bool with_attributes = plus && node.lists_attributes();
  const uint64_t last = std::max<uint64_t>(static_cast<uint64_t>(offset), kDots) - kDots;
  auto next = std::upper_bound(listing->begin(), listing->end(), last,
                               [](uint64_t place, const DirEntry& e) { return place < e.place; });
  ToldNodes told(request.tree().table());
  for (; room && next != listing->end(); ++next) {
    const off_t after = static_cast<off_t>(next->place + kDots);
    if (!plus) {
      room = page.add(next->name, brief(next->type, next->inode), after);
      continue;
    }
    room = page.fits_plus(next->name);
    if (!room) break;
    fuse_entry_param entry = {};
    entry.attr = brief(next->type, next->inode);
    if (with_attributes) {
      auto full = full_entry(request, node, *next, told);
      if (!full) continue;
      entry = *full;
    }
    page.add_plus(next->name, entry, after);
  }
  if (page.bytes.empty() && room) listings.drop(node);
  if (request.reply([&](fuse_req_t raw) {
        return fuse_reply_buf(raw, page.bytes.data(), page.bytes.size());
      }))
    told.delivered();
  return ok();
}

}  // namespace

void on_opendir(fuse_req_t raw, fuse_ino_t inode, fuse_file_info*) {
  serve(raw, Op::kOpendir, inode, [](FuseRequest& request) -> FsResult<> {
    request.error(ENOSYS);
    return ok();
  });
}

namespace {

void list(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, bool plus) {
  serve_node(raw, Op::kReaddir, inode, awaited_by_reading,
             [size, offset, plus](FuseRequest& request, Node& node) {
               return read_directory(request, node, size, offset, plus);
             });
}

}  // namespace

void on_readdir(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, fuse_file_info*) {
  list(raw, inode, size, offset, false);
}

void on_readdirplus(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, fuse_file_info*) {
  list(raw, inode, size, offset, true);
}

}  // namespace ptc
