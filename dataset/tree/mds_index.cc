#include <algorithm>
#include <array>
#include <map>
#include <thread>

#include "dataset/source/in_order.h"
#include "dataset/tree/mds_text.h"
#include "dataset/tree/sample_form.h"
#include "dataset/tree/virtual_file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint64_t kMdsCountAndEndBytes =
    8;  // of a shard, beside the columns and what each sample adds
constexpr std::string_view kIndexHead = "{\"shards\":[", kIndexTail = "],\"version\":2}\n";

int digits_of(uint64_t number) { return static_cast<int>(fmt::formatted_size("{}", number)); }

/// Of sources whose samples all have the same.
std::optional<uint64_t> mds_bytes_of_each(const SampleSource& source) {
  const std::vector<MdsColumn>& columns = source.mds_columns();
  if (columns.empty() || source.samples() == 0) return std::nullopt;
  const bool fixed = std::all_of(columns.begin(), columns.end(),
                                 [](const MdsColumn& column) { return column.bytes.has_value(); });
  return fixed ? std::optional(sample_bytes(TreeKind::kMds, source, 0)) : std::nullopt;
}

/// Head, for each shard an entry that is as long as any other, tail. A number has spaces before it,
/// as JSON may.
class MdsIndexFile : public VirtualFile {
 public:
  MdsIndexFile(SampleSourceRef source, MdsShards shards)
      : source_(std::move(source)),
        shards_(std::move(shards)),
        count_((shards_.samples + shards_.each - 1) / shards_.each),
        config_(mds_config(*source_)),
        each_bytes_(mds_bytes_of_each(*source_)),
        entry_bytes_(entry(0, 0).size()) {}

  uint64_t size() const override {
    return kIndexHead.size() + count_ * entry_bytes_ - (count_ > 0 ? 1 : 0) + kIndexTail.size();
  }

  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= size() || out.empty()) return size_t{0};
    const size_t wanted = std::min<uint64_t>(out.size(), size() - offset);
    const uint64_t end = offset + wanted;
    const uint64_t first = entry_at(offset), last = std::min(count_, entry_at(end - 1) + 1);
    PTC_TRY(const auto bytes, sizes(first, last));
    std::string text = first == 0 ? std::string(kIndexHead) : "";
    const uint64_t begin = first == 0 ? 0 : kIndexHead.size() + first * entry_bytes_;
    for (uint64_t i = first; i < last; ++i) text += entry(i, bytes[i - first]);
    if (last == count_ && count_ > 0) text.pop_back();  // the comma
    if (last == count_) text += kIndexTail;
    const std::string_view asked = std::string_view(text).substr(offset - begin, wanted);
    std::copy_n(std::as_bytes(std::span(asked)).begin(), wanted, out.begin());
    return wanted;
  }

 private:
  static constexpr uint64_t kChunk = 256;
  using Chunk = std::array<uint32_t, kChunk>;

  /// The entry in which a byte lies, or the nearest; 0 where there is none.
  uint64_t entry_at(uint64_t offset) const {
    if (offset < kIndexHead.size() || count_ == 0) return 0;
    return std::min(count_ - 1, (offset - kIndexHead.size()) / entry_bytes_);
  }

  std::string entry(uint64_t shard, uint32_t bytes) const {
    const uint64_t samples =
        std::min(shards_.each, shards_.samples - std::min(shards_.samples, shard * shards_.each));
    return fmt::format(
        R"({},"raw_data":{{"basename":"{}","bytes":{:{}},"hashes":{{}}}},"samples":{:{}},"zip_data":null}},)",
        std::string_view(config_).substr(0, config_.size() - 1), mds_shard_name(shard, count_),
        bytes, digits_of(UINT32_MAX), samples, digits_of(shards_.each));
  }

  /// Of shards [first, last), each worked out once.
  Result<std::vector<uint32_t>> sizes(uint64_t first, uint64_t last) const {
    std::vector<uint64_t> unknown;
    std::vector<uint32_t> all;
    {
      MutexLock lock(mutex_);
      for (uint64_t i = first; i < last; ++i) {
        all.push_back(known_[i / kChunk][i % kChunk]);
        if (all.back() == 0) unknown.push_back(i);
      }
    }
    const unsigned threads = each_bytes_ ? 1 : std::max(1u, std::thread::hardware_concurrency());
    PTC_TRY(in_order<uint32_t>(
        unknown.size(), threads, {}, [&](uint64_t i) { return bytes_of(unknown[i]); },
        [&](uint64_t i, Result<uint32_t> bytes) -> Result<> {
          PTC_TRY(all[unknown[i] - first], std::move(bytes));
          return ok();
        }));
    MutexLock lock(mutex_);
    for (const uint64_t i : unknown) known_[i / kChunk][i % kChunk] = all[i - first];
    return all;
  }

  Result<uint32_t> bytes_of(uint64_t shard) const {
    uint64_t bytes = kMdsCountAndEndBytes + config_.size();
    if (each_bytes_) {
      bytes += *each_bytes_ * std::min(shards_.each, shards_.samples - shard * shards_.each);
    } else {
      for (const uint64_t id : shards_.ids(shard))
        bytes += sample_bytes(TreeKind::kMds, *source_, id);
    }
    PTC_TRY(check_mds_bytes(bytes));
    return static_cast<uint32_t>(bytes);
  }

  const SampleSourceRef source_;
  const MdsShards shards_;
  const uint64_t count_;
  const std::string config_;
  const std::optional<uint64_t> each_bytes_;
  const uint64_t entry_bytes_;  // with the comma that the last one lacks
  mutable Mutex mutex_;
  mutable std::map<uint64_t, Chunk> known_ PTC_GUARDED_BY(mutex_);  // 0: not known
};

}  // namespace

std::string mds_shard_name(uint64_t shard, uint64_t shards) {
  return fmt::format("shard.{:0{}}.mds", shard,
                     std::max(5, digits_of(shards == 0 ? 0 : shards - 1)));
}

VirtualFileRef make_mds_index(SampleSourceRef source, MdsShards shards) {
  return std::make_shared<const MdsIndexFile>(std::move(source), std::move(shards));
}

}  // namespace ptc
