// The shards that are open, and whether they still are what was indexed.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "dataset/source/sample_index.h"
#include "dataset/source/shard_mapping.h"
#include "dataset/source/source_access.h"
#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {

/// A shard, or a file of kFiles, open for reading.
struct ShardHandle {
  UniqueFd fd;
  timespec changed = {};  // ctime; its permissions were those that let it be opened
  std::unique_ptr<const ShardMapping> mapping;  // null: read it
};

/// Keeps the shards open that were read last, up to a quarter of the files that the process may
/// open, 1024 at most. Each use of one compares its size, mtime and inode with the index. Those
/// opened first are mapped, too, as much of them as a quarter of the machine's memory (what is
/// mapped and read counts as this program's, though it is the page cache's). Threads: any.
class ShardFiles {
 public:
  /// The index outlives it.
  ShardFiles(const SampleIndex& index, SourceAccessRef access);

  /// kCorrupt: it is not what was indexed. kPermissionDenied: it may not be read, or not any more:
  /// noticed at once where its own mode, owner or name changed, and within kTrusted where a
  /// directory's above it did.
  Result<std::shared_ptr<const ShardHandle>> open(uint64_t shard);
  /// Whether these may be opened now.
  Result<> may_read(std::span<const uint64_t> shards);
  /// From the shard that was opened as `file`.
  Result<> read(uint64_t shard, const ShardHandle& file, uint64_t offset, std::span<std::byte> out,
                Stores stores) const;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kTrusted{500};
  struct Entry {
    uint64_t shard;
    std::shared_ptr<const ShardHandle> file;
    Clock::time_point permitted;  // when it was last opened by its name
  };
  /// 0: not worth it, for it is read as a whole or not at all.
  uint64_t bytes_to_map(uint64_t shard) const;
  /// Returns the file's ctime.
  Result<timespec> check(uint64_t shard, int fd) const;
  Result<UniqueFd> open_now(uint64_t shard) const;
  Error changed(uint64_t shard, std::string_view what) const;

  const SampleIndex& index_;
  const SourceAccessRef access_;
  const size_t most_open_;
  const uint64_t most_mapped_;
  Mutex mutex_;
  uint64_t mapped_ PTC_GUARDED_BY(mutex_) = 0;      // bytes
  std::list<Entry> recent_ PTC_GUARDED_BY(mutex_);  // the one used last in front
  std::unordered_map<uint64_t, std::list<Entry>::iterator> by_shard_ PTC_GUARDED_BY(mutex_);
};

/// For kFiles a shard of SampleSource is a file, else one of the index.
std::string path_of_shard(const SampleIndex& index, uint64_t shard);

}  // namespace ptc
