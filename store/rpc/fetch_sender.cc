#include "store/rpc/fetch_sender.h"

#include <algorithm>

#include "store/base/resident.h"
#include "store/net/others_first.h"

namespace ptc {
namespace {

constexpr size_t kChunkBytes = 512 << 10;
constexpr uint64_t kLongRun = 4 << 10;  // is sent from where it lies
constexpr size_t kMaxHeld = 64;         // images
constexpr uint64_t kNear = 64 << 10;    // runs as near as that are looked at together

using Mapped = std::span<const std::byte>;

/// visit(begin, end) of the source, for the runs of bytes [begin, end) of a part's string. Those of
/// the innermost level are visited as one where they are no farther apart than `near`: there may be
/// very many, of a few bytes each.
template <class Visit>
void for_each_extent(StridedCopy runs, uint64_t begin, uint64_t end, uint64_t near, Visit visit) {
  const uint64_t run = runs.run_bytes;
  if (runs.level_count == 0 || runs.levels[runs.level_count - 1].source_stride > run + near ||
      runs.levels[runs.level_count - 1].target_stride != run) {
    return for_each_run(runs, begin, end,
                        [&](uint64_t at, uint64_t, uint64_t bytes) { visit(at, at + bytes); });
  }
  const StridedCopy::Level inner = runs.levels[--runs.level_count];
  runs.run_bytes = inner.count * run;
  for_each_run(runs, begin, end, [&](uint64_t at, uint64_t target, uint64_t bytes) {
    // Packed: so many of the bytes of all these runs lie before.
    const uint64_t before = (target - runs.target_offset) % runs.run_bytes;
    const uint64_t first = before / run, last = (before + bytes - 1) / run;
    at -= before;
    visit(at + first * inner.source_stride, at + last * inner.source_stride + run);
  });
}

/// Of bytes [begin, end) of the part's string, those that are not in memory. With what lies between
/// runs that are no farther apart than `near`: the kernel is asked less often.
std::vector<Mapped> absent(const FetchPart& part, const std::byte* source, uint64_t begin,
                           uint64_t end, uint64_t near) {
  std::vector<Mapped> found;
  uint64_t from = 0, to = 0;
  const auto look = [&] {
    const Mapped some(source + from, source + to);
    if (!is_in_memory(some)) found.push_back(some);
  };
  for_each_extent(part.runs, begin, end, near, [&](uint64_t first, uint64_t last) {
    if (first < from || first > to + near) {
      look();
      from = to = first;
    }
    to = std::max(to, last);
  });
  look();
  return found;
}

}  // namespace

FetchSender::FetchSender(Connection& connection, ImageStore& images, SpareThreads& readers)
    : connection_(connection), images_(images), readers_(readers), buffer_(kChunkBytes) {}

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
      if (const auto host = source.value().host(); host.has_value()) {
        co_await bring_in(part, host.value(), at, next);
        add_bytes(part, host.value(), at, next);
      } else if (auto added = co_await add_of_device(part, source.value(), at, next); !added) {
        PTC_CO_TRY(co_await flush(request));
        co_return co_await connection_.send(FrameType::kError, request, encode(added.error()));
      }
      at = next;
      if (chunk_bytes_ == kChunkBytes) {
        PTC_CO_TRY(co_await flush(request));
      }
    }
    if (held_.size() == kMaxHeld) {  // between parts: the next bytes of one are in its image
      PTC_CO_TRY(co_await flush(request));
      held_.clear();
    }
  }
  co_return co_await flush(request);
}

/// The image of a part in its memory, held until it is sent.
Result<ConstMemoryPointer> FetchSender::source_of(const FetchRequest& fetch,
                                                  const FetchPart& part) {
  const std::string& id = fetch.images[part.image];
  auto held = std::find_if(held_.begin(), held_.end(),
                           [&](const Held& one) { return one.index == part.image; });
  if (held == held_.end()) {
    PTC_TRY(auto image, images_.open(ImageId{id}));
    held = held_.insert(held_.end(), {part.image, std::move(image)});
  }
  const Image& image = *held->image;
  PTC_TRY(const ConstMemoryPointer memory, image.map());
  if (part.runs.source_end() > image.bytes())
    return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed", id, image.bytes(),
                      part.runs.source_end());
  return memory;
}

/// As add_bytes(), out of a device's memory.
Task<> FetchSender::add_of_device(const FetchPart& part, ConstMemoryPointer source, uint64_t begin,
                                  uint64_t end) {
  std::byte* const to = buffer_.data() + gathered_;
  const auto image = std::find_if(held_.begin(), held_.end(), [&](const Held& one) {
                       return one.index == part.image;
                     })->image;
  Result<> read = ok();
  std::function<void()> work = [&] {
    read = image->device()->devices->read(source, part.runs, begin, end, to);
  };
  if (const auto done = co_await do_elsewhere(readers_, work); !done) work();
  PTC_CO_TRY(std::move(read));
  gathered_ += end - begin;
  chunk_bytes_ += end - begin;
  add_piece(pieces_, to, end - begin);
  co_return ok();
}

/// Those pages of the bytes that add_bytes() or the connection would wait for.
asio::awaitable<void> FetchSender::bring_in(const FetchPart& part, const std::byte* source,
                                            uint64_t begin, uint64_t end) {
  if (absent(part, source, begin, end, kNear).empty()) co_return;
  const std::vector<Mapped> to_read = absent(part, source, begin, end, kLongRun);
  if (to_read.empty()) co_return;
  std::function<void()> work = [&] { read_into_memory(to_read); };
  (void)co_await do_elsewhere(readers_, std::move(work));  // else it is read here
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
  co_await let_others_go_first();
  co_return ok();
}

}  // namespace ptc
