// Files that are made of samples when they are read: nothing is stored, any offset can be read.
//
// Every byte is a pure function of the source and of the samples asked for. Sizes come from the
// index alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/sample_source.h"
#include "store/base/error.h"

namespace ptc {

enum class TreeKind { kTar, kMds, kMegatron, kJsonl, kTfrecord, kFiles };

/// "tar", "mds" …: the directory's name.
std::string_view tree_name(TreeKind kind);

/// What the source can be shown as, without loss. Its own format and `tar` and `files` always;
/// `mds` when all samples have the same fields; `tfrecord` when each has one; `jsonl` and
/// `megatron` only as themselves.
std::vector<TreeKind> trees_of(const SampleSource& source);

/// A file of the source that a virtual file is the whole of: for passthrough.
struct WholeFile {
  std::string path;
  std::shared_ptr<const UniqueFd> fd;  // open for reading, checked
};

/// Immutable. Threads: any.
class VirtualFile {
 public:
  virtual ~VirtualFile() = default;
  virtual uint64_t size() const = 0;
  /// Fills `out` from `offset` on; fewer bytes only at the end of the file, 0 behind it. Errors as
  /// of SampleSource: they name the shard.
  virtual Result<size_t> read(uint64_t offset, std::span<std::byte> out) const = 0;
  /// The same for memory that other threads are to read: past the caches, where that is quicker.
  virtual Result<size_t> gather(uint64_t offset, std::span<std::byte> out) const {
    return read(offset, out);
  }
  /// Set where this is a source file, byte for byte.
  virtual Result<std::optional<WholeFile>> whole() const { return std::optional<WholeFile>(); }
  /// Whether the samples may be read now, for what was made of them before: asked at each open.
  virtual Result<> may_read() const { return ok(); }
  /// Whether readers open it once, as a rule, and take all of it: then it may be made as a whole.
  virtual bool read_through() const { return false; }
};
using VirtualFileRef = std::shared_ptr<const VirtualFile>;

/// What a sample adds to a shard of this kind, which trees_of() lists (not kMegatron or kFiles); of
/// mds with its place in the table of offsets. O(log shards), no I/O.
uint64_t sample_bytes(TreeKind kind, const SampleSource& source, uint64_t id);

/// One shard of these samples in this order: tar, jsonl, tfrecord, or one MDS shard.
///
/// tar: a tar's members as they are; else `<id>.<field>`, mode 0644, owner 0, time 0. An id that is
/// there twice is there twice. kInvalidArgument: a kind that trees_of() does not list; MDS of 4 GiB
/// or more. Takes 16 bytes a sample.
Result<VirtualFileRef> make_shard(TreeKind kind, SampleSourceRef source, std::vector<uint64_t> ids);

/// MDS shards one behind the other.
struct MdsShards {
  uint64_t samples = 0, each = 1;  // in all; of a shard, but for the last
  /// The samples of a shard, in order. Called while reading, on any thread; its answers never
  /// change.
  std::function<std::vector<uint64_t>(uint64_t)> ids;
};
/// "shard.00000.mds", of so many: as wide as the last number.
std::string mds_shard_name(uint64_t shard, uint64_t shards);
/// index.json of these, as MosaicML's reader wants it. It says how large each shard is: the sum of
/// its samples, which the order of the epoch chooses, so that nothing says it but all of them. So a
/// read works out what it shows, on all cores, and no more; size() is known without. Takes 4 bytes
/// a shard for what was worked out, and no time where all samples are of one size. Errors of reads:
/// kInvalidArgument: a shard of 4 GiB or more.
VirtualFileRef make_mds_index(SampleSourceRef source, MdsShards shards);

/// The files of one sample, by extension. Names alone need no I/O where field_names() is not empty.
Result<std::vector<std::string>> member_extensions(const SampleSource& source, uint64_t id);
struct Member {
  std::string extension;  // "jpg"
  VirtualFileRef file;
};
Result<std::vector<Member>> members_of(const SampleSourceRef& source, uint64_t id);

/// The tokens of all shards one behind the other: whole() when there is one shard.
Result<VirtualFileRef> make_megatron_bin(SampleSourceRef source);
/// The index that names `count` sequences in the order id_at(0) …, each a document, within
/// make_megatron_bin(). id_at is called while reading, on any thread; its answers never change.
/// Takes no memory.
Result<VirtualFileRef> make_megatron_idx(SampleSourceRef source, uint64_t count,
                                         std::function<uint64_t(uint64_t)> id_at);

}  // namespace ptc
