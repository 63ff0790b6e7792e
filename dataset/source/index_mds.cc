#include <algorithm>
#include <cstring>

#include "dataset/source/indexer.h"

namespace ptc {
namespace {

uint64_t blocks_of(uint64_t bytes) { return (bytes + kTarUnit - 1) / kTarUnit; }

}  // namespace

size_t mds_variable_columns(const std::vector<MdsColumn>& columns) {
  return std::count_if(columns.begin(), columns.end(), [](const auto& c) { return !c.bytes; });
}

Result<std::vector<uint64_t>> mds_column_bytes(std::span<const std::byte> lengths,
                                               uint64_t sample_bytes,
                                               const std::vector<MdsColumn>& columns) {
  std::vector<uint64_t> sizes;
  uint64_t sum = lengths.size();
  for (const MdsColumn& column : columns) {
    uint32_t size = column.bytes.value_or(0);
    if (!column.bytes) {
      std::memcpy(&size, lengths.data(), sizeof size);
      lengths = lengths.subspan(sizeof size);
    }
    sizes.push_back(size);
    sum += size;
  }
  if (sum != sample_bytes) {
    return invalid_argument("the columns of a sample take {} bytes, but the sample has {}", sum,
                            sample_bytes);
  }
  return sizes;
}

Result<ShardFacts> index_mds(int fd, uint64_t bytes, uint64_t samples,
                             const std::vector<MdsColumn>& columns, const IndexContext& context) {
  ShardReader table(fd, 0, bytes, {.stop = context.stop}), data(fd, 0, bytes, context);
  if (bytes < 8) return invalid_argument("byte 0: {} bytes are too few for an MDS shard", bytes);
  PTC_TRY(const uint32_t count, table.number<uint32_t>());
  if (count != samples) {
    return invalid_argument("byte 0: the shard has {} samples, but index.json says {}", count,
                            samples);
  }
  const uint64_t table_end = 4 + 4 * (uint64_t{count} + 1);
  if (table_end > bytes) {
    return invalid_argument("byte 0: a table of {} samples does not fit in {} bytes", count, bytes);
  }
  const uint64_t lengths_bytes = 4 * mds_variable_columns(columns);
  uint64_t fixed_bytes = lengths_bytes;
  for (const MdsColumn& column : columns) fixed_bytes += column.bytes.value_or(0);
  ShardFacts facts;
  for (const MdsColumn& column : columns) facts.field_names.push_back(column.name);
  PTC_TRY(uint32_t begin, table.number<uint32_t>());
  if (begin < table_end || begin > bytes) {
    return invalid_argument("byte 4: the first sample begins at byte {}, outside of {} to {}",
                            begin, table_end, bytes);
  }
  data.skip(begin);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = table.position();
    PTC_TRY(const uint32_t end, table.number<uint32_t>());
    if (end < begin || end > bytes) {
      return invalid_argument("byte {}: sample {} would reach from byte {} to {} of {}", at, i,
                              begin, end, bytes);
    }
    const uint64_t size = end - begin;
    if (size < fixed_bytes || (lengths_bytes == 0 && size != fixed_bytes)) {
      return invalid_argument("byte {}: sample {} has {} bytes, but its columns take at least {}",
                              begin, i, size, fixed_bytes);
    }
    uint64_t extra = 0;
    if (lengths_bytes > 0) {
      PTC_TRY(const auto lengths, data.peek(lengths_bytes));
      auto sizes = mds_column_bytes(lengths, size, columns);
      if (!sizes) return std::move(sizes).error().with_context(fmt::format("byte {}", begin));
      uint64_t blocks = 0;
      for (uint64_t column : sizes.value()) blocks += blocks_of(column);
      extra = blocks - blocks_of(size - lengths_bytes);
    }
    data.skip(size);
    facts.starts.add(begin, extra);
    begin = end;
  }
  if (begin != bytes) {
    return invalid_argument("byte {}: the last sample ends here, but the shard has {} bytes", begin,
                            bytes);
  }
  facts.end = bytes;
  return facts;
}

}  // namespace ptc
