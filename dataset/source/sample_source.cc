#include "dataset/source/sample_source.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "dataset/source/build_index.h"
#include "dataset/source/folder_files.h"
#include "dataset/source/indexer.h"
#include "dataset/source/masked_crc.h"
#include "dataset/source/sample_index.h"
#include "dataset/source/shard_files.h"
#include "dataset/source/tar_reader.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// A sample's place in the index.
struct Place {
  uint64_t shard;
  const ShardRecord& record;
  uint64_t i, begin, end;
};

Place place_of(const SampleIndex& index, uint64_t id) {
  const uint64_t shard = index.shard_of(id);
  const ShardRecord& record = index.shard(shard);
  const uint64_t i = id - record.first_sample;
  return {shard, record, i, index.start(record, i), index.end(record, i)};
}

/// Of all columns of a sample, and of those of variable length the bytes that say how long they
/// are.
uint64_t mds_length_bytes(const SampleIndex& index) {
  return 4 * mds_variable_columns(index.facts().columns);
}

}  // namespace

SampleSource::SampleSource(std::unique_ptr<const SampleIndex> index, SourceAccessRef access)
    : index_(std::move(index)),
      access_(std::move(access)),
      files_(std::make_unique<ShardFiles>(*index_, access_)) {}
SampleSource::~SampleSource() = default;

SourceFormat SampleSource::format() const { return index_->facts().format; }
uint64_t SampleSource::samples() const { return index_->facts().samples; }
uint64_t SampleSource::bytes() const { return index_->facts().bytes; }
uint64_t SampleSource::fingerprint() const { return index_->facts().fingerprint; }
bool SampleSource::has_fingerprint(uint64_t fingerprint) const {
  const IndexFacts& facts = index_->facts();
  return fingerprint == facts.fingerprint || fingerprint == facts.places_fingerprint ||
         fingerprint == facts.former_fingerprint;
}
const std::vector<SkippedShard>& SampleSource::skipped() const { return index_->facts().skipped; }
const ShardRights& SampleSource::rights() const { return index_->facts().rights; }
const User* SampleSource::reader() const { return access_->user(); }
uint64_t SampleSource::index_bytes() const { return index_->memory_bytes(); }
const std::vector<std::string>& SampleSource::field_names() const {
  return index_->facts().field_names;
}
const std::vector<MdsColumn>& SampleSource::mds_columns() const { return index_->facts().columns; }
uint8_t SampleSource::megatron_dtype() const { return index_->facts().megatron_dtype; }

Extent SampleSource::extent(uint64_t id) const {
  const Place place = place_of(*index_, id);
  if (format() == SourceFormat::kFiles) return {id, 0, place.end - place.begin};
  return {place.shard, place.begin, place.end - place.begin};
}

uint64_t SampleSource::payload_bytes(uint64_t id) const {
  const Place place = place_of(*index_, id);
  const uint64_t bytes = place.end - place.begin;
  switch (format()) {
    case SourceFormat::kTar:
      return bytes - index_->extra(place.record, place.i);
    case SourceFormat::kMds:
      return bytes - mds_length_bytes(*index_);
    case SourceFormat::kTfrecord:
      return bytes - kTfrecordFrameBytes;
    case SourceFormat::kJsonl:
      return bytes + (place.record.lacks_newline && place.i + 1 == place.record.samples);
    default:
      return bytes;
  }
}

std::optional<uint64_t> SampleSource::payload_blocks(uint64_t id) const {
  const auto blocks = [](uint64_t bytes) { return (bytes + kTarUnit - 1) / kTarUnit; };
  if (format() == SourceFormat::kTar) return std::nullopt;
  const std::vector<MdsColumn>& columns = mds_columns();
  if (columns.size() < 2) return blocks(payload_bytes(id));
  if (mds_variable_columns(columns) == 0) {
    uint64_t sum = 0;
    for (const MdsColumn& column : columns) sum += blocks(*column.bytes);
    return sum;
  }
  const Place place = place_of(*index_, id);
  return blocks(payload_bytes(id)) + index_->extra(place.record, place.i);
}

bool SampleSource::lacks_newline(uint64_t id) const {
  if (format() != SourceFormat::kJsonl) return false;
  const Place place = place_of(*index_, id);
  return place.record.lacks_newline && place.i + 1 == place.record.samples;
}

Result<std::vector<Field>> SampleSource::fields(uint64_t id) const {
  const Extent extent = this->extent(id);
  switch (format()) {
    case SourceFormat::kTar:
      return tar_fields(extent);
    case SourceFormat::kMds:
      return mds_column_fields(extent);
    case SourceFormat::kTfrecord:
      return std::vector<Field>{
          {"bin", {extent.shard, extent.offset + 12, extent.bytes - kTfrecordFrameBytes}}};
    case SourceFormat::kJsonl:
      return std::vector<Field>{{"json", extent}};
    case SourceFormat::kMegatron:
      return std::vector<Field>{{"bin", extent}};
    case SourceFormat::kFiles:
      break;
  }
  return std::vector<Field>{{std::string(file_extension_of(id)), extent}};
}

std::string_view SampleSource::file_extension_of(uint64_t id) const {
  const ShardRecord& group = index_->shard(index_->shard_of(id));
  return file_extension(index_->file_name(group, id - group.first_sample));
}

bool SampleSource::keys_repeat() const { return index_->facts().keys_repeat; }

Result<std::string> SampleSource::key(uint64_t id) const {
  const Extent extent = this->extent(id);
  PTC_TRY(const auto file, files_->open(extent.shard));
  ShardReader shard(file->fd.get(), extent.offset, extent.offset + extent.bytes, {}, 4096);
  TarReader reader(shard, TarReader::End::kBytes);
  while (true) {
    auto member = reader.next();
    if (!member) return changed(extent.shard, member.error());
    if (!member.value()) return std::string();
    const auto name = member.value()->regular ? sample_name(member.value()->name) : std::nullopt;
    if (name) return std::string(name->key);
  }
}

Result<std::vector<Field>> SampleSource::tar_fields(const Extent& extent) const {
  PTC_TRY(const auto file, files_->open(extent.shard));
  ShardReader shard(file->fd.get(), extent.offset, extent.offset + extent.bytes, {}, 4096);
  TarReader reader(shard, TarReader::End::kBytes);
  std::vector<Field> fields;
  while (true) {
    auto member = reader.next();
    if (!member) return changed(extent.shard, member.error());
    if (!member.value()) return fields;
    const TarMember& found = *member.value();
    const auto name = found.regular ? sample_name(found.name) : std::nullopt;
    if (name) fields.push_back({std::string(name->field), {extent.shard, found.data, found.size}});
  }
}

Result<std::vector<Field>> SampleSource::mds_column_fields(const Extent& extent) const {
  const std::vector<MdsColumn>& columns = mds_columns();
  std::vector<std::byte> lengths(mds_length_bytes(*index_));
  if (lengths.size() == 4) {  // what is not of the others
    uint32_t rest = static_cast<uint32_t>(extent.bytes) - 4;
    for (const MdsColumn& column : columns) rest -= column.bytes.value_or(0);
    std::memcpy(lengths.data(), &rest, sizeof rest);
  } else {
    PTC_TRY(read(extent.shard, extent.offset, lengths));
  }
  auto sizes = mds_column_bytes(lengths, extent.bytes, columns);
  if (!sizes) return changed(extent.shard, sizes.error());
  std::vector<Field> fields;
  uint64_t at = extent.offset + lengths.size();
  for (size_t i = 0; i < columns.size(); ++i) {
    fields.push_back({columns[i].name, {extent.shard, at, sizes.value()[i]}});
    at += sizes.value()[i];
  }
  return fields;
}

Error SampleSource::changed(uint64_t shard, const Error& error) const {
  return make_error(Code::kCorrupt, "{} is not what was indexed: {}",
                    ptc::quoted(shard_path(shard)), error.message());
}

uint64_t SampleSource::shards() const {
  return format() == SourceFormat::kFiles ? samples() : index_->shards();
}
uint64_t SampleSource::shard_bytes(uint64_t shard) const {
  return format() == SourceFormat::kFiles ? extent(shard).bytes : index_->shard(shard).stamp.bytes;
}
std::string SampleSource::shard_path(uint64_t shard) const { return path_of_shard(*index_, shard); }

Result<> SampleSource::read(uint64_t shard, uint64_t offset, std::span<std::byte> out) const {
  PTC_TRY(const OpenShard opened, open_shard(shard));
  return read(opened, offset, out, Stores::kPlain);
}
Result<> SampleSource::read(const OpenShard& shard, uint64_t offset, std::span<std::byte> out,
                            Stores stores) const {
  return files_->read(shard.shard, *shard.file, offset, out, stores);
}
Result<OpenShard> SampleSource::open_shard(uint64_t shard) const {
  PTC_TRY(auto file, files_->open(shard));
  return OpenShard{shard, std::move(file)};
}
Result<std::shared_ptr<const UniqueFd>> SampleSource::open_shard_fd(uint64_t shard) const {
  PTC_TRY(const auto file, files_->open(shard));
  return std::shared_ptr<const UniqueFd>(file, &file->fd);
}

Result<> SampleSource::may_read(std::span<const uint64_t> ids) const {
  std::vector<uint64_t> shards;
  shards.reserve(ids.size());
  for (const uint64_t id : ids)
    shards.push_back(format() == SourceFormat::kFiles ? id : index_->shard_of(id));
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  return files_->may_read(shards);
}

Result<SampleSourceRef> open_source(const SourceSpec& spec, const std::string& index_path,
                                    IndexProgress& progress, std::stop_token stop, unsigned threads,
                                    SourceAccessRef access) {
  PTC_TRY(const ShardList list, list_shards(spec, *access, stop));
  if (auto index = SampleIndex::open(index_path)) {
    const IndexFacts& facts = index.value()->facts();
    if (facts.digest == list.digest && unchanged(list, *access, facts.directories, stop))
      return SampleSourceRef(
          std::make_shared<const SampleSource>(std::move(index).value(), std::move(access)));
  }
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  PTC_TRY(build_index(list, *access, spec, index_path, progress, std::move(stop), threads));
  PTC_TRY(auto index, SampleIndex::open(index_path));
  return SampleSourceRef(std::make_shared<const SampleSource>(std::move(index), std::move(access)));
}

}  // namespace ptc
