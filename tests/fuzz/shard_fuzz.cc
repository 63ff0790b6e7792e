// A shard of a data set: its first byte says of which format, and whether checksums are mended, so
// that what is behind them is reached as well. What an indexer accepts lies where it says.
#include <sys/mman.h>

#include <cstring>

#include "dataset/source/indexer.h"
#include "dataset/source/masked_crc.h"
#include "dataset/source/mds_json.h"
#include "dataset/source/tar_reader.h"
#include "fuzz.h"
#include "store/base/file.h"

namespace ptc::fuzz {
namespace {

UniqueFd file_of(std::string_view bytes) {
  UniqueFd fd(::memfd_create("shard", MFD_CLOEXEC));
  PTC_CHECK(fd.valid() && write_exactly(fd.get(), bytes_of(bytes), 0));
  return fd;
}

void mend_tar(std::string& shard) {
  for (size_t at = 0; at + 512 <= shard.size(); at += 512) {
    if (shard.compare(at + 257, 5, "ustar") != 0) continue;
    shard.replace(at + 148, 8, 8, ' ');
    unsigned sum = 0;
    for (size_t i = 0; i < 512; ++i) sum += static_cast<unsigned char>(shard[at + i]);
    shard.replace(at + 148, 7, fmt::format("{:06o}{}", sum, '\0'));
  }
}

void mend_tfrecord(std::string& shard) {
  for (size_t at = 0; at + 16 <= shard.size();) {
    const uint32_t crc = masked_crc(bytes_of(std::string_view(shard).substr(at, 8)));
    std::memcpy(&shard[at + 8], &crc, sizeof crc);
    uint64_t length;
    std::memcpy(&length, &shard[at], sizeof length);
    if (length > shard.size() - at - 16) return;
    at += length + 16;
  }
}

void check_tar_sample(int fd, uint64_t begin, uint64_t end, uint64_t extra) {
  ShardReader shard(fd, begin, end, {}, 4096);
  TarReader reader(shard, TarReader::End::kBytes);
  uint64_t payload = 0;
  while (true) {
    auto member = reader.next();
    PTC_CHECK(member.has_value());
    if (!member.value()) break;
    if (member.value()->regular && sample_name(member.value()->name))
      payload += member.value()->size;
  }
  PTC_CHECK(payload + extra == end - begin);
}

void check_facts(Result<ShardFacts> indexed, int fd, uint64_t bytes, SourceFormat format) {
  if (!indexed) return check_error(indexed.error());
  ShardFacts& facts = indexed.value();
  const uint64_t count = facts.starts.count();
  const std::string packed = facts.starts.finish();
  PTC_CHECK(packed.size() <= 8 + (count + 63) / 64 * (16 + 64 * 13));
  const PackedOffsets starts(reinterpret_cast<const std::byte*>(packed.data()), count,
                             format == SourceFormat::kTar ? kTarUnit : 1);
  PTC_CHECK(facts.end <= bytes);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t begin = starts.start(i), end = i + 1 < count ? starts.start(i + 1) : facts.end;
    PTC_CHECK(begin <= end && end <= facts.end);
    if (format == SourceFormat::kTar) check_tar_sample(fd, begin, end, starts.extra(i));
  }
}

}  // namespace

void run(std::string_view input) {
  if (input.empty()) return;
  const auto choice = static_cast<unsigned char>(input[0]);
  std::string shard(input.substr(1));
  if (choice % 8 == 6) {
    auto listing = parse_mds_json(shard);
    if (!listing) check_error(listing.error());
    return;
  }
  const auto format = static_cast<SourceFormat>(choice % 8 % 5);
  if (choice >= 128 && format == SourceFormat::kTar) mend_tar(shard);
  if (choice >= 128 && format == SourceFormat::kTfrecord) mend_tfrecord(shard);
  const UniqueFd fd = file_of(shard);
  const uint64_t bytes = shard.size();
  switch (format) {
    case SourceFormat::kTar:
      return check_facts(index_tar(fd.get(), bytes, {}), fd.get(), bytes, format);
    case SourceFormat::kTfrecord:
      return check_facts(index_tfrecord(fd.get(), bytes, {}), fd.get(), bytes, format);
    case SourceFormat::kJsonl:
      return check_facts(index_jsonl(fd.get(), bytes, {}), fd.get(), bytes, format);
    case SourceFormat::kMegatron: {
      std::string_view rest = shard;
      const uint64_t bin_bytes = take_number(rest) & (UINT64_MAX >> 9);
      const UniqueFd idx = file_of(rest);
      return check_facts(index_megatron(idx.get(), rest.size(), bin_bytes, {}), -1, bin_bytes,
                         format);
    }
    default:
      break;
  }
  uint32_t samples = 0;
  std::memcpy(&samples, shard.data(), std::min<size_t>(shard.size(), sizeof samples));
  const std::vector<MdsColumn> columns = {{"a", "bytes", {}}, {"b", "int", 8}, {"c", "str", {}}};
  check_facts(index_mds(fd.get(), bytes, samples, columns, {}), fd.get(), bytes,
              SourceFormat::kMds);
}

std::vector<std::string> large_inputs() {
  const std::string tar_of_links = [] {
    std::string block(512, '\0');
    block.replace(0, 3, "a.b");
    block.replace(124, 11, "00000000000");
    block[156] = 'L';
    block.replace(257, 5, "ustar");
    return block;
  }();
  const std::string record = std::string(8, '\0') + std::string(8, 'x');
  return {
      repeated("\x80", tar_of_links, kMegabyte / 512),
      repeated(std::string("\0", 1), std::string(512, '\0'), kMegabyte / 512),
      repeated("\x83", record, kMegabyte / 16),
      repeated("\x04", "\n", kMegabyte),
      repeated("\x04", "{}\n", kMegabyte / 3),
      repeated("\x04", " ", kMegabyte),
      repeated(std::string("\x01\xFF\xFF\xFF\xFF", 5), std::string(4, '\0'), kMegabyte / 4),
      repeated("\x06{\"shards\":[", "{},", kMegabyte / 3, "{}]}"),
  };
}

}  // namespace ptc::fuzz
