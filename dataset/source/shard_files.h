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
#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// Keeps the shards open that were read last, up to a quarter of the files that the process may open, 1024 at most. Each
/// use of one compares its size, mtime and inode with the index. Threads: any.
class ShardFiles {
 public:
  /// The index outlives it.
  explicit ShardFiles(const SampleIndex& index);

  /// kCorrupt: it is not what was indexed.
  Result<std::shared_ptr<const UniqueFd>> open(uint64_t shard);
  /// From the shard that was opened as `fd`.
  Result<> read(uint64_t shard, int fd, uint64_t offset, std::span<std::byte> out) const;

 private:
  struct Entry {
    uint64_t shard;
    std::shared_ptr<const UniqueFd> fd;
  };
  Result<> check(uint64_t shard, int fd) const;
  Error changed(uint64_t shard, std::string_view what) const;

  const SampleIndex& index_;
  const size_t most_open_;
  std::mutex mutex_;
  std::list<Entry> recent_;  // guarded by mutex_, as the next: the one used last in front
  std::unordered_map<uint64_t, std::list<Entry>::iterator> by_shard_;
};

/// For kFiles a shard of SampleSource is a file, else one of the index.
std::string path_of_shard(const SampleIndex& index, uint64_t shard);

}  // namespace ptc
