#include <algorithm>

#include "dataset/source/megatron.h"
#include "dataset/tree/extent_file.h"

namespace ptc {
namespace {

/// Where each shard's .bin begins in all of them together, and where the last one ends.
std::vector<uint64_t> begins_of_bins(const SampleSource& source) {
  std::vector<uint64_t> begins = {0};
  for (uint64_t shard = 0; shard < source.shards(); ++shard)
    begins.push_back(begins.back() + source.shard_bytes(shard));
  return begins;
}

class MegatronBin : public VirtualFile {
 public:
  explicit MegatronBin(SampleSourceRef source)
      : source_(std::move(source)), begins_(begins_of_bins(*source_)) {}

  uint64_t size() const override { return begins_.back(); }
  Result<> may_read() const override {
    for (uint64_t shard = 0; shard < source_->shards(); ++shard) {
      PTC_TRY(source_->open_shard(shard));
    }
    return ok();
  }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= size()) return size_t{0};
    out = out.first(std::min<uint64_t>(out.size(), size() - offset));
    Window window(*source_, offset, out);
    auto shard = static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), offset) -
                                     begins_.begin()) -
                 1;
    for (window.move_to(begins_[shard]); !window.full(); ++shard) {
      PTC_TRY(window.run({shard, 0, begins_[shard + 1] - begins_[shard]}));
    }
    PTC_TRY(window.flush());
    return out.size();
  }

 private:
  const SampleSourceRef source_;
  const std::vector<uint64_t> begins_;
};

class MegatronIdx : public VirtualFile {
 public:
  MegatronIdx(SampleSourceRef source, uint64_t count, std::function<uint64_t(uint64_t)> id_at)
      : source_(std::move(source)),
        begins_(begins_of_bins(*source_)),
        count_(count),
        id_at_(std::move(id_at)) {}

  uint64_t size() const override { return kMegatronHeadBytes + 12 * count_ + 8 * (count_ + 1); }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= size()) return size_t{0};
    out = out.first(std::min<uint64_t>(out.size(), size() - offset));
    Window window(*source_, offset, out);
    const uint8_t dtype = source_->megatron_dtype();
    const uint64_t item = megatron_item_bytes(dtype);
    auto one = [&]<class Number>(Number number) {
      window.numbers<Number>(1, [&](uint64_t) { return number; });
    };
    window.literal(kMegatronMagic);
    one(uint64_t{1});
    one(dtype);
    one(count_);
    one(count_ + 1);
    window.numbers<uint32_t>(count_, [&](uint64_t i) {
      return static_cast<uint32_t>(source_->extent(id_at_(i)).bytes / item);
    });
    window.numbers<uint64_t>(count_, [&](uint64_t i) {
      const Extent extent = source_->extent(id_at_(i));
      return begins_[extent.shard] + extent.offset;
    });
    window.numbers<uint64_t>(count_ + 1, [](uint64_t i) { return i; });
    return out.size();
  }

 private:
  const SampleSourceRef source_;
  const std::vector<uint64_t> begins_;
  const uint64_t count_;
  const std::function<uint64_t(uint64_t)> id_at_;
};

Result<> must_be_megatron(const SampleSource& source) {
  if (source.format() == SourceFormat::kMegatron) return ok();
  return invalid_argument("a source of {} is not shown as megatron", format_name(source.format()));
}

}  // namespace

Result<VirtualFileRef> make_megatron_bin(SampleSourceRef source) {
  PTC_TRY(must_be_megatron(*source));
  if (source->shards() == 1) {
    Payload all{"bin", {0, 0, source->shard_bytes(0)}};
    return VirtualFileRef(std::make_shared<const ExtentFile>(std::move(source), std::move(all)));
  }
  return VirtualFileRef(std::make_shared<const MegatronBin>(std::move(source)));
}

Result<VirtualFileRef> make_megatron_idx(SampleSourceRef source, uint64_t count,
                                         std::function<uint64_t(uint64_t)> id_at) {
  PTC_TRY(must_be_megatron(*source));
  return VirtualFileRef(
      std::make_shared<const MegatronIdx>(std::move(source), count, std::move(id_at)));
}

}  // namespace ptc
