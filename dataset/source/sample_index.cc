#include "dataset/source/sample_index.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "dataset/source/fnv.h"
#include "dataset/source/index_facts.h"
#include "store/base/crc32c.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr char kIndexMagic[8] = {'P', 'T', 'C', 'I', 'N', 'D', 'X', '\n'};
constexpr uint32_t kIndexVersion = 5;
constexpr size_t kIndexBuffer = 1 << 20;

/// Persisted. Everything behind it is covered by body_crc.
struct IndexHeader {
  char magic[8];
  uint32_t version, body_crc;
  uint64_t bytes;             // of the file
  uint64_t records, shards;   // offset; how many
  uint64_t names, facts;      // offsets; each ends where the next begins, facts at the end
  uint32_t header_crc, zero;  // of all before it
};

std::span<const std::byte> raw(const void* data, size_t bytes) {
  return {static_cast<const std::byte*>(data), bytes};
}
uint32_t crc_of_header(const IndexHeader& header) {
  return crc32c(raw(&header, offsetof(IndexHeader, header_crc)));
}

}  // namespace

uint64_t short_stamp(const FileStamp& stamp) {
  return Fnv().add(static_cast<uint64_t>(stamp.mtime_ns)).add(stamp.inode).value();
}

Result<std::unique_ptr<const SampleIndex>> SampleIndex::open(const std::string& path) {
  PTC_TRY(const UniqueFd fd, open_file(AT_FDCWD, path, O_RDONLY));
  struct stat facts;
  if (::fstat(fd.get(), &facts) != 0) return errno_error(errno, path);
  auto corrupt = [&](std::string_view what) {
    return make_error(Code::kCorrupt, "{}: {}", path, what);
  };
  const auto size = static_cast<uint64_t>(facts.st_size);
  if (size < sizeof(IndexHeader)) return corrupt("too short for an index");
  void* const map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (map == MAP_FAILED) return errno_error(errno, path);
  std::unique_ptr<SampleIndex> index(new SampleIndex);
  index->map_ = static_cast<const std::byte*>(map);
  index->bytes_ = size;
  IndexHeader header;
  std::memcpy(&header, map, sizeof header);
  if (std::memcmp(header.magic, kIndexMagic, sizeof kIndexMagic) != 0 ||
      header.version != kIndexVersion)
    return corrupt("not an index of this version");
  if (header.header_crc != crc_of_header(header) || header.bytes != size)
    return corrupt("its header is damaged");
  if (header.body_crc != crc32c(raw(index->map_ + sizeof header, size - sizeof header)))
    return corrupt("its checksum is wrong");
  const bool ordered = header.records % alignof(ShardRecord) == 0 &&
                       header.records <= header.names && header.names <= header.facts &&
                       header.facts <= size &&
                       (header.names - header.records) / sizeof(ShardRecord) == header.shards;
  if (!ordered) return corrupt("its parts do not fit");
  index->records_ = {reinterpret_cast<const ShardRecord*>(index->map_ + header.records),
                     header.shards};
  auto text = [&](uint64_t begin, uint64_t end) {
    return std::string_view(reinterpret_cast<const char*>(index->map_) + begin, end - begin);
  };
  PTC_TRY(index->facts_, read_index_facts(text(header.facts, size)));
  for (const ShardRecord& record : index->records_) {
    const bool fits = record.name + record.name_bytes <= header.facts &&
                      record.section <= header.records && record.root < index->facts_.roots.size();
    if (!fits) return corrupt("a shard's record does not fit");
    index->first_samples_.push_back(record.first_sample);
    const uint64_t next =
        &record == &index->records_.back() ? header.records : (&record + 1)->section;
    const bool files = index->facts_.format == SourceFormat::kFiles;
    index->memory_bytes_ += (files ? record.file_names : next) - record.section + sizeof record + 8;
  }
  index->unit_ = index->facts_.format == SourceFormat::kTar ? kTarUnit : 1;
  return std::unique_ptr<const SampleIndex>(std::move(index));
}

SampleIndex::~SampleIndex() { ::munmap(const_cast<std::byte*>(map_), bytes_); }

std::string SampleIndex::shard_path(uint64_t shard) const {
  const ShardRecord& record = records_[shard];
  return facts_.roots[record.root] + '/' +
         std::string(reinterpret_cast<const char*>(map_) + record.name, record.name_bytes);
}

uint64_t SampleIndex::shard_of(uint64_t id) const {
  PTC_CHECK(id < facts_.samples);
  // Of empty shards, which begin where the next one does, this is the one behind them.
  const auto above = std::upper_bound(first_samples_.begin(), first_samples_.end(), id);
  return static_cast<uint64_t>(above - first_samples_.begin()) - 1;
}

PackedOffsets SampleIndex::starts(const ShardRecord& shard) const {
  return PackedOffsets(map_ + shard.section, shard.samples, unit_);
}
uint64_t SampleIndex::start(const ShardRecord& shard, uint64_t i) const {
  return starts(shard).start(i);
}
uint64_t SampleIndex::end(const ShardRecord& shard, uint64_t i) const {
  return i + 1 < shard.samples ? starts(shard).start(i + 1) : shard.end;
}
uint64_t SampleIndex::extra(const ShardRecord& shard, uint64_t i) const {
  return starts(shard).extra(i);
}

std::string_view SampleIndex::file_name(const ShardRecord& group, uint64_t i) const {
  const uint64_t at = PackedOffsets(map_ + group.file_names, group.samples, 1).start(i);
  return std::string_view(reinterpret_cast<const char*>(map_) + group.file_text +
                          at);  // a NUL ends it
}

uint64_t SampleIndex::file_stamp(const ShardRecord& group, uint64_t i) const {
  uint64_t stamp;
  std::memcpy(&stamp, map_ + group.file_stamps + 8 * i, sizeof stamp);
  return stamp;
}

IndexWriter::IndexWriter(std::string path, UniqueFd fd)
    : path_(std::move(path)), fd_(std::move(fd)), written_(sizeof(IndexHeader)) {}

Result<IndexWriter> IndexWriter::create(const std::string& path) {
  PTC_TRY(UniqueFd fd, open_file(AT_FDCWD, path + ".part", O_RDWR | O_CREAT | O_TRUNC));
  return IndexWriter(path, std::move(fd));
}

Result<> IndexWriter::append(std::string_view bytes) {
  buffer_ += bytes;
  return buffer_.size() < kIndexBuffer ? Result<>(ok()) : flush();
}

Result<> IndexWriter::flush() {
  PTC_TRY(write_exactly(fd_.get(), raw(buffer_.data(), buffer_.size()), written_));
  crc_ = crc32c(raw(buffer_.data(), buffer_.size()), crc_);
  written_ += buffer_.size();
  buffer_.clear();
  return ok();
}

Result<> IndexWriter::add(IndexedShard shard) {
  const uint64_t at = written_ + buffer_.size();
  ShardRecord& record = shard.record;
  record.first_sample = samples_;
  for (uint64_t* place :
       {&record.section, &record.file_names, &record.file_stamps, &record.file_text})
    *place += at;
  record.name = names_.size();
  record.name_bytes = shard.name.size();
  names_ += shard.name;
  samples_ += record.samples;
  bytes_ += record.stamp.bytes;
  // Not the stamp: it is of this machine. Of `files` the section has stamps, which are left out
  // likewise.
  records_.push_back(record);
  return append(shard.section);
}

Result<> IndexWriter::finish(IndexFacts facts) {
  facts.samples = samples_;
  facts.bytes = bytes_;
  const uint64_t end = written_ + buffer_.size();
  PTC_TRY(append(std::string((8 - end % 8) % 8, '\0')));
  IndexHeader header{.version = kIndexVersion, .shards = records_.size()};
  std::memcpy(header.magic, kIndexMagic, sizeof kIndexMagic);
  header.records = written_ + buffer_.size();
  header.names = header.records + records_.size() * sizeof(ShardRecord);
  header.facts = header.names + names_.size();
  for (ShardRecord& record : records_) {
    record.name += header.names;
    PTC_TRY(append({reinterpret_cast<const char*>(&record), sizeof record}));
  }
  PTC_TRY(append(names_));
  PTC_TRY(append(write_index_facts(facts)));
  PTC_TRY(flush());
  header.bytes = written_;
  header.body_crc = crc_;
  header.header_crc = crc_of_header(header);
  PTC_TRY(write_exactly(fd_.get(), raw(&header, sizeof header), 0));
  if (::fsync(fd_.get()) != 0) return errno_error(errno, path_);
  if (::rename((path_ + ".part").c_str(), path_.c_str()) != 0) return errno_error(errno, path_);
  return sync_directory(AT_FDCWD, std::filesystem::path(path_).parent_path());
}

}  // namespace ptc
