// The callbacks of libfuse: unpack, call the node, reply.
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>

#include <memory>
#include <string_view>

#include "fs/kernel/fuse_readdir.h"
#include "fs/kernel/fuse_request.h"
#include "fs/kernel/once_only.h"
#include "fs/nodes/job/job_dir.h"

namespace ptc {
namespace {

constexpr size_t kMaxName = 255;
constexpr uint64_t kNotYet = 1, kDone = 2;     // Steps of what empties a file
constexpr uint64_t kNotThere = 1, kThere = 2;  // and of what changes an attribute, at first

const Awaited* awaited_by_save(const Handle& handle) {
  return handle.is_agreed_on() ? &kAgreement : nullptr;
}

/// Whom an operation that changes the node may have to wait for.
const Awaited* awaited_by_change(const Node& node) {
  return node.is_agreed_on() ? &kAgreement : nullptr;
}

FsResult<std::string> checked_name(std::string name) {
  std::string result = std::move(name);
  if (result.size() > kMaxName) return Errno{ENAMETOOLONG};
  return result;
}

void on_init(void*, fuse_conn_info* connection) {
  auto want = [&](unsigned flag, bool on) {
    if (on) {
      connection->want |= connection->capable & flag;
    } else {
      connection->want &= ~flag;
    }
  };
  want(FUSE_CAP_CACHE_SYMLINKS, true);
  want(FUSE_CAP_READDIRPLUS, true);
  want(FUSE_CAP_READDIRPLUS_AUTO, false);
  want(FUSE_CAP_WRITEBACK_CACHE, false);  // excludes passthrough
  want(FUSE_CAP_HANDLE_KILLPRIV, false);  // the second version is asked for by the session
  want(FUSE_CAP_SPLICE_READ, false);
  want(FUSE_CAP_SPLICE_WRITE, false);
  want(FUSE_CAP_SPLICE_MOVE, false);
  connection->max_read = 1 << 20;
  connection->max_write = 1 << 20;
  connection->max_readahead = 1 << 20;
  // Reads ahead of a source that does not answer are such requests, too: others must find room
  // beside them.
  connection->max_background = 512;
  connection->congestion_threshold = 384;
}

void on_lookup(fuse_req_t raw, fuse_ino_t parent, const char* name) {
  auto look_up = [name = std::string(name)](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    PTC_TRY(auto node, directory.lookup(checked));
    request.entry(node, directory, checked);
    return ok();
  };
  serve_node(raw, Op::kLookup, parent, awaited_by_reading, std::move(look_up));
}

void on_forget(fuse_req_t raw, fuse_ino_t inode, uint64_t lookups) {
  Tree& tree = tree_of(raw);
  { InFlight counted(tree.stats(), Op::kForget, inode, 0); }
  tree.table().forget(inode, lookups);
  fuse_reply_none(raw);
}

void on_forget_multi(fuse_req_t raw, size_t count, fuse_forget_data* forgets) {
  Tree& tree = tree_of(raw);
  for (size_t i = 0; i < count; ++i) {
    { InFlight counted(tree.stats(), Op::kForget, forgets[i].ino, 0); }
    tree.table().forget(forgets[i].ino, forgets[i].nlookup);
  }
  fuse_reply_none(raw);
}

FsResult<> reply_attributes(FuseRequest& request, Node& node) {
  PTC_TRY(auto stat, node.attributes());
  double seconds = node.attribute_seconds();
  request.reply([&](fuse_req_t raw) { return fuse_reply_attr(raw, &stat, seconds); });
  return ok();
}

void on_getattr(fuse_req_t raw, fuse_ino_t inode, fuse_file_info*) {
  serve_node(raw, Op::kGetattr, inode, awaited_by_reading, reply_attributes);
}

void on_setattr(fuse_req_t raw, fuse_ino_t inode, struct stat* to, int set, fuse_file_info* info) {
  AttributeChange wanted;
  const timespec now{0, UTIME_NOW};
  if ((set & FUSE_SET_ATTR_MODE) != 0) wanted.mode = to->st_mode;
  if ((set & FUSE_SET_ATTR_UID) != 0) wanted.uid = to->st_uid;
  if ((set & FUSE_SET_ATTR_GID) != 0) wanted.gid = to->st_gid;
  if ((set & FUSE_SET_ATTR_SIZE) != 0) wanted.size = static_cast<uint64_t>(to->st_size);
  if ((set & FUSE_SET_ATTR_ATIME) != 0) wanted.access_time = to->st_atim;
  if ((set & FUSE_SET_ATTR_MTIME) != 0) wanted.modify_time = to->st_mtim;
  if ((set & FUSE_SET_ATTR_ATIME_NOW) != 0) wanted.access_time = now;
  if ((set & FUSE_SET_ATTR_MTIME_NOW) != 0) wanted.modify_time = now;
  std::shared_ptr<Handle> file;
  if (info != nullptr) {
    file = session_of(raw).open_files().at(info->fh);
    if (file == nullptr) return refuse(raw, Op::kSetattr, inode, EBADF);
  }
  auto change = [file = std::move(file), set, wanted](FuseRequest& request,
                                                      Node& node) -> FsResult<> {
    AttributeChange all = wanted;
    // With the second version of killpriv, the kernel leaves it to us where somebody without the
    // right writes or truncates, and says so by a bit that libfuse takes away. What changes the
    // owner does it by itself.
    if (set == 0 || (all.size && request.caller().uid != 0)) all.drops_suid = request.caller();
    PTC_TRY(node.set_attributes(all, file.get()));
    return reply_attributes(request, node);
  };
  serve_node(raw, Op::kSetattr, inode, awaited_by_change, std::move(change));
}

void on_readlink(fuse_req_t raw, fuse_ino_t inode) {
  auto read = [](FuseRequest& request, Node& node) -> FsResult<> {
    PTC_TRY(auto target, node.read_link());
    request.reply([&](fuse_req_t r) { return fuse_reply_readlink(r, target.c_str()); });
    return ok();
  };
  serve_node(raw, Op::kReadlink, inode, nobody, read);
}

void on_mknod(fuse_req_t raw, fuse_ino_t parent, const char* name, mode_t mode, dev_t) {
  auto make = [&](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session_of(raw).live_state(), request.tree().table(), served_request(), directory,
                  checked);
    once.take_back();
    PTC_TRY(auto node, directory.make_node(request.caller(), checked, mode));
    request.entry(node, directory, checked);
    return ok();
  };
  serve_node(raw, Op::kMknod, parent, nobody, make);
}

void on_mkdir(fuse_req_t raw, fuse_ino_t parent, const char* name, mode_t mode) {
  auto make = [&session = session_of(raw), number = served_request(), name = std::string(name),
               mode](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session.live_state(), request.tree().table(), number, directory, checked);
    once.take_back();
    FsResult<NodeRef> made = directory.make_directory(request.caller(), checked, mode);
    // A job that an earlier daemon has made.
    if (!made && made.error().value == EEXIST && once.was_made()) made = directory.lookup(checked);
    PTC_TRY(auto node, std::move(made));
    request.entry(node, directory, checked);
    return ok();
  };
  serve_node(raw, Op::kMkdir, parent, awaited_by_change, std::move(make));
}

void on_symlink(fuse_req_t raw, const char* target, fuse_ino_t parent, const char* name) {
  auto make = [&](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session_of(raw).live_state(), request.tree().table(), served_request(), directory,
                  checked);
    once.take_back();
    PTC_TRY(auto node, directory.make_symlink(request.caller(), checked, target));
    request.entry(node, directory, checked);
    return ok();
  };
  serve_node(raw, Op::kSymlink, parent, nobody, make);
}

void on_link(fuse_req_t raw, fuse_ino_t inode, fuse_ino_t parent, const char* name) {
  const NodeRef file = node_of(raw, inode);
  if (file == nullptr) return refuse(raw, Op::kLink, parent, ESTALE);
  auto link = [&](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session_of(raw).live_state(), request.tree().table(), served_request(), directory,
                  checked);
    once.take_back();
    PTC_TRY(auto node, directory.make_link(*file, checked));
    request.entry(node, directory, checked);
    return ok();
  };
  serve_node(raw, Op::kLink, parent, nobody, link);
}

/// What the kernel asks by a name that it was told by an earlier daemon, and this one was not asked
/// for yet, is known here before the name is taken from it.
void find_again(NodeTable& table, Node& directory, const std::string& name) {
  if (!table.has_left()) return;
  if (const auto found = directory.lookup(name)) table.find_again(found.value());
}

void on_unlink(fuse_req_t raw, fuse_ino_t parent, const char* name) {
  auto remove = [&session = session_of(raw), number = served_request(), name = std::string(name)](
                    FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session.live_state(), request.tree().table(), number, directory, checked);
    if (!once.is_done()) {
      find_again(request.tree().table(), directory, checked);
      PTC_TRY(directory.unlink(checked));
    }
    request.done_ok();
    return ok();
  };
  serve_node(raw, Op::kUnlink, parent, awaited_by_change, std::move(remove));
}

void on_rmdir(fuse_req_t raw, fuse_ino_t parent, const char* name) {
  auto remove = [&session = session_of(raw), number = served_request(), name = std::string(name)](
                    FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    OnceOnly once(session.live_state(), request.tree().table(), number, directory, checked);
    if (!once.is_done()) {
      find_again(request.tree().table(), directory, checked);
      PTC_TRY(directory.remove_directory(checked));
    }
    request.done_ok();
    return ok();
  };
  serve_node(raw, Op::kRmdir, parent, awaited_by_change, std::move(remove));
}

/// An earlier daemon has moved it, and perhaps not told the table.
void note_moved(NodeTable& table, Node& parent, const std::string& name) {
  const auto found = parent.lookup(name);
  if (!found) return;
  table.find_again(found.value());
  table.moved(*found.value(), parent, name);
}

void on_rename(fuse_req_t raw, fuse_ino_t parent, const char* name, fuse_ino_t target_parent,
               const char* target_name, unsigned flags) {
  const NodeRef source = node_of(raw, parent), target = node_of(raw, target_parent);
  if (source == nullptr || target == nullptr) return refuse(raw, Op::kRename, parent, ESTALE);
  auto rename = [&session = session_of(raw), number = served_request(), source, target,
                 name = std::string(name), target_name = std::string(target_name),
                 flags](FuseRequest& request) -> FsResult<> {
    PTC_TRY(auto from, checked_name(name));
    PTC_TRY(auto to, checked_name(target_name));
    OnceOnly once(session.live_state(), request.tree().table(), number, *source, from);
    if (once.is_done()) {
      note_moved(request.tree().table(), *target, to);
      if ((flags & RENAME_EXCHANGE) != 0) note_moved(request.tree().table(), *source, from);
    } else {
      find_again(request.tree().table(), *source, from);
      find_again(request.tree().table(), *target, to);
      PTC_TRY(source->rename(request.caller(), from, *target, to, flags));
    }
    request.done_ok();
    return ok();
  };
  serve(raw, Op::kRename, parent, awaited_by_change(source->is_agreed_on() ? *source : *target),
        std::move(rename));
}

/// The reply of open and create: whether the file stays open depends on whether the kernel took it.
template <class Send>
void reply_opened(FuseRequest& request, OpenFiles& open_files, uint64_t number_of_request,
                  uint64_t node, Opened opened, fuse_file_info* info, Send send) {
  info->direct_io = opened.mode == IoMode::kDirect;
  info->keep_cache = opened.mode == IoMode::kKeepCache && opened.backing_id == 0;
  // Only a written file has something to say at its close; a reader's succeeds without a daemon,
  // too.
  info->noflush = (info->flags & O_ACCMODE) == O_RDONLY;
  info->fh = open_files.add({.handle = std::move(opened.handle),
                             .node = node,
                             .flags = info->flags,
                             .mode = opened.mode,
                             .backing_id = opened.backing_id,
                             .caller = request.caller(),
                             .request = number_of_request & ~kResentBit});
  reply_backing_id() = opened.backing_id;
  const uint64_t number = info->fh;  // what is sent may be closed at once
  bool delivered = request.reply(send);
  reply_backing_id() = 0;
  if (!delivered) open_files.take(number);
}

void on_open(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info) {
  auto open = [&session = session_of(raw), &open_files = session_of(raw).open_files(), inode,
               number = served_request(),
               reply_info = *info](FuseRequest& request, Node& node) mutable -> FsResult<> {
    if ((number & kResentBit) != 0) open_files.drop_unanswered(number & ~kResentBit);
    const bool empties = (reply_info.flags & O_TRUNC) != 0;
    Steps steps(empties ? session.live_state() : nullptr, number, kNotYet);
    // Once emptied, others may have written into it.
    const int flags = steps.step() == kDone ? reply_info.flags & ~O_TRUNC : reply_info.flags;
    PTC_TRY(auto opened, node.open(request.caller(), flags));
    steps.set(kDone);
    node.note_opened();
    reply_opened(request, open_files, number, inode, std::move(opened), &reply_info,
                 [&](fuse_req_t r) { return fuse_reply_open(r, &reply_info); });
    return ok();
  };
  serve_node(raw, Op::kOpen, inode, awaited_by_open, std::move(open));
}

void on_create(fuse_req_t raw, fuse_ino_t parent, const char* name, mode_t mode,
               fuse_file_info* info) {
  const uint64_t number = served_request();
  auto create = [&](FuseRequest& request, Node& directory) -> FsResult<> {
    PTC_TRY(auto checked, checked_name(name));
    if ((number & kResentBit) != 0)
      session_of(raw).open_files().drop_unanswered(number & ~kResentBit);
    OnceOnly once(session_of(raw).live_state(), request.tree().table(), number, directory, checked);
    once.take_back();
    PTC_TRY(auto created, directory.create(request.caller(), checked, mode, info->flags));
    PTC_TRY(auto entry, entry_of(request.tree(), *created.node));
    ToldNodes told(request.tree().table());
    entry.ino = told.remember(created.node, directory, checked);
    reply_opened(request, session_of(raw).open_files(), number, entry.ino,
                 std::move(created.opened), info, [&](fuse_req_t r) {
                   const int error = fuse_reply_create(r, &entry, info);
                   if (error == 0) told.delivered();
                   return error;
                 });
    return ok();
  };
  serve_node(raw, Op::kCreate, parent, nobody, create);
}

/// A buffer that stays with its thread: touching fresh pages costs more than filling them.
std::span<std::byte> thread_buffer(size_t size) {
  static thread_local std::unique_ptr<std::byte[]> buffer;
  static thread_local size_t have = 0;
  if (have < size) {
    buffer.reset(new std::byte[size]);
    have = size;
  }
  return {buffer.get(), size};
}

void on_read(fuse_req_t raw, fuse_ino_t inode, size_t size, off_t offset, fuse_file_info* info) {
  auto read = [size, offset](FuseRequest& request, Handle& handle) -> FsResult<> {
    std::span<std::byte> out = thread_buffer(size);
    auto interrupted = [&request] { return request.interrupted(); };
    PTC_TRY(auto got, handle.read(out, static_cast<uint64_t>(offset), interrupted));
    request.tree().stats().add_bytes(Op::kRead, got);
    request.reply([&](fuse_req_t r) {
      return fuse_reply_buf(r, reinterpret_cast<const char*>(out.data()), got);
    });
    return ok();
  };
  serve_file(raw, Op::kRead, inode, info, awaited_by_reading, read);
}

void on_write(fuse_req_t raw, fuse_ino_t inode, const char* data, size_t size, off_t offset,
              fuse_file_info* info) {
  auto write = [&](FuseRequest& request, Handle& handle) -> FsResult<> {
    std::span bytes(reinterpret_cast<const std::byte*>(data), size);
    PTC_TRY(auto put, handle.write(bytes, static_cast<uint64_t>(offset)));
    request.tree().stats().add_bytes(Op::kWrite, put);
    request.reply([&](fuse_req_t r) { return fuse_reply_write(r, put); });
    return ok();
  };
  serve_file(raw, Op::kWrite, inode, info, nobody, write);
}

void on_flush(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info) {
  auto flush = [](FuseRequest& request, Handle& handle) -> FsResult<> {
    PTC_TRY(handle.flush());
    request.done_ok();
    return ok();
  };
  serve_file(raw, Op::kFlush, inode, info, awaited_by_save, flush);
}

void on_release(fuse_req_t raw, fuse_ino_t inode, fuse_file_info* info) {
  // Closed also where the request is refused: there is no second one.
  auto file = std::make_shared<OpenFile>(session_of(raw).open_files().take(info->fh));
  if (file->node == 0) return refuse(raw, Op::kRelease, inode, EBADF);
  tree_of(raw).page_files().closed(info->fh);
  const Awaited* awaited = file->handle != nullptr ? awaited_by_save(*file->handle) : nullptr;
  auto close = [file = std::move(file)](FuseRequest& request) -> FsResult<> {
    file->handle.reset();
    request.done_ok();
    return ok();
  };
  serve(raw, Op::kRelease, inode, awaited, std::move(close));
}

void on_fsync(fuse_req_t raw, fuse_ino_t inode, int data_only, fuse_file_info* info) {
  auto sync = [data_only](FuseRequest& request, Handle& handle) -> FsResult<> {
    PTC_TRY(handle.sync(data_only != 0));
    request.done_ok();
    return ok();
  };
  serve_file(raw, Op::kFsync, inode, info, awaited_by_save, sync);
}

void on_fallocate(fuse_req_t raw, fuse_ino_t inode, int mode, off_t offset, off_t length,
                  fuse_file_info* info) {
  auto allocate = [&](FuseRequest& request, Handle& handle) -> FsResult<> {
    PTC_TRY(handle.allocate(mode, offset, length));
    request.done_ok();
    return ok();
  };
  serve_file(raw, Op::kFallocate, inode, info, nobody, allocate);
}

void on_lseek(fuse_req_t raw, fuse_ino_t inode, off_t offset, int whence, fuse_file_info* info) {
  const NodeRef node = node_of(raw, inode);
  if (node == nullptr) return refuse(raw, Op::kLseek, inode, ESTALE);
  auto seek = [&](FuseRequest& request, Handle& handle) -> FsResult<> {
    PTC_TRY(auto stat, node->attributes());
    PTC_TRY(auto found, handle.seek(offset, whence, static_cast<uint64_t>(stat.st_size)));
    request.reply([&](fuse_req_t r) { return fuse_reply_lseek(r, found); });
    return ok();
  };
  serve_file(raw, Op::kLseek, inode, info, nobody, seek);
}

// As PTCFS_GET_PAGES of tools/include/ptcfs/pages.h.
constexpr unsigned kGetPages = _IOR('P', 0x74, PageTicket);

void on_ioctl(fuse_req_t raw, fuse_ino_t inode, unsigned command, void*, fuse_file_info* info,
              unsigned flags, const void*, size_t, size_t out_bytes) {
  if (command != kGetPages || (flags & FUSE_IOCTL_DIR) != 0 || out_bytes < sizeof(PageTicket))
    return refuse(raw, Op::kIoctl, inode, ENOTTY);
  auto offer = [number = info->fh](FuseRequest& request, Handle& handle) -> FsResult<> {
    PTC_TRY(Pages pages, handle.pages(request.caller()));
    PTC_TRY(const PageTicket ticket,
            request.tree().page_files().offer(request.caller(), number, std::move(pages)));
    request.reply([&](fuse_req_t r) { return fuse_reply_ioctl(r, 0, &ticket, sizeof ticket); });
    return ok();
  };
  serve_file(raw, Op::kIoctl, inode, info, nobody, offer);
}

void on_fsyncdir(fuse_req_t raw, fuse_ino_t inode, int, fuse_file_info*) {
  auto sync = [](FuseRequest& request, Node& node) -> FsResult<> {
    PTC_TRY(node.sync_directory());
    request.done_ok();
    return ok();
  };
  serve_node(raw, Op::kFsyncdir, inode, nobody, sync);
}

void on_statfs(fuse_req_t raw, fuse_ino_t inode) {
  auto tell = [](FuseRequest& request, Node& node) -> FsResult<> {
    struct statvfs space = {};
    if (::statvfs(request.tree().store().directory().c_str(), &space) != 0) return last_errno();
    space.f_namemax = kMaxName;
    if (const auto* in_job = dynamic_cast<const RealNode*>(&node)) in_job->limit_space(space);
    request.reply([&](fuse_req_t r) { return fuse_reply_statfs(r, &space); });
    return ok();
  };
  serve_node(raw, Op::kStatfs, inode, nobody, tell);
}

void on_setxattr(fuse_req_t raw, fuse_ino_t inode, const char* name, const char* value, size_t size,
                 int flags) {
  auto set = [&session = session_of(raw), number = served_request(), name = std::string(name),
              value = std::string(value, size),
              flags](FuseRequest& request, Node& node) -> FsResult<> {
    LiveState* const state = (flags & XATTR_CREATE) != 0 ? session.live_state() : nullptr;
    const Steps steps(state, number,
                      state != nullptr && !node.get_xattr(name) ? kNotThere : kThere);
    const int how = steps.again() && steps.step() == kNotThere ? 0 : flags;
    const FsResult<> set_now = node.set_xattr(name, value, how);
    // The kernel takes EAGAIN here for one of its own, and says "not supported" in its place.
    if (!set_now) return Errno{set_now.error().value == EAGAIN ? EBUSY : set_now.error().value};
    request.done_ok();
    return ok();
  };
  serve_node(raw, Op::kSetxattr, inode, awaited_by_change, std::move(set));
}

/// A value, or its length where the caller asked for that with a size of 0.
FsResult<> reply_xattr(FuseRequest& request, const std::string& value, size_t size) {
  if (size != 0 && value.size() > size) return Errno{ERANGE};
  request.reply([&](fuse_req_t raw) {
    return size == 0 ? fuse_reply_xattr(raw, value.size())
                     : fuse_reply_buf(raw, value.data(), value.size());
  });
  return ok();
}

void on_getxattr(fuse_req_t raw, fuse_ino_t inode, const char* name, size_t size) {
  auto get = [&](FuseRequest& request, Node& node) -> FsResult<> {
    // Said once, `ls -l` asks no file of this mount for labels and access lists again.
    if (!std::string_view(name).starts_with("user.") &&
        std::string_view(name) != JobDir::kQuotaXattr)
      return Errno{EOPNOTSUPP};
    PTC_TRY(auto value, node.get_xattr(name));
    return reply_xattr(request, value, size);
  };
  serve_node(raw, Op::kGetxattr, inode, nobody, get);
}

void on_listxattr(fuse_req_t raw, fuse_ino_t inode, size_t size) {
  auto list = [&](FuseRequest& request, Node& node) -> FsResult<> {
    PTC_TRY(auto names, node.list_xattrs());
    std::string all;
    for (const std::string& name : names) all.append(name).push_back('\0');
    return reply_xattr(request, all, size);
  };
  serve_node(raw, Op::kListxattr, inode, nobody, list);
}

void on_removexattr(fuse_req_t raw, fuse_ino_t inode, const char* name) {
  auto remove = [&session = session_of(raw), number = served_request(), name = std::string(name)](
                    FuseRequest& request, Node& node) -> FsResult<> {
    LiveState* const state = session.live_state();
    const Steps steps(state, number,
                      state != nullptr && !node.get_xattr(name) ? kNotThere : kThere);
    const FsResult<> removed = node.remove_xattr(name);
    const bool before = steps.again() && steps.step() == kThere;
    if (!removed && !(before && removed.error().value == ENODATA)) return removed;
    request.done_ok();
    return ok();
  };
  serve_node(raw, Op::kRemovexattr, inode, awaited_by_change, std::move(remove));
}

}  // namespace

int32_t& reply_backing_id() {
  static thread_local int32_t id = 0;
  return id;
}

uint64_t& served_request() {
  static thread_local uint64_t unique = 0;
  return unique;
}

FsResult<fuse_entry_param> entry_of(Tree& tree, Node& node) {
  PTC_TRY(auto stat, node.attributes());
  fuse_entry_param entry = {};
  entry.attr = stat;
  entry.attr_timeout = node.attribute_seconds();
  Node::NameLife life = node.name_life();
  bool keep = life == Node::NameLife::kForever ||
              (life == Node::NameLife::kUntilTold && tree.can_expire_names());
  entry.entry_timeout = keep ? kCacheSeconds : 0;
  return entry;
}

void FuseRequest::entry(const NodeRef& node, const Node& parent, const std::string& name) {
  auto told = entry_of(tree(), *node);
  if (!told) return error(told.error().value);
  fuse_entry_param& entry = told.value();
  NodeTable& table = tree().table();
  entry.ino = table.remember(node, parent, name);
  bool delivered = reply([&](fuse_req_t raw) { return fuse_reply_entry(raw, &entry); });
  if (!delivered) table.forget(entry.ino, 1);
}

const fuse_lowlevel_ops& fuse_operations() {
  static const fuse_lowlevel_ops operations = [] {
    fuse_lowlevel_ops ops = {};
    ops.init = on_init;
    ops.lookup = on_lookup;
    ops.forget = on_forget;
    ops.forget_multi = on_forget_multi;
    ops.getattr = on_getattr;
    ops.setattr = on_setattr;
    ops.readlink = on_readlink;
    ops.mknod = on_mknod;
    ops.mkdir = on_mkdir;
    ops.symlink = on_symlink;
    ops.link = on_link;
    ops.unlink = on_unlink;
    ops.rmdir = on_rmdir;
    ops.rename = on_rename;
    ops.open = on_open;
    ops.create = on_create;
    ops.read = on_read;
    ops.write = on_write;
    ops.flush = on_flush;
    ops.release = on_release;
    ops.fsync = on_fsync;
    ops.fallocate = on_fallocate;
    ops.lseek = on_lseek;
    ops.ioctl = on_ioctl;
    ops.opendir = on_opendir;
    ops.readdir = on_readdir;
    ops.readdirplus = on_readdirplus;
    ops.fsyncdir = on_fsyncdir;
    ops.statfs = on_statfs;
    ops.setxattr = on_setxattr;
    ops.getxattr = on_getxattr;
    ops.listxattr = on_listxattr;
    ops.removexattr = on_removexattr;
    return ops;
  }();
  return operations;
}

}  // namespace ptc
