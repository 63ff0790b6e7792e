// What is open, by the numbers that the kernel has for it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fs/tree/live_state.h"
#include "fs/tree/node.h"
#include "fs/tree/node_table.h"
#include "fs/tree/passthrough.h"
#include "store/base/mutex.h"

namespace ptc {

/// One open of a file. All but the handle can be written down, and tells how another such handle is
/// opened. Who reads holds the handle: it may be closed when the reader was killed.
struct OpenFile {
  std::shared_ptr<Handle> handle;
  uint64_t node = 0;  // its id (NodeTable)
  int flags = 0;      // of open(2), as the kernel passes them on
  IoMode mode = IoMode::kDirect;
  int32_t backing_id = 0;  // of Opened
  Caller caller = {};      // who opened it
  uint64_t request = 0;    // that was answered with it
  LiveState::Place kept = 0, draft = 0;
};

/// Numbers begin at 1, and none is given twice. Threads: any; one that looks a number up waits only
/// for the opening and closing of others in a 64th of the table.
class OpenFiles {
 public:
  OpenFiles() = default;
  /// Closes nothing: who still has a file open when a mount ends has not said that it is finished,
  /// and a close would save what was written of it.
  ~OpenFiles();
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;

  /// In the table before the kernel hears of it.
  uint64_t add(OpenFile file);
  /// Null: there is none with this number.
  std::shared_ptr<Handle> at(uint64_t number);
  /// It is no longer here; closed when the last who holds its handle lets go. `node` is 0 where
  /// there is none with this number; without a handle it was an earlier process's alone.
  OpenFile take(uint64_t number);

  /// What is open is written down there. Where an earlier process did so for the same mount, its
  /// files are open, too: opened anew when they are first asked for, or reopen_writers() is called.
  /// Before the first request. All outlive this.
  void keep_in(LiveState& state, NodeTable& nodes, Passthrough& passthrough);
  /// Of an earlier process: whoever writes is kept from a commit as before.
  void reopen_writers();
  /// NodeTable::keep_in(): the node with this id is there.
  void found(uint64_t id, Node& node);
  /// By which the kernel reads files of an earlier process.
  std::unordered_set<int32_t> backing_ids();
  /// What an earlier process opened for this request, whose answer the kernel never got.
  void drop_unanswered(uint64_t request);

  /// `visit` calls nothing of the table.
  void each(const std::function<void(uint64_t number, const OpenFile&)>& visit) const;

 private:
  struct alignas(64) Shard {
    mutable SharedMutex mutex;
    std::unordered_map<uint64_t, OpenFile> files PTC_GUARDED_BY(mutex);
  };
  Shard& shard_of(uint64_t number) const { return shards_[number % shards_.size()]; }
  std::shared_ptr<Handle> reopen(uint64_t number);
  void let_go(const OpenFile& file);
  void write_down(uint64_t number, OpenFile& file);
  void give_back(const OpenFile& file);
  void hold_draft(OpenFile& file);
  std::shared_ptr<Handle> reopen_draft(const OpenFile& file);
  std::shared_ptr<Handle> open_again(const OpenFile& file);

  LiveState* state_ = nullptr;  // null: nothing is written down
  NodeTable* nodes_ = nullptr;
  Passthrough* passthrough_ = nullptr;
  struct OfNode {  // files of an earlier process
    uint64_t count = 0;
    int32_t backing_id = 0;
  };
  Mutex left_mutex_;
  /// Of an earlier process, that are not opened anew; by number.
  std::unordered_map<uint64_t, OpenFile> left_ PTC_GUARDED_BY(left_mutex_);
  std::unordered_map<uint64_t, uint64_t> left_by_request_ PTC_GUARDED_BY(left_mutex_);
  /// Of nodes that are not found yet, by id.
  std::unordered_map<uint64_t, OfNode> left_of_ PTC_GUARDED_BY(left_mutex_);
  std::atomic<bool> some_left_{false};
  std::atomic<uint64_t> given_{0};
  mutable std::array<Shard, 64> shards_;
};

}  // namespace ptc
