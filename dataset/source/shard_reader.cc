#include "dataset/source/shard_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ptc {

ShardReader::ShardReader(int fd, uint64_t begin, uint64_t end, const IndexContext& context,
                         size_t buffer_bytes)
    : fd_(fd),
      position_(begin),
      end_(end),
      context_(context),
      buffer_bytes_(buffer_bytes),
      buffered_from_(begin),
      buffered_to_(begin),
      counted_(begin) {}

Result<std::span<const std::byte>> ShardReader::peek(size_t bytes) {
  PTC_CHECK(bytes <= left());
  while (position_ + bytes > buffered_to_) {
    if (context_.stop.stop_requested()) return Error(Code::kCancelled, "stopped");
    count_progress();
    // After a long jump a little is read: the next jump may be as far.
    const bool jumped = position_ > buffered_to_ + buffer_bytes_ / 4;
    if (position_ > buffered_to_) buffered_from_ = buffered_to_ = position_;
    const size_t kept = buffered_to_ - position_;
    const size_t want = std::min<uint64_t>(
        std::max(bytes, jumped ? std::min<size_t>(4096, buffer_bytes_) : buffer_bytes_), left());
    const size_t at = position_ - buffered_from_;
    if (at + want > buffer_.size()) {
      std::copy_n(buffer_.begin() + at, kept, buffer_.begin());
      buffered_from_ = position_;
      if (buffer_.size() < want) buffer_.resize(want);
    }
    std::byte* const target = buffer_.data() + (buffered_to_ - buffered_from_);
    const ssize_t got = ::pread(fd_, target, want - kept, buffered_to_);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error(errno, fmt::format("reading at byte {}", buffered_to_));
    if (got == 0)
      return invalid_argument("the file ends at byte {}: it shrank while it was read",
                              buffered_to_);
    buffered_to_ += got;
  }
  return std::span<const std::byte>(buffer_.data() + (position_ - buffered_from_), bytes);
}

Result<std::span<const std::byte>> ShardReader::peek_some() {
  if (left() == 0) return std::span<const std::byte>();
  if (position_ >= buffered_to_) {
    PTC_TRY(peek(1));
  }
  return std::span<const std::byte>(buffer_.data() + (position_ - buffered_from_),
                                    buffered_to_ - position_);
}

void ShardReader::skip(uint64_t bytes) {
  PTC_CHECK(bytes <= left());
  position_ += bytes;
}

void ShardReader::count_progress() {
  if (context_.progress != nullptr) context_.progress->bytes_done += position_ - counted_;
  counted_ = position_;
}

}  // namespace ptc
