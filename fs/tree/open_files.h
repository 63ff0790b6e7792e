// What is open, by the numbers that the kernel has for it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "fs/tree/node.h"
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
  std::shared_ptr<Handle> at(uint64_t number) const;
  /// It is no longer here; closed when the last who holds its handle lets go.
  OpenFile take(uint64_t number);

  /// `visit` calls nothing of the table.
  void each(const std::function<void(uint64_t number, const OpenFile&)>& visit) const;

 private:
  struct alignas(64) Shard {
    mutable SharedMutex mutex;
    std::unordered_map<uint64_t, OpenFile> files PTC_GUARDED_BY(mutex);
  };
  Shard& shard_of(uint64_t number) const { return shards_[number % shards_.size()]; }
  std::atomic<uint64_t> given_{0};
  mutable std::array<Shard, 64> shards_;
};

}  // namespace ptc
