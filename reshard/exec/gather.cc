#include "reshard/exec/gather.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ptc {

GatherProgram::GatherProgram(Literals literals, uint64_t bytes, SharedVector<Transfer> transfers,
                             std::vector<ImageRef> sources)
    : literals_(std::move(literals)),
      bytes_(bytes),
      transfers_(std::move(transfers)),
      sources_(std::move(sources)),
      transferred_bytes_(literals_.bytes()) {
  end_so_far_.reserve(transfers_.size());
  uint64_t end = 0;
  for (const Transfer& transfer : transfers_) {
    end = std::max(end, transfer.copy.target_end());
    end_so_far_.push_back(end);
    transferred_bytes_ += transfer.copy.total_bytes();
  }
}

template <class Visit>
Result<> GatherProgram::begin_window(uint64_t offset, std::span<std::byte> out, Visit visit) const {
  // Only a file with padding has bytes that nobody writes.
  if (transferred_bytes_ < bytes_) std::memset(out.data(), 0, out.size());
  const uint64_t end = offset + out.size();
  PTC_CHECK(offset <= end && end <= bytes_);
  literals_.for_each(offset, end, [&](uint64_t at, std::string_view bytes) {
    std::memcpy(out.data() + (at - offset), bytes.data(), bytes.size());
  });
  // The first transfer that reaches into the window; those before it end at or before `offset`.
  size_t i = std::upper_bound(end_so_far_.begin(), end_so_far_.end(), offset) - end_so_far_.begin();
  for (; i < transfers_.size(); ++i) {
    const Transfer& transfer = transfers_[i];
    if (transfer.copy.target_offset >= end) break;
    uint64_t from = std::max(offset, transfer.copy.target_offset);
    uint64_t to = std::min(end, transfer.copy.target_end());
    if (from >= to) continue;
    PTC_TRY(visit(transfer, from, to));
  }
  return ok();
}

Result<std::vector<FetchItem>> GatherProgram::items_of(uint64_t offset,
                                                       std::span<std::byte> out) const {
  std::vector<FetchItem> items;
  PTC_TRY(begin_window(offset, out,
                       [&](const Transfer& transfer, uint64_t from, uint64_t to) -> Result<> {
                         items.push_back({sources_[transfer.source_image].get(), transfer.copy,
                                          from, to, in_host_memory(out.data() + (from - offset))});
                         return ok();
                       }));
  return items;
}

Result<> GatherProgram::read(Transport& transport, uint64_t offset, std::span<std::byte> out,
                             std::stop_token stop) const {
  PTC_TRY(auto items, items_of(offset, out));
  return transport.fetch(items, std::move(stop));
}

Result<> GatherProgram::read(Transport& transport, uint64_t offset, std::span<std::byte> out,
                             std::chrono::milliseconds silence,
                             std::set<std::string>& absent) const {
  PTC_TRY(auto items, items_of(offset, out));
  Result<> fetched = transport.fetch(items, {}, silence);
  if (fetched.has_error())
    for (const FetchItem& item : items)
      if (item.begin < item.end && !item.source->is_here()) absent.insert(item.source->node());
  return fetched;
}

Result<> GatherProgram::read_in_place(Transport& transport, uint64_t offset,
                                      std::span<std::byte> buffer,
                                      std::vector<std::span<const std::byte>>& pieces,
                                      std::stop_token stop) const {
  constexpr uint64_t kLongRun = 16 << 10;  // from here on one more piece costs less than the copy
  struct Run {
    uint64_t target;
    std::span<const std::byte> bytes;
  };
  std::vector<Run> runs;
  std::vector<FetchItem> items;
  PTC_TRY(begin_window(
      offset, buffer, [&](const Transfer& transfer, uint64_t from, uint64_t to) -> Result<> {
        const Image& source = *sources_[transfer.source_image];
        if (transfer.copy.run_bytes < kLongRun || !source.has_host_bytes()) {
          items.push_back(
              {&source, transfer.copy, from, to, in_host_memory(buffer.data() + (from - offset))});
          return ok();
        }
        PTC_TRY(auto bytes, source.host_bytes());
        if (transfer.copy.source_end() > bytes.size())
          return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed",
                            source.id().text, bytes.size(), transfer.copy.source_end());
        for_each_run(transfer.copy, from, to, [&](uint64_t at, uint64_t target, uint64_t count) {
          runs.push_back({target, bytes.subspan(at, count)});
        });
        return ok();
      }));
  PTC_TRY(transport.fetch(items, std::move(stop)));
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return a.target < b.target; });
  size_t at = 0;  // in the buffer
  for (const Run& run : runs) {
    if (offset + at < run.target) pieces.push_back(buffer.subspan(at, run.target - offset - at));
    pieces.push_back(run.bytes);
    at = run.target - offset + run.bytes.size();
  }
  if (at < buffer.size()) pieces.push_back(buffer.subspan(at));
  return ok();
}

Result<> GatherProgram::read_in_windows(
    Transport& transport, uint64_t begin, uint64_t end,
    const std::function<Result<>(uint64_t, std::span<const std::byte>)>& visit,
    std::stop_token stop) const {
  constexpr uint64_t kWindowBytes = 256 << 10;  // a quarter of a core's L2 cache
  thread_local const std::unique_ptr<std::byte[]> buffer(new std::byte[kWindowBytes]);
  for (uint64_t offset = begin; offset < end; offset += kWindowBytes) {
    std::span<std::byte> window(buffer.get(), std::min(kWindowBytes, end - offset));
    PTC_TRY(read(transport, offset, window, stop));
    PTC_TRY(visit(offset, window));
  }
  return ok();
}

}  // namespace ptc
