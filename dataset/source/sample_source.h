// A data set as a numbered row of samples, 0 … samples() − 1, that lie in shards on disk.
//
// The number of a sample is its place: shards in the order of source.json (within a directory by
// name, MDS by its index.json), samples in the order of the shard. It depends on nothing else. What
// a sample is:
//
//   tar        the neighbouring members of one key (WebDataset: the name up to the first dot behind
//              the last '/')
//   mds        a sample            tfrecord   a record            jsonl   a line, with its newline
//   megatron   a sequence of tokens                               files   a file
//
// An index holds where each begins, in at most 6 bytes; nothing else is copied.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/shard_mapping.h"
#include "dataset/source/source_access.h"
#include "dataset/source/source_spec.h"
#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

class ShardRights;
class SampleIndex;
class ShardFiles;
struct ShardHandle;

/// A run of bytes in a shard. For `files`, `shard` counts files.
struct Extent {
  uint64_t shard = 0, offset = 0, bytes = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// A shard that open_shard() opened.
struct OpenShard {
  uint64_t shard = 0;
  std::shared_ptr<const ShardHandle> file;
};

/// A named part of a sample: a member of a tar, a column of MDS; else the payload.
struct Field {
  std::string name;  // the extension, without a dot: "jpg", "seg.png"
  Extent extent;
};

/// How far open_source() is; it writes, others read. Threads: any.
struct IndexProgress {
  std::atomic<uint64_t> shards{0},
      shards_done{0};  // to be indexed; `files`: thousands of files at a time
  std::atomic<uint64_t> bytes{0}, bytes_done{0};  // of the shards
  std::atomic<uint64_t> samples{0};               // found so far
};

struct SkippedShard {
  std::string path, reason;
};

/// One column of MDS samples.
struct MdsColumn {
  std::string name, encoding;
  std::optional<uint32_t> bytes;  // nullopt: variable, its length is in the sample
  friend bool operator==(const MdsColumn&, const MdsColumn&) = default;
};

/// Threads: any. Holds the index mapped, and some shards open.
/// Errors of reads: kCorrupt where a shard is not what was indexed (it says what changed), or what
/// the system call said; they name the shard.
class SampleSource {
 public:
  SampleSource(std::unique_ptr<const SampleIndex> index, SourceAccessRef access);
  ~SampleSource();

  SourceFormat format() const;
  uint64_t samples() const;
  /// Of all shards.
  uint64_t bytes() const;
  /// A pure function of the shards' names below their directories, their sizes, where samples begin
  /// in them, and of their content: all of a JSONL file's lines, the checksums in TFRecords, the
  /// headers in a tar; of what is not read to be indexed, 16 places a shard and 3 a file. The same
  /// on each machine that sees the same shards.
  uint64_t fingerprint() const;
  /// Whether it is this one, or this is what runs know these samples by that began without
  /// "fingerprint": "content", or before content was part of it.
  bool has_fingerprint(uint64_t fingerprint) const;
  /// Bad shards that were left out ("on_error": "skip").
  const std::vector<SkippedShard>& skipped() const;
  /// Whom the shards, each of them, let read it; as it was when they were indexed.
  const ShardRights& rights() const;
  /// As whom they are read; nullptr: as whom this process is.
  const User* reader() const;
  /// Of the index, in memory: at most 6 a sample, and some per shard.
  uint64_t index_bytes() const;

  // What follows is for dataset/tree.

  /// Where sample `id` < samples() lies, with all that its shard has around its fields.
  Extent extent(uint64_t id) const;
  /// Bytes of all its fields together, with the newline that a last line lacks.
  uint64_t payload_bytes(uint64_t id) const;
  /// Blocks of 512 bytes that its fields take, each in blocks of its own; nullopt for tar.
  std::optional<uint64_t> payload_blocks(uint64_t id) const;
  /// The names of the fields that all samples have, sorted; empty where samples differ.
  const std::vector<std::string>& field_names() const;
  /// The fields of one sample in the order they lie there. Reads the shard for tar and for MDS with
  /// several columns of variable length.
  Result<std::vector<Field>> fields(uint64_t id) const;
  /// Of tar: whether samples of two shards have one key, and the key of one: "a/b" of a/b.seg.png.
  bool keys_repeat() const;
  Result<std::string> key(uint64_t id) const;
  /// Of a source of files: "jpg"; "bin" where the file has none. No I/O.
  std::string_view file_extension_of(uint64_t id) const;
  /// The last line of its shard has no newline, which its extent therefore lacks.
  bool lacks_newline(uint64_t id) const;

  const std::vector<MdsColumn>& mds_columns() const;  // of MDS; else empty
  uint8_t megatron_dtype() const;                     // of Megatron; else 0

  /// Whether these samples may still be read, for what was made of them before: kPermissionDenied.
  Result<> may_read(std::span<const uint64_t> ids) const;

  uint64_t shards() const;
  uint64_t shard_bytes(uint64_t shard) const;
  std::string shard_path(uint64_t shard) const;
  Result<> read(uint64_t shard, uint64_t offset, std::span<std::byte> out) const;
  /// Without comparing it with the index again.
  Result<> read(const OpenShard& shard, uint64_t offset, std::span<std::byte> out,
                Stores stores) const;
  /// The shard, open for reading and checked; lives as long as it is held.
  Result<OpenShard> open_shard(uint64_t shard) const;
  Result<std::shared_ptr<const UniqueFd>> open_shard_fd(uint64_t shard) const;

 private:
  Result<std::vector<Field>> tar_fields(const Extent& extent) const;
  Result<std::vector<Field>> mds_column_fields(const Extent& extent) const;
  Error changed(uint64_t shard, const Error& error) const;

  const std::unique_ptr<const SampleIndex> index_;
  const SourceAccessRef access_;
  const std::unique_ptr<ShardFiles> files_;
};
using SampleSourceRef = std::shared_ptr<const SampleSource>;

/// Opens the index file if it is there and still true of the shards (names, sizes, mtimes, inodes);
/// else builds it, on `threads` threads (0: one for each core), and renames it into place when it
/// is durable. All reading of shards, later too, is by `access`; the index is this process's own.
/// Errors: kInvalidArgument with the shard, the offset and what to do; kNotFound: no shard at all;
/// kPermissionDenied; kCancelled: stop.
Result<SampleSourceRef> open_source(
    const SourceSpec& spec, const std::string& index_path, IndexProgress& progress,
    std::stop_token stop = {}, unsigned threads = 0,
    SourceAccessRef access = std::make_shared<const SourceAccess>());

}  // namespace ptc
