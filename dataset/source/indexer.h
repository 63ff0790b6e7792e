// What is found in one shard when it is indexed.
//
// An indexer reads the shard once, front to back, holds no more of it than a buffer, and believes
// nothing: every length, offset, count and product is checked. Its errors are kInvalidArgument,
// "byte 1024: …", without the shard's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dataset/source/packed_offsets.h"
#include "dataset/source/sample_source.h"
#include "dataset/source/shard_reader.h"

namespace ptc {

/// Samples lie behind each other from the first start to `end`; what is between two belongs to the
/// first.
struct ShardFacts {
  OffsetPacker starts;
  uint64_t end = 0;
  bool lacks_newline = false;  // JSONL: behind its last line
  /// Sorted; empty: samples of this shard differ, or it has none.
  std::vector<std::string> field_names = {};
  uint8_t megatron_dtype = 0;
  uint32_t content_crc = 0;               // of what was read, beside where samples begin
  std::vector<uint64_t> key_hashes = {};  // of tar
};

constexpr uint64_t kTarUnit = 512;      // all offsets of tar
constexpr size_t kMaxFieldBytes = 128;  // of a field's name: it becomes part of a file's
constexpr size_t kMaxFields = 1024;     // of a sample

/// Extra: bytes of the extent that are not its members' content.
Result<ShardFacts> index_tar(int fd, uint64_t bytes, const IndexContext& context);
Result<ShardFacts> index_tfrecord(int fd, uint64_t bytes, const IndexContext& context);
Result<ShardFacts> index_jsonl(int fd, uint64_t bytes, const IndexContext& context);
/// `bytes` of the .bin; the .idx is what is read.
Result<ShardFacts> index_megatron(int idx_fd, uint64_t idx_bytes, uint64_t bytes,
                                  const IndexContext& context);
/// Extra: blocks of 512 that the columns take one by one, beyond those that they take together.
Result<ShardFacts> index_mds(int fd, uint64_t bytes, uint64_t samples,
                             const std::vector<MdsColumn>& columns, const IndexContext& context);

/// Lengths of a sample's columns, from the lengths that stand before them in it; their sum, with
/// these, is `sample_bytes`, else kInvalidArgument.
Result<std::vector<uint64_t>> mds_column_bytes(std::span<const std::byte> lengths,
                                               uint64_t sample_bytes,
                                               const std::vector<MdsColumn>& columns);
size_t mds_variable_columns(const std::vector<MdsColumn>& columns);

/// Behind the last dot of a path's name; "bin" where there is none.
std::string_view file_extension(std::string_view path);

/// An error where the bytes that a file begins with are those of gzip, zstd, bzip2 or xz. For what
/// is bad anyway: a good shard of another format may begin with them.
Result<> refuse_compressed(int fd);

}  // namespace ptc
