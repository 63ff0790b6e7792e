#include <algorithm>

#include "dataset/source/fnv.h"
#include "dataset/source/indexer.h"
#include "dataset/source/tar_reader.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// To find keys that come again: the hash of each with the place of its sample.
struct SeenKey {
  uint64_t hash, begin;
};

/// Collects the members of one sample after the other.
class TarIndexer {
 public:
  Result<> member(const TarMember& member) {
    const auto name = member.regular ? sample_name(member.name) : std::nullopt;
    if (!name) return ok();
    if (name->field.size() > kMaxFieldBytes) {
      return invalid_argument("byte {}: {}: what follows the first dot is longer than {} bytes",
                              member.begin, ptc::quoted(member.name), kMaxFieldBytes);
    }
    if (!open_ || name->key != key_) {
      if (open_) close(member.begin);
      open_ = true;
      key_ = name->key;
      begin_ = member.begin;
      payload_ = 0;
      fields_.clear();
      seen_.push_back({Fnv().add(key_).value(), begin_});
    }
    if (std::find(fields_.begin(), fields_.end(), name->field) != fields_.end()) {
      return invalid_argument("byte {}: {} is there twice in one sample", member.begin,
                              ptc::quoted(member.name));
    }
    if (fields_.size() == kMaxFields) {
      return invalid_argument("byte {}: a sample of more than {} members", member.begin,
                              kMaxFields);
    }
    fields_.emplace_back(name->field);
    payload_ += member.size;
    return ok();
  }

  Result<ShardFacts> finish(int fd, uint64_t end, uint32_t headers_crc) {
    if (open_) close(end);
    PTC_TRY(check_keys(fd, end));
    facts_.end = end;
    facts_.content_crc = headers_crc;
    facts_.key_hashes.reserve(seen_.size());
    for (const SeenKey& key : seen_) facts_.key_hashes.push_back(key.hash);
    if (uniform_) facts_.field_names = std::move(first_fields_);
    return std::move(facts_);
  }

 private:
  void close(uint64_t end) {
    std::sort(fields_.begin(), fields_.end());
    if (facts_.starts.count() == 0) first_fields_ = fields_;
    uniform_ = uniform_ && fields_ == first_fields_;
    facts_.starts.add(begin_, end - begin_ - payload_);
  }

  /// Equal keys that are no neighbours are parts of a sample that was torn apart.
  Result<> check_keys(int fd, uint64_t end) {
    std::sort(seen_.begin(), seen_.end(), [](const SeenKey& a, const SeenKey& b) {
      return a.hash != b.hash ? a.hash < b.hash : a.begin < b.begin;
    });
    for (size_t i = 1; i < seen_.size(); ++i) {
      if (seen_[i].hash != seen_[i - 1].hash) continue;
      PTC_TRY(const std::string first, key_at(fd, seen_[i - 1].begin, end));
      PTC_TRY(const std::string second, key_at(fd, seen_[i].begin, end));
      if (first != second || first.ends_with('/')) continue;
      return invalid_argument(
          "byte {}: the key {} was there before, at byte {}: members of a sample must be "
          "neighbours; "
          "make the archive with --sort=name",
          seen_[i].begin, ptc::quoted(second), seen_[i - 1].begin);
    }
    return ok();
  }

  static Result<std::string> key_at(int fd, uint64_t begin, uint64_t end) {
    ShardReader shard(fd, begin, end, {}, 4096);
    TarReader reader(shard, TarReader::End::kBytes);
    PTC_TRY(const auto member, reader.next());
    const auto name = member ? sample_name(member->name) : std::nullopt;
    return name ? std::string(name->key) : std::string();
  }

  ShardFacts facts_{.starts = OffsetPacker(kTarUnit)};
  bool open_ = false, uniform_ = true;
  std::string key_;
  uint64_t begin_ = 0, payload_ = 0;
  std::vector<std::string> fields_, first_fields_;
  std::vector<SeenKey> seen_;
};

}  // namespace

Result<ShardFacts> index_tar(int fd, uint64_t bytes, const IndexContext& context) {
  ShardReader shard(fd, 0, bytes, context);
  TarReader reader(shard, TarReader::End::kMark);
  TarIndexer indexer;
  while (true) {
    PTC_TRY(const auto member, reader.next());
    if (!member) break;
    PTC_TRY(indexer.member(*member));
  }
  return indexer.finish(fd, reader.members_end(), reader.headers_crc());
}

}  // namespace ptc
