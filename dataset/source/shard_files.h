// The shards that are open, and whether they still are what was indexed.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "dataset/source/sample_index.h"
#include "dataset/source/shard_mapping.h"
#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// A shard, or a file of kFiles, open for reading.
struct ShardHandle {
  UniqueFd fd;
  std::unique_ptr<const ShardMapping> mapping;  // null: read it
};

/// Keeps the shards open that were read last, up to a quarter of the files that the process may open, 1024 at most. Each
/// use of one compares its size, mtime and inode with the index. Those opened first are mapped, too, as much of them as
/// a quarter of the machine's memory (what is mapped and read counts as this program's, though it is the page cache's).
/// Threads: any.
class ShardFiles {
 public:
  /// The index outlives it.
  explicit ShardFiles(const SampleIndex& index);

  /// kCorrupt: it is not what was indexed.
  Result<std::shared_ptr<const ShardHandle>> open(uint64_t shard);
  /// From the shard that was opened as `file`.
  Result<> read(uint64_t shard, const ShardHandle& file, uint64_t offset, std::span<std::byte> out, Stores stores) const;

 private:
  struct Entry {
    uint64_t shard;
    std::shared_ptr<const ShardHandle> file;
  };
  /// 0: not worth it, for it is read as a whole or not at all.
  uint64_t bytes_to_map(uint64_t shard) const;
  Result<> check(uint64_t shard, int fd) const;
  Error changed(uint64_t shard, std::string_view what) const;

  const SampleIndex& index_;
  const size_t most_open_;
  const uint64_t most_mapped_;
  std::mutex mutex_;
  uint64_t mapped_ = 0;  // bytes; guarded by mutex_, as the next
  std::list<Entry> recent_;  // the one used last in front
  std::unordered_map<uint64_t, std::list<Entry>::iterator> by_shard_;
};

/// For kFiles a shard of SampleSource is a file, else one of the index.
std::string path_of_shard(const SampleIndex& index, uint64_t shard);

}  // namespace ptc
