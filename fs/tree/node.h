// What the kernel sees: a Node is one inode, a Handle one open file. Everything under the mount
// point is a subclass of these two, one kind a file under fs/nodes/.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fs/tree/errno.h"
#include "fs/tree/page_files.h"
#include "store/base/user.h"

namespace ptc {

class InodeMode;
struct KeptDraft;
class Node;
using NodeRef = std::shared_ptr<Node>;

inline constexpr double kCacheSeconds = 86400;  // what may be cached, is, for so long

/// Who asks.
struct Caller {
  uid_t uid = 0;
  gid_t gid = 0;
  pid_t pid = 0;
  std::chrono::steady_clock::duration queued{};  // how long it has waited before it was served
  /// With all groups of the process that asks. Only while it waits for the answer.
  User user() const { return user_of(pid, uid, gid); }
  /// Whether it was killed, or has ended.
  bool is_dying() const;
  /// Whether `group` is one of his. His process may have ended, or lie in another namespace: then
  /// no.
  bool is_in(gid_t group) const;
  /// Whether he has these rights (S_IROTH, S_IXOTH) to what is so, as access(2) would say.
  bool may(uid_t owner, gid_t group, mode_t mode, mode_t rights) const;
};

/// Whether the asking process was interrupted by a signal; for handlers that wait.
using Interrupted = std::function<bool()>;

/// Whom an operation may have to wait for, beside this daemon and its store. What does is held up
/// by nobody else's waiting.
struct Awaited {
  std::string name;      // "node w2", "the shards of job llama"
  unsigned at_once = 8;  // operations that wait for it; more queue up
  /// It ends by itself, soon, and must not be left alone. Others fail when their caller is killed,
  /// or after a time.
  bool ends_itself = false;
};
/// What is decided by all nodes.
extern const Awaited kAgreement;

/// One open file. Threads: any, and several at once. Destroyed at the last close.
class Handle {
 public:
  virtual ~Handle() = default;
  /// Whom reading waits for; null: nobody.
  virtual const Awaited* awaited() const { return nullptr; }
  /// Whether flush(), sync() and the last close may ask other nodes.
  virtual bool is_agreed_on() const { return false; }
  /// Fills the front of `out`; fewer bytes than asked for mean the end of the file.
  virtual FsResult<size_t> read(std::span<std::byte> out, uint64_t offset,
                                const Interrupted& interrupted);
  virtual FsResult<size_t> write(std::span<const std::byte> data, uint64_t offset);
  virtual FsResult<> flush() { return ok(); }  // at each close of a descriptor
  virtual FsResult<> sync(bool /*data_only*/) { return ok(); }
  virtual FsResult<> truncate(uint64_t /*size*/) { return Errno{EINVAL}; }
  virtual FsResult<> allocate(int mode, off_t offset, off_t length);
  /// lseek(2) with SEEK_DATA or SEEK_HOLE; `size` is the node's.
  virtual FsResult<off_t> seek(off_t offset, int whence, uint64_t size);
  /// The memory that has its bytes: the stored file, opened anew as it was, for reading, or both;
  /// or a device's. EALREADY: a mapping of what is open is one of that file already. EOPNOTSUPP:
  /// its bytes are in neither.
  virtual FsResult<Pages> pages(const Caller& /*caller*/) { return Errno{EOPNOTSUPP}; }
  /// The text that was made for this open alone: another open may get another.
  virtual std::optional<std::string_view> text_of_open() const { return std::nullopt; }
  /// Whether another process can go on with it by opening the file anew. Else what was written, or
  /// what is answered, lies in the memory of this one.
  virtual bool can_reopen() const { return true; }
  /// Where not: what was written is written down there, too, from now on, or (`again`) goes on as
  /// an earlier process has written it down. It outlives the handle. False: there is no such thing.
  virtual bool keep_draft(KeptDraft& /*draft*/, bool /*again*/) { return false; }
  /// Nobody was told of this open: its end saves nothing.
  virtual void discard() {}
};

enum class IoMode {
  kDirect,     // every read and write comes to the handle
  kCached,     // through the page cache, which is emptied at open
  kKeepCache,  // through the page cache, which stays: the bytes never change
};

struct Opened {
  std::unique_ptr<Handle> handle;
  IoMode mode = IoMode::kDirect;
  int32_t backing_id = 0;  // not 0: the kernel reads and writes the backing file itself
};

struct Created {
  NodeRef node;
  Opened opened;
};

struct DirEntry {
  std::string name;
  mode_t type;  // S_IFDIR …
  ino_t inode;
  /// Where it stands in its directory: 1 and up, and as long as it is there always the same. 0:
  /// where the hash of its name puts it.
  uint64_t place = 0;
};

/// What setattr changes; nullopt: stays.
struct AttributeChange {
  std::optional<mode_t> mode;
  std::optional<uid_t> uid;
  std::optional<gid_t> gid;
  std::optional<uint64_t> size;
  std::optional<timespec> access_time, modify_time;  // tv_nsec may be UTIME_NOW
  /// On whose behalf S_ISUID and S_ISGID go, as a write by somebody without the right to keep them
  /// does.
  std::optional<Caller> drops_suid;
};

/// One inode. `key` names it: two nodes with one key never live at once (NodeTable).
/// Threads: any, and several at once. The kernel has checked permissions (default_permissions)
/// before an operation arrives here.
class Node : public std::enable_shared_from_this<Node> {
 public:
  explicit Node(std::string key) : key_(std::move(key)) {}
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  const std::string& key() const { return key_; }
  /// By which the kernel knows it (NodeTable); 0: it does not.
  uint64_t id() const { return id_.load(std::memory_order_relaxed); }

  /// Whether what is here can never change: changes answer EROFS rather than EPERM.
  virtual bool immutable() const { return false; }
  /// For how long the kernel may cache this name in its directory.
  enum class NameLife {
    kNone,       // it may go at any time
    kUntilTold,  // KernelCache::expire_names() is called when it goes
    kForever,    // it goes only by the kernel's own hand
  };
  virtual NameLife name_life() const { return immutable() ? NameLife::kForever : NameLife::kNone; }
  /// For how many seconds the kernel may cache the attributes; 0 unless they change only by its own
  /// hand or it is told (KernelCache::drop_attributes). A directory's listing is cached in any
  /// case, for as long as its time of modification is the same.
  virtual double attribute_seconds() const { return immutable() ? kCacheSeconds : 0; }
  /// Whether that is ever more than 0.
  virtual bool caches_attributes() const { return true; }

  /// Of a directory: whether a listing tells the kernel the attributes of what is in it. Not where
  /// they are costly; then they are asked for one by one, by those who want them.
  virtual bool lists_attributes() const { return immutable(); }

  /// What tells it from another node that had its key before; as a rule no other ever has.
  virtual uint64_t stamp() const { return 0; }
  /// How it is read while it is open, where the kernel may read it by itself; null: it may not.
  virtual InodeMode* inode_mode() { return nullptr; }

  /// Whether it has bytes that are mended where they were damaged, so that what the kernel has of
  /// them may be wrong.
  virtual bool has_content() const { return false; }
  /// Whether the kernel keeps bytes of it that it asked for once.
  virtual bool keeps_content() const { return has_content(); }
  /// Whether anybody has opened it since the kernel has known it: else it has no bytes of it.
  bool was_opened() const { return opened_.load(std::memory_order_relaxed); }
  void note_opened() const { opened_.store(true, std::memory_order_relaxed); }
  /// Whom attributes(), open(), lookup() and list() may wait for; null: nobody.
  virtual const Awaited* awaited() const { return nullptr; }
  /// The same, of open() alone.
  virtual const Awaited* awaited_by_open() const { return awaited(); }
  /// Whether operations that change it may ask other nodes.
  virtual bool is_agreed_on() const { return true; }

  virtual FsResult<struct stat> attributes() = 0;
  /// `handle` is the open file it was asked through, or null.
  virtual FsResult<> set_attributes(const AttributeChange& change, Handle* handle);

  // Files.
  virtual FsResult<Opened> open(const Caller& caller, int flags);
  virtual FsResult<std::string> read_link();

  // Directories. `name` never holds a '/' and is at most 255 bytes.
  virtual FsResult<NodeRef> lookup(const std::string& name);
  virtual FsResult<std::vector<DirEntry>> list();
  virtual FsResult<Created> create(const Caller& caller, const std::string& name, mode_t mode,
                                   int flags);
  virtual FsResult<NodeRef> make_directory(const Caller& caller, const std::string& name,
                                           mode_t mode);
  virtual FsResult<NodeRef> make_node(const Caller& caller, const std::string& name, mode_t mode);
  virtual FsResult<NodeRef> make_symlink(const Caller& caller, const std::string& name,
                                         const std::string& target);
  virtual FsResult<NodeRef> make_link(Node& node, const std::string& name);
  virtual FsResult<> unlink(const std::string& name);
  virtual FsResult<> remove_directory(const std::string& name);
  /// `flags`: RENAME_NOREPLACE, RENAME_EXCHANGE.
  virtual FsResult<> rename(const Caller& caller, const std::string& name, Node& target_parent,
                            const std::string& target_name, unsigned flags);
  virtual FsResult<> sync_directory() { return ok(); }

  // Extended attributes.
  virtual FsResult<std::string> get_xattr(const std::string& name);
  virtual FsResult<std::vector<std::string>> list_xattrs() { return std::vector<std::string>(); }
  virtual FsResult<> set_xattr(const std::string& name, std::string_view value, int flags);
  virtual FsResult<> remove_xattr(const std::string& name);

 protected:
  Errno refusal() const { return Errno{immutable() ? EROFS : EPERM}; }

 private:
  friend class NodeTable;
  const std::string key_;
  class NodeTable* table_ = nullptr;  // set once, when interned
  std::atomic<uint64_t> id_{0};       // changed with the table's lock of this node's id held
  /// What the kernel was told (KnownNode), while it has an id; guarded by that lock, and counted up
  /// by those who share it.
  struct {
    NodeRef node;  // itself
    std::atomic<uint64_t> lookups{0};
    uint64_t parent = 0;
    std::unique_ptr<const std::string> name;  // null: as the key ends
    uint32_t kept = 0;                        // LiveState::Place
  } told_;
  uint8_t part_ = 0;  // of the table; set with table_
  mutable std::atomic<bool> opened_ = false;
};

/// An inode number for a node that has no file on the host: stable, and with the top bit set, where
/// no file system numbers its own. It is a hash of a path, which may be given in parts.
class InodeHash {
 public:
  constexpr InodeHash& add(std::string_view part) {
    for (unsigned char c : part) hash_ = (hash_ ^ c) * 0x100000001b3;  // FNV-1a
    return *this;
  }
  constexpr ino_t value() const {
    uint64_t mixed = hash_ ^ (hash_ >> 32);  // so that near names lie far apart
    mixed *= 0xd6e8feb86659fd93;
    mixed ^= mixed >> 32;
    return mixed | (uint64_t{1} << 63);
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};
inline ino_t inode_of(std::string_view path) { return InodeHash().add(path).value(); }

/// The later of two times.
timespec later(timespec a, timespec b);

/// stat of a node that has no file: mode, owner, one time for all three.
struct stat virtual_stat(mode_t mode, uid_t uid, gid_t gid, timespec time, ino_t inode);

}  // namespace ptc
