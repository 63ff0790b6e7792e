#include "store/rpc/fetch_sender.h"

#include <algorithm>

namespace ptc {
namespace {

constexpr size_t kChunkBytes = 512 << 10;
constexpr uint64_t kLongRun = 4 << 10;  // is sent from where it lies
constexpr size_t kMaxHeld = 64;         // images

}  // namespace

FetchSender::FetchSender(Connection& connection, ImageStore& images)
    : connection_(connection), images_(images), buffer_(kChunkBytes) {}

Task<> FetchSender::send(uint64_t request, const FetchRequest& fetch) {
  for (const FetchPart& part : fetch.parts) {
    if (part.begin == part.end) continue;
    auto source = source_of(fetch, part);
    if (!source) {
      PTC_CO_TRY(co_await flush(request));
      co_return co_await connection_.send(FrameType::kError, request, encode(source.error()));
    }
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t next = at + std::min<uint64_t>(part.end - at, kChunkBytes - chunk_bytes_);
      add_bytes(part, source.value(), at, next);
      at = next;
      if (chunk_bytes_ == kChunkBytes || held_.size() == kMaxHeld) {
        PTC_CO_TRY(co_await flush(request));
      }
    }
  }
  co_return co_await flush(request);
}

/// The image of a part in memory, held until it is sent.
Result<const std::byte*> FetchSender::source_of(const FetchRequest& fetch, const FetchPart& part) {
  const std::string& id = fetch.images[part.image];
  auto held = std::find_if(held_.begin(), held_.end(),
                           [&](const Held& one) { return one.index == part.image; });
  if (held == held_.end()) {
    PTC_TRY(auto image, images_.open(ImageId{id}));
    held = held_.insert(held_.end(), {part.image, std::move(image)});
  }
  PTC_TRY(auto memory, held->image->host_bytes());
  if (part.runs.source_end() > memory.size())
    return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed", id, memory.size(),
                      part.runs.source_end());
  return memory.data();
}

/// Bytes [begin, end) of the part's string, which fit into the chunk.
void FetchSender::add_bytes(const FetchPart& part, const std::byte* source, uint64_t begin,
                            uint64_t end) {
  chunk_bytes_ += end - begin;
  if (part.runs.run_bytes >= kLongRun && end - begin >= kLongRun) {
    for_each_run(part.runs, begin, end, [&](uint64_t from, uint64_t, uint64_t bytes) {
      add_piece(pieces_, source + from, bytes);
    });
    return;
  }
  std::byte* to = buffer_.data() + gathered_;
  run_strided_copy(part.runs, source, begin, end, to);
  gathered_ += end - begin;
  add_piece(pieces_, to, end - begin);
}

Task<> FetchSender::flush(uint64_t request) {
  if (chunk_bytes_ == 0) co_return ok();
  PTC_CO_TRY(co_await connection_.send(FrameType::kData, request, pieces_));
  pieces_.clear();
  gathered_ = chunk_bytes_ = 0;
  if (held_.size() == kMaxHeld) held_.clear();
  co_return ok();
}

}  // namespace ptc
