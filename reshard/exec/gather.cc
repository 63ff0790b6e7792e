#include "reshard/exec/gather.h"

#include <algorithm>
#include <cstring>

namespace ptc {

GatherProgram::GatherProgram(std::string header, uint64_t bytes, std::vector<Transfer> transfers,
                             std::vector<ImageRef> sources)
    : header_(std::move(header)),
      bytes_(bytes),
      transfers_(std::move(transfers)),
      sources_(std::move(sources)),
      transferred_bytes_(header_.size()) {
  end_so_far_.reserve(transfers_.size());
  uint64_t end = 0;
  for (const Transfer& transfer : transfers_) {
    end = std::max(end, transfer.copy.target_end());
    end_so_far_.push_back(end);
    transferred_bytes_ += transfer.copy.total_bytes();
  }
}

Result<> GatherProgram::read(Transport& transport, uint64_t offset, std::span<std::byte> out,
                             std::stop_token stop) const {
  // Only a file with padding has bytes that nobody writes.
  if (transferred_bytes_ < bytes_) std::memset(out.data(), 0, out.size());
  const uint64_t end = offset + out.size();
  PTC_CHECK(offset <= end && end <= bytes_);
  if (offset < header_.size()) {
    uint64_t count = std::min<uint64_t>(header_.size() - offset, out.size());
    std::memcpy(out.data(), header_.data() + offset, count);
  }
  // The first transfer that reaches into the window; those before it end at or before `offset`.
  size_t i = std::upper_bound(end_so_far_.begin(), end_so_far_.end(), offset) - end_so_far_.begin();
  std::vector<FetchItem> items;
  for (; i < transfers_.size(); ++i) {
    const Transfer& transfer = transfers_[i];
    if (transfer.copy.target_offset >= end) break;
    uint64_t from = std::max(offset, transfer.copy.target_offset);
    uint64_t to = std::min(end, transfer.copy.target_end());
    if (from >= to) continue;
    items.push_back({sources_[transfer.source_image].get(), transfer.copy, from, to,
                     out.data() + (from - offset)});
  }
  return transport.fetch(items, std::move(stop));
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
