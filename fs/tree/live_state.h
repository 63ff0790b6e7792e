// What outlives this process while its mount goes on: what the kernel was told, and what was begun.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {

// The layout of the file, which a program of another version may have written: kVersion changes
// with it. Nothing in it is a pointer. What has a number of 0 is free; the number is written last.

/// A node that the kernel knows (NodeTable).
struct KeptNode {
  std::atomic<uint64_t> id;
  std::atomic<uint64_t> lookups;
  uint64_t parent;     // its id
  uint64_t identity;   // LiveState::identity() of the node
  uint32_t long_name;  // 0: `name` has all of it; else one behind the place in the long names
  uint8_t name_bytes;  // of all of it
  uint8_t flags;
  enum Flag : uint8_t {
    kDisplaced = 1,  // another node has its key since
    kUncached = 2,   // the kernel asks for its attributes each time
  };
  char name[90];
};
static_assert(sizeof(KeptNode) == 128);

/// An open file (OpenFiles).
struct KeptFile {
  std::atomic<uint64_t> number;
  uint64_t node;     // its id
  uint64_t request;  // that opened it
  uint64_t bytes;    // of Handle::text_of_open(); UINT64_MAX: there is none
  int32_t flags, mode, backing_id;
  uint32_t uid, gid;
  int32_t pid;
  uint32_t draft;  // LiveState::Place of it; 0: none
  uint32_t unused;
};
static_assert(sizeof(KeptFile) == 64);

/// What is written of a text that is not saved yet (EditableFile); or one that was made for an
/// open.
struct KeptDraft {
  static constexpr size_t kMost = 1 << 20;
  std::atomic<uint32_t> taken;
  uint32_t bytes;
  uint32_t mode;  // with kHasMode
  uint32_t flags;
  enum Flag : uint32_t {
    kCreated = 1,
    kTruncated = 2,
    kWritten = 4,
    kOffered = 8,
    kHasMode = 16,
    kOfOpen = 32
  };
  char unused[4096 - 16];
  char text[kMost];
};
static_assert(sizeof(KeptDraft) == 4096 + KeptDraft::kMost);

/// A name that is taken away in this mount only (Whiteouts).
struct KeptWhiteout {
  std::atomic<uint64_t> owner;  // LiveState::identity() of the key of what it is in
  int64_t hidden_ns;            // of the monotonic clock
  uint32_t path_bytes;
  uint32_t expires;
  char path[488];
};
static_assert(sizeof(KeptWhiteout) == 512);

/// A request that must not be done twice, while it is not answered.
struct KeptRequest {
  std::atomic<uint64_t> unique;
  uint64_t identity;  // of what its name stood for before; 0: it stood for nothing
  uint64_t run;       // of the daemon that began it
  uint64_t unused;
};
static_assert(sizeof(KeptRequest) == 32);

/// A file in memory (memfd) that is mapped by one process at a time, and kept open by another,
/// which starts the next one. Each store into it is there for the next, also after a kill.
/// Threads: any; what guards an entry is said where it is used.
class LiveState {
 public:
  static constexpr uint32_t kVersion = 1;
  static constexpr size_t kParts = 64;
  struct Limits {
    uint64_t nodes = uint64_t{1} << 26, long_names = uint64_t{1} << 24, files = uint64_t{1} << 24;
  };

  /// Of a new file, which is empty; or of what an earlier process left. kInvalidArgument: that was
  /// one of another version.
  static Result<std::unique_ptr<LiveState>> open(int fd);
  ~LiveState();
  LiveState(const LiveState&) = delete;
  LiveState& operator=(const LiveState&) = delete;

  struct Header {
    char magic[8];
    uint32_t version, parts;
    Limits limits;
    uint64_t seed;
    std::atomic<uint64_t> runs;     // of daemons, this one included
    std::atomic<uint32_t> mounted;  // the kernel was greeted
    uint32_t init_request_bytes, init_reply_bytes;
    std::array<std::byte, 512> init_request, init_reply;
    char store[1024];  // its directory
    uint64_t store_device, store_inode;
    std::atomic<uint64_t> nodes_used, long_names_used, files_used, whiteouts_used;  // ever taken
    std::atomic<uint64_t> files_given;
    std::array<std::atomic<uint64_t>, kParts> nodes_given;
  };
  Header& header() { return *header_; }
  /// It goes on with a mount that an earlier process served.
  bool goes_on() const { return goes_on_; }

  /// What tells a node from all others by its key, and by `stamp` (Node::stamp); never 0.
  uint64_t identity(std::string_view key, uint64_t stamp) const;

  // Places: 0 is none.
  using Place = uint32_t;
  KeptNode& node(Place place) { return nodes_[place - 1]; }
  KeptFile& file(Place place) { return files_[place - 1]; }
  /// A free place, or 0. For one part at a time: the caller holds its lock.
  Place take_node(size_t part);
  void give_back_node(size_t part, Place place);
  void set_name(size_t part, KeptNode& node, std::string_view name);
  std::string_view name_of(const KeptNode& node) const;
  Place take_file();
  void give_back_file(Place place);
  /// They are empty, and give their memory back when they are not needed any more.
  static constexpr size_t kDrafts = 1024;
  Place take_draft();
  void give_back_draft(Place place);
  KeptDraft& draft(Place place) { return drafts_[place - 1]; }
  static constexpr size_t kWhiteouts = 1 << 18;
  Place take_whiteout();
  void give_back_whiteout(Place place);
  KeptWhiteout& whiteout(Place place) { return whiteouts_[place - 1]; }
  /// What the earlier process left of this owner; once.
  std::vector<Place> left_whiteouts(uint64_t owner);
  /// What the earlier process left.
  void each_node(const std::function<void(Place, KeptNode&)>& visit);
  void each_file(const std::function<void(Place, KeptFile&)>& visit);

  /// Requests that are begun, each in a place of its own until it is answered.
  static constexpr size_t kRequests = 4096;
  Place begin_request(uint64_t unique, uint64_t identity);
  void end_request(Place place);
  /// Of one that was begun before, by this process or an earlier one; 0: it was not.
  Place begun_request(uint64_t unique);
  KeptRequest& request(Place place) { return requests_[place - 1]; }

  /// What a thread serves just now, so that a request with which the daemon dies twice is known.
  static constexpr size_t kThreads = 2048;
  class Serving {
   public:
    explicit Serving(LiveState* state);  // may be null
    ~Serving();
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;
    void begin(uint64_t unique) {
      if (slot_ != nullptr) slot_->store(unique, std::memory_order_relaxed);
    }
    void end() { begin(0); }

   private:
    LiveState* const state_;
    std::atomic<uint64_t>* slot_ = nullptr;
    size_t place_ = 0;
  };
  /// At a start, once: what was being served when the last one ended, and how that was.
  enum class End { kCrashed, kKilled, kMadeRoom };
  void note_end(End how);
  bool is_poison(uint64_t unique) const;
  /// It was being served when a daemon crashed. Of such one is served at a time: of what is served
  /// beside the one that a daemon dies of nothing is known.
  bool is_suspect(uint64_t unique) const;

 private:
  explicit LiveState(int fd) : fd_(fd) {}
  Result<> map(const Limits& limits);
  void find_free();
  static void empty(KeptDraft& draft);
  struct Suspect {
    uint64_t unique;
    uint32_t crashes, kills;
  };
  static constexpr size_t kSuspects = 256;
  struct alignas(64) Free {
    std::vector<Place> nodes, long_names;
  };

  const int fd_;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  bool goes_on_ = false;
  Header* header_ = nullptr;
  std::atomic<uint64_t>* serving_ = nullptr;
  Suspect* suspects_ = nullptr;
  KeptRequest* requests_ = nullptr;
  KeptNode* nodes_ = nullptr;
  char* long_names_ = nullptr;
  KeptFile* files_ = nullptr;
  KeptDraft* drafts_ = nullptr;
  KeptWhiteout* whiteouts_ = nullptr;
  std::array<Free, kParts> free_;
  Mutex mutex_;
  std::vector<Place> free_files_ PTC_GUARDED_BY(mutex_);
  std::vector<Place> free_requests_ PTC_GUARDED_BY(mutex_);
  std::vector<Place> free_drafts_ PTC_GUARDED_BY(mutex_);
  std::vector<Place> free_whiteouts_ PTC_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::vector<Place>> left_whiteouts_ PTC_GUARDED_BY(mutex_);
  std::vector<size_t> free_threads_ PTC_GUARDED_BY(mutex_);
  std::vector<std::pair<uint64_t, Place>> begun_ PTC_GUARDED_BY(mutex_);  // by earlier processes
};

}  // namespace ptc
