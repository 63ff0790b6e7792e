// The index of a source: one file, mapped. Where each sample begins, and which shard it lies in.
//
//   header | for each shard its packed starts (and for `files` names and stamps) | shard records |
//     names | facts
//
// Written to `<path>.part`, made durable, and renamed: a file of that name is whole. All of it has
// a CRC32C, checked when it is opened. It says nothing of the machine but the inodes and mtimes of
// the shards, and whom these let read them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/indexer.h"
#include "dataset/source/sample_source.h"
#include "dataset/source/shard_list.h"
#include "dataset/source/shard_rights.h"
#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// Persisted.
struct ShardRecord {
  uint64_t first_sample = 0, samples = 0;
  uint64_t end = 0;          // of the last sample
  FileStamp stamp;           // kFiles: its bytes are those of all files of the group
  uint64_t section = 0;      // offset in the index of the packed starts
  uint64_t file_names = 0;   // kFiles: of the packed starts of names in the text of names
  uint64_t file_stamps = 0;  // kFiles: of a u64 a file
  uint64_t file_text = 0;    // kFiles: of the names, one behind the other
  uint64_t name = 0, name_bytes = 0;
  uint32_t root = 0;
  uint32_t lacks_newline = 0;
};

/// What is known of the whole.
struct IndexFacts {
  SourceFormat format = SourceFormat::kTar;
  uint64_t digest = 0;  // of the list of shards it was made of
  uint64_t samples = 0, bytes = 0, fingerprint = 0;
  uint64_t places_fingerprint = 0;  // of places alone, where `fingerprint` is of all content
  uint64_t former_fingerprint = 0;  // without content
  uint8_t megatron_dtype = 0;
  bool keys_repeat = false;  // kTar: samples of two shards have one key
  std::vector<std::string> roots, field_names;
  std::vector<MdsColumn> columns;
  std::vector<SkippedShard> skipped;
  std::vector<ListedShard> directories;  // kFiles
  ShardRights rights;                    // as the shards had them when they were indexed
};

/// Threads: any. Immutable.
class SampleIndex {
 public:
  /// kNotFound, or kCorrupt where it is not a whole index of this version.
  static Result<std::unique_ptr<const SampleIndex>> open(const std::string& path);
  ~SampleIndex();

  const IndexFacts& facts() const { return facts_; }
  uint64_t shards() const { return records_.size(); }
  const ShardRecord& shard(uint64_t shard) const { return records_[shard]; }
  /// What looking up samples needs: all but the names and stamps of files.
  uint64_t memory_bytes() const { return memory_bytes_; }
  std::string shard_path(uint64_t shard) const;

  uint64_t shard_of(uint64_t id) const;
  /// Of sample `i` of a shard.
  uint64_t start(const ShardRecord& shard, uint64_t i) const;
  uint64_t end(const ShardRecord& shard, uint64_t i) const;
  uint64_t extra(const ShardRecord& shard, uint64_t i) const;
  /// Of file `i` of a group; its name is below the root.
  std::string_view file_name(const ShardRecord& group, uint64_t i) const;
  uint64_t file_stamp(const ShardRecord& group, uint64_t i) const;

 private:
  SampleIndex() = default;
  PackedOffsets starts(const ShardRecord& shard) const;

  const std::byte* map_ = nullptr;
  uint64_t bytes_ = 0, memory_bytes_ = 0;
  IndexFacts facts_;
  std::span<const ShardRecord> records_;
  std::vector<uint64_t> first_samples_;
  uint64_t unit_ = 1;
};

/// One shard, as it goes into the index.
struct IndexedShard {
  ShardRecord record;   // places in it count from the beginning of `section`
  std::string section;  // file_text last
  std::string name;
};

/// Writes an index front to back. Threads: one.
class IndexWriter {
 public:
  static Result<IndexWriter> create(const std::string& path);
  Result<> add(IndexedShard shard);
  /// The file is durable and under its name. Fills in samples, bytes and fingerprint.
  Result<> finish(IndexFacts facts);

 private:
  IndexWriter(std::string path, UniqueFd fd);
  Result<> append(std::string_view bytes);
  Result<> flush();

  std::string path_, buffer_;
  UniqueFd fd_;
  uint64_t written_;
  uint32_t crc_ = 0;
  std::vector<ShardRecord> records_;
  std::string names_;
  uint64_t samples_ = 0, bytes_ = 0;
};

/// What is kept of a file's stamp beside its size.
uint64_t short_stamp(const FileStamp& stamp);

}  // namespace ptc
