#include "dataset/tree/window.h"

namespace ptc {

Window::Part Window::take(uint64_t bytes) {
  const uint64_t from = std::max(position_, begin_), to = std::min(position_ + bytes, end_);
  const uint64_t skipped = from - position_;
  position_ += bytes;
  if (from >= to) return {skipped, {}};
  return {skipped, {out_ + (from - begin_), to - from}};
}

void Window::literal(std::string_view bytes) {
  const Part part = take(bytes.size());
  if (!part.target.empty())
    std::memcpy(part.target.data(), bytes.data() + part.skipped, part.target.size());
}

void Window::zeros(uint64_t bytes) {
  const Part part = take(bytes);
  std::fill(part.target.begin(), part.target.end(), std::byte{0});
}

Result<> Window::run(const Extent& extent) {
  const Part part = take(extent.bytes);
  if (part.target.empty()) return ok();
  const uint64_t offset = extent.offset + part.skipped;
  const bool follows = pending_.bytes > 0 && pending_.shard == extent.shard &&
                       pending_.offset + pending_.bytes == offset &&
                       pending_target_ + pending_.bytes == part.target.data();
  if (follows) {
    pending_.bytes += part.target.size();
    return ok();
  }
  PTC_TRY(flush());
  pending_ = {extent.shard, offset, part.target.size()};
  pending_target_ = part.target.data();
  return ok();
}

Result<std::span<const std::byte>> Window::last(uint64_t bytes) {
  if (position_ < begin_ + bytes || position_ > end_) return std::span<const std::byte>();
  PTC_TRY(flush());
  return std::span<const std::byte>(out_ + (position_ - begin_ - bytes), bytes);
}

Result<const OpenShard*> Window::open(uint64_t shard) {
  OpenShard& one = open_[shard % open_.size()];
  if (one.file && one.shard == shard) return &one;
  PTC_TRY(one, source_.open_shard(shard));
  return &one;
}

Result<> Window::flush() {
  if (pending_.bytes == 0) return ok();
  const Extent run = std::exchange(pending_, Extent());
  PTC_TRY(const OpenShard* shard, open(run.shard));
  return source_.read(*shard, run.offset, {pending_target_, run.bytes}, stores_);
}

}  // namespace ptc
