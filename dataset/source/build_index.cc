#include "dataset/source/build_index.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_set>

#include "dataset/source/fnv.h"
#include "dataset/source/folder_files.h"
#include "dataset/source/in_order.h"
#include "dataset/source/indexer.h"
#include "dataset/source/sample_index.h"
#include "store/base/crc32c.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// Of content: of some places of it, and of all of it where that is asked for (else the same).
struct ContentCrc {
  uint32_t places = 0, all = 0;
};

/// A shard with what the whole must know of it.
struct BuiltShard {
  IndexedShard shard;
  std::vector<std::string> field_names;
  uint8_t megatron_dtype = 0;
  uint32_t places_crc = 0;  // of the section but for what is of this machine
  ContentCrc content;
  ShardRights rights;
  std::vector<SkippedShard> skipped;  // files of a group
  std::vector<uint64_t> key_hashes;
};

/// Whether some key is in two shards. Of many keys it looks at a part, as their hashes have it:
/// where shards are numbered alike that finds some, and what it overlooks is as rare as two
/// neighbours of one key.
class RepeatedKeys {
 public:
  void add(const std::vector<uint64_t>& hashes) {
    for (const uint64_t hash : hashes) {
      if (any_) return;
      if ((hash >> 32 & left_out_) != 0) continue;
      any_ = !seen_.insert(hash).second;
      if (seen_.size() <= kMostKept) continue;
      left_out_ = left_out_ * 2 + 1;
      std::erase_if(seen_, [&](uint64_t kept) { return (kept >> 32 & left_out_) != 0; });
    }
    if (any_) seen_.clear();
  }
  bool any() const { return any_; }

 private:
  static constexpr size_t kMostKept = 1 << 20;
  std::unordered_set<uint64_t> seen_;
  uint64_t left_out_ = 0;
  bool any_ = false;
};

constexpr uint64_t kMaxShardBytes = uint64_t{1}
                                    << 55;  // what packed starts can hold, and more than there is

// Where content is looked at that indexing does not read: the same on all nodes.
constexpr uint64_t kPlaceBytes = 4096, kPlacesInShard = 16, kPlacesInFile = 3;
constexpr uint64_t kReadBytes = 1 << 20;  // at once, where all of it is read

uint32_t crc_of(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

/// Of so many places of a file, the first and the last of its bytes among them; of all of it, where
/// that is as much.
Result<uint32_t> crc_of_places(int fd, uint64_t bytes, uint64_t places, uint32_t crc) {
  std::array<std::byte, kPlaceBytes> buffer;
  const bool all = bytes <= places * kPlaceBytes;
  const uint64_t count = all ? (bytes + kPlaceBytes - 1) / kPlaceBytes : places;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t at = all ? i * kPlaceBytes : (bytes - kPlaceBytes) / (places - 1) * i;
    const std::span<std::byte> place =
        std::span(buffer).first(std::min<uint64_t>(kPlaceBytes, bytes - at));
    PTC_TRY(read_exactly(fd, place, at));
    crc = crc32c(place, crc);
  }
  return crc;
}

class IndexBuilder {
 public:
  IndexBuilder(const ShardList& list, const SourceAccess& access, const SourceSpec& spec,
               IndexContext context)
      : list_(list),
        access_(access),
        on_error_(spec.on_error),
        all_content_(spec.fingerprint_of_all_content),
        context_(std::move(context)) {}

  Result<BuiltShard> shard(const ListedShard& listed) const {
    PTC_TRY(const ActingAs as, access_.act());
    const std::string path = list_.roots[listed.root] + '/' + listed.name;
    auto built = shard_at(path, listed);
    if (!built) return std::move(built).error().with_context(ptc::quoted(path));
    context_.progress->samples += built.value().shard.record.samples;
    return built;
  }

  Result<BuiltShard> group(const FileGroup& group) const {
    PTC_TRY(const ActingAs as, access_.act());
    BuiltShard built;
    ShardRecord& record = built.shard.record;
    record.root = group.root;
    OffsetPacker starts, names;
    std::string stamps, text;
    for (size_t at = 0; at < group.names.size(); at += std::strlen(&group.names[at]) + 1) {
      if (context_.stop.stop_requested()) return Error(Code::kCancelled, "stopped");
      const std::string name = &group.names[at];
      const std::string path = list_.roots[group.root] + '/' + name;
      auto stamp = file_stamp(path);
      if (stamp && stamp.value().bytes > kMaxShardBytes - record.end)
        stamp = invalid_argument("too large");
      if (!stamp) {
        Error error = std::move(stamp).error().with_context(ptc::quoted(path));
        if (on_error_ == OnError::kRefuse) return error;
        built.skipped.push_back({path, error.message()});
        continue;
      }
      const auto crc = crc_of_file(path, stamp.value().bytes, built.rights);
      if (!crc) {
        Error error = Error(crc.error()).with_context(ptc::quoted(path));
        if (on_error_ == OnError::kRefuse) return error;
        built.skipped.push_back({path, error.message()});
        continue;
      }
      for (const auto part : {&ContentCrc::places, &ContentCrc::all})
        built.content.*part =
            crc32c(std::as_bytes(std::span(&(crc.value().*part), 1)), built.content.*part);
      starts.add(record.end);
      names.add(text.size());
      text.append(name).push_back('\0');
      const uint64_t kept = short_stamp(stamp.value());
      stamps.append(reinterpret_cast<const char*>(&kept), sizeof kept);
      record.end += stamp.value().bytes;
      const std::vector<std::string> field = {std::string(file_extension(name))};
      if (starts.count() == 1) built.field_names = field;
      else if (built.field_names != field) built.field_names.clear();
    }
    record.samples = starts.count();
    record.stamp.bytes = record.end;
    built.shard.section = starts.finish();
    built.places_crc = crc32c(std::as_bytes(std::span(text)), crc_of(built.shard.section));
    record.file_names = built.shard.section.size();
    built.shard.section += names.finish();
    record.file_stamps = built.shard.section.size();
    built.shard.section += stamps;
    record.file_text = built.shard.section.size();
    built.shard.section += text;
    context_.progress->samples += record.samples;
    return built;
  }

 private:
  Result<BuiltShard> shard_at(const std::string& path, const ListedShard& listed) const {
    PTC_TRY(const UniqueFd fd, access_.open(path, Wanted::kFile));
    PTC_TRY(const FileStamp before, stamp_of(fd.get()));
    if (before.bytes > kMaxShardBytes)
      return invalid_argument("{} bytes are too many", before.bytes);
    PTC_TRY(ShardRights rights, path_rights_.of(fd.get()));
    auto indexed = facts_of(fd.get(), before.bytes, path, listed, rights);
    if (!indexed) {
      PTC_TRY(refuse_compressed(fd.get()));
      return std::move(indexed).error();
    }
    ShardFacts& facts = indexed.value();
    PTC_TRY(const ContentCrc content,
            crc_of_content(fd.get(), before.bytes, kPlacesInShard, facts.content_crc));
    PTC_TRY(const FileStamp after, stamp_of(fd.get()));
    if (before != listed.stamp || after != before)
      return invalid_argument(
          "it was written to while it was indexed; wait for its writer, then save source.json "
          "again");
    BuiltShard built;
    built.shard.name = listed.name;
    built.shard.section = facts.starts.finish();
    built.shard.record = {.samples = facts.starts.count(),
                          .end = facts.end,
                          .stamp = after,
                          .root = listed.root,
                          .lacks_newline = facts.lacks_newline};
    built.field_names = std::move(facts.field_names);
    built.megatron_dtype = facts.megatron_dtype;
    built.key_hashes = std::move(facts.key_hashes);
    built.places_crc = crc_of(built.shard.section);
    built.content = content;
    built.rights = rights;
    return built;
  }

  Result<ShardFacts> facts_of(int fd, uint64_t bytes, const std::string& path,
                              const ListedShard& listed, ShardRights& rights) const {
    switch (list_.format) {
      case SourceFormat::kTar:
        return index_tar(fd, bytes, context_);
      case SourceFormat::kTfrecord:
        return index_tfrecord(fd, bytes, context_);
      case SourceFormat::kMds:
        if (bytes != listed.mds_bytes)
          return invalid_argument("byte {}: the shard ends here, but index.json says {} bytes",
                                  bytes, listed.mds_bytes);
        return index_mds(fd, bytes, listed.mds_samples, list_.columns, context_);
      case SourceFormat::kMegatron: {
        const std::string idx_path = path.substr(0, path.size() - 3) + "idx";
        PTC_TRY(const UniqueFd idx, access_.open(idx_path, Wanted::kFile));
        PTC_TRY(const FileStamp idx_stamp, stamp_of(idx.get()));
        PTC_TRY(const ShardRights of_idx, path_rights_.of(idx.get()));
        rights.add(of_idx);
        return index_megatron(idx.get(), idx_stamp.bytes, bytes, context_);
      }
      default:
        return index_jsonl(fd, bytes, context_);
    }
  }

  Result<ContentCrc> crc_of_file(const std::string& path, uint64_t bytes,
                                 ShardRights& rights) const {
    PTC_TRY(const UniqueFd fd, access_.open(path, Wanted::kFile));
    PTC_TRY(const ShardRights of_file, path_rights_.of(fd.get()));
    rights.add(of_file);
    return crc_of_content(fd.get(), bytes, kPlacesInFile, 0);
  }

  Result<ContentCrc> crc_of_content(int fd, uint64_t bytes, uint64_t places, uint32_t crc) const {
    ContentCrc both;
    PTC_TRY(both.places, crc_of_places(fd, bytes, places, crc));
    both.all = both.places;
    if (!all_content_) return both;
    const auto buffer = std::make_unique<std::byte[]>(kReadBytes);
    for (uint64_t at = 0; at < bytes;) {
      if (context_.stop.stop_requested()) return Error(Code::kCancelled, "stopped");
      const std::span<std::byte> some(buffer.get(), std::min<uint64_t>(kReadBytes, bytes - at));
      PTC_TRY(read_exactly(fd, some, at));
      crc = crc32c(some, crc);
      at += some.size();
      if (list_.format != SourceFormat::kFiles)  // how many all of these have is not known
        context_.progress->bytes_done += some.size();
    }
    both.all = crc;
    return both;
  }

  Result<FileStamp> file_stamp(const std::string& path) const {
    PTC_TRY(const struct stat facts, access_.stat(path));
    if (!S_ISREG(facts.st_mode)) return invalid_argument("not a regular file");
    if (file_extension(path).size() > kMaxFieldBytes)
      return invalid_argument("its extension is longer than {} bytes", kMaxFieldBytes);
    return FileStamp{.bytes = static_cast<uint64_t>(facts.st_size),
                     .mtime_ns = facts.st_mtim.tv_sec * 1'000'000'000 + facts.st_mtim.tv_nsec,
                     .inode = facts.st_ino};
  }

  const ShardList& list_;
  const SourceAccess& access_;
  const OnError on_error_;
  const bool all_content_;
  const IndexContext context_;
  mutable PathRights path_rights_;
};

/// Puts the shards together as they come, in their order.
class Assembler {
 public:
  Assembler(IndexWriter& writer, OnError on_error, IndexFacts& facts, IndexProgress& progress)
      : writer_(writer), on_error_(on_error), facts_(facts), progress_(progress) {}

  Result<> take(Result<BuiltShard> built, const std::string& path) {
    ++progress_.shards_done;
    if (!built) {
      const Code code = built.error().code();
      if (on_error_ == OnError::kRefuse || code == Code::kCancelled || code == Code::kNoSpace)
        return std::move(built).error();
      facts_.skipped.push_back({path, built.error().message()});
      return ok();
    }
    BuiltShard& shard = built.value();
    std::move(shard.skipped.begin(), shard.skipped.end(), std::back_inserter(facts_.skipped));
    fingerprint_.add(shard.shard.name)
        .add(uint64_t{shard.shard.record.root})
        .add(shard.shard.record.stamp.bytes);
    fingerprint_.add(shard.shard.record.samples)
        .add(shard.shard.record.end)
        .add(uint64_t{shard.places_crc});
    contents_.add(uint64_t{shard.content.all});
    places_.add(uint64_t{shard.content.places});
    facts_.rights.add(shard.rights);
    if (shard.shard.record.samples == 0) return writer_.add(std::move(shard.shard));
    if (!any_) facts_.field_names = shard.field_names;
    else if (facts_.field_names != shard.field_names) facts_.field_names.clear();
    if (any_ && facts_.megatron_dtype != shard.megatron_dtype)
      return invalid_argument(
          "{}: its tokens are of another type than those of the shards before it",
          ptc::quoted(path));
    facts_.megatron_dtype = shard.megatron_dtype;
    any_ = true;
    keys_.add(shard.key_hashes);
    facts_.keys_repeat = keys_.any();
    return writer_.add(std::move(shard.shard));
  }
  uint64_t fingerprint() const {
    return Fnv().add(former_fingerprint()).add(contents_.value()).value();
  }
  /// What it would be if not all content were asked for.
  uint64_t places_fingerprint() const {
    return Fnv().add(former_fingerprint()).add(places_.value()).value();
  }
  uint64_t former_fingerprint() const { return fingerprint_.value(); }

 private:
  IndexWriter& writer_;
  OnError on_error_;
  IndexFacts& facts_;
  IndexProgress& progress_;
  bool any_ = false;
  RepeatedKeys keys_;
  Fnv fingerprint_, contents_, places_;
};

}  // namespace

std::string_view file_extension(std::string_view path) {
  path.remove_prefix(path.rfind('/') + 1);
  const size_t dot = path.rfind('.');
  const bool none = dot == std::string_view::npos || dot == 0 || dot + 1 == path.size();
  return none ? "bin" : path.substr(dot + 1);
}

Result<> refuse_compressed(int fd) {
  unsigned char head[6] = {};
  if (::pread(fd, head, sizeof head, 0) < 4) return ok();
  const std::string_view text(reinterpret_cast<const char*>(head), sizeof head);
  const char* name = text.starts_with("\x1F\x8B")           ? "gzip"
                     : text.starts_with("\x28\xB5\x2F\xFD") ? "zstd"
                     : text.starts_with("BZh")              ? "bzip2"
                     : text.starts_with(
                           "\xFD"
                           "7zXZ")
                         ? "xz"
                         : nullptr;
  if (name == nullptr) return ok();
  return invalid_argument(
      "byte 0: compressed with {}, which cannot be read in the middle; decompress it", name);
}

Result<> build_index(const ShardList& list, const SourceAccess& access, const SourceSpec& spec,
                     const std::string& path, IndexProgress& progress, std::stop_token stop,
                     unsigned threads) {
  IndexFacts facts{
      .format = list.format, .digest = list.digest, .roots = list.roots, .columns = list.columns};
  FolderFiles folder;
  const bool files = list.format == SourceFormat::kFiles;
  if (files) {
    PTC_TRY(folder, list_files(list, access, stop));
    facts.directories = std::move(folder.directories);
  } else {
    for (const ListedShard& shard : list.shards) {
      progress.bytes +=
          list.format == SourceFormat::kMegatron ? shard.idx_stamp.bytes : shard.stamp.bytes;
      if (spec.fingerprint_of_all_content) progress.bytes += shard.stamp.bytes;
    }
  }
  const uint64_t count = files ? folder.groups.size() : list.shards.size();
  progress.shards = count;
  PTC_TRY(IndexWriter writer, IndexWriter::create(path));
  const IndexBuilder builder(list, access, spec, {.stop = stop, .progress = &progress});
  Assembler assembler(writer, spec.on_error, facts, progress);
  PTC_TRY(in_order<BuiltShard>(
      count, threads, stop,
      [&](uint64_t i) {
        return files ? builder.group(folder.groups[i]) : builder.shard(list.shards[i]);
      },
      [&](uint64_t i, Result<BuiltShard> built) {
        const uint32_t root = files ? folder.groups[i].root : list.shards[i].root;
        return assembler.take(std::move(built),
                              list.roots[root] + '/' + (files ? "" : list.shards[i].name));
      }));
  facts.fingerprint = assembler.fingerprint();
  facts.places_fingerprint = assembler.places_fingerprint();
  facts.former_fingerprint = assembler.former_fingerprint();
  return writer.finish(std::move(facts));
}

}  // namespace ptc
