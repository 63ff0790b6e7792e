#include "dataset/run/plain_files.h"

#include <algorithm>
#include <cstring>

namespace ptc {
namespace {

class PlainText : public VirtualFile {
 public:
  explicit PlainText(std::string text) : text_(std::move(text)) {}
  uint64_t size() const override { return text_.size(); }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= text_.size()) return size_t{0};
    const size_t count = std::min<size_t>(out.size(), text_.size() - offset);
    std::memcpy(out.data(), text_.data() + offset, count);
    return count;
  }

 private:
  const std::string text_;
};

class RankIds : public VirtualFile {
 public:
  RankIds(ShownGenerationRef generation, uint64_t rank)
      : generation_(std::move(generation)),
        rank_(rank),
        count_(generation_->cuts.local_samples_before(generation_->cuts.end_epoch(), rank)) {}
  uint64_t size() const override { return count_ * kIdBytes; }
  Result<size_t> read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset >= size()) return size_t{0};
    const size_t bytes = std::min<size_t>(out.size(), size() - offset);
    const uint64_t first = offset / kIdBytes, end = (offset + bytes + kIdBytes - 1) / kIdBytes;
    const std::vector<uint64_t> ids = generation_->cuts.rank_ids(rank_, first, end - first);
    for (size_t i = 0; i < bytes; ++i) {
      const uint64_t at = offset + i;
      out[i] = static_cast<std::byte>(ids[at / kIdBytes - first] >> (at % kIdBytes * 8));
    }
    return bytes;
  }

 private:
  static constexpr uint64_t kIdBytes = 8;
  const ShownGenerationRef generation_;
  const uint64_t rank_, count_;
};

}  // namespace

VirtualFileRef make_text_file(std::string text) {
  return std::make_shared<PlainText>(std::move(text));
}

VirtualFileRef make_ids_file(ShownGenerationRef generation, uint64_t rank) {
  return std::make_shared<RankIds>(std::move(generation), rank);
}

}  // namespace ptc
