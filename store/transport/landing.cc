#include "store/transport/landing.h"

#include <algorithm>
#include <unordered_map>

#include "store/rpc/connection.h"
#include "store/tensor/packed_copy.h"
#include "store/transport/file_runs.h"

namespace ptc {
namespace {

constexpr size_t kDirect = SIZE_MAX;

uint64_t bytes_of(const FetchItem& item) { return bytes_between(item.copy, item.begin, item.end); }

std::byte* target_of(const FetchItem& item) { return item.target_at_begin.host().value(); }

void advance(FetchItem& item, uint64_t to) {
  item.target_at_begin += to - item.begin;
  item.begin = to;
}

}  // namespace

WantedString::WantedString(std::vector<FetchItem*> items) : items_(std::move(items)) {
  std::erase_if(items_, [&](FetchItem* item) {
    const uint64_t bytes = bytes_of(*item);
    bytes_left_ += bytes;
    if (bytes == 0 && item->begin < item->end) advance(*item, item->end);
    return bytes == 0;
  });
}

WantedString::Asked WantedString::ask(size_t max_items) const {
  Asked asked;
  std::unordered_map<std::string_view, uint32_t> index;
  for (size_t i = first_; i < items_.size() && asked.request.parts.size() < max_items; ++i) {
    const FetchItem& item = *items_[i];
    const std::string& id = item.source->id().text;
    auto [at, is_new] = index.emplace(id, asked.request.images.size());
    if (is_new) asked.request.images.push_back(id);
    asked.request.parts.push_back({at->second, packed(item.copy),
                                   packed_offset(item.copy, item.begin),
                                   packed_offset(item.copy, item.end)});
    asked.bytes += bytes_of(item);
  }
  return asked;
}

std::vector<WantedString::Cut> WantedString::next_cuts(uint64_t bytes) const {
  PTC_CHECK(bytes <= bytes_left_);
  std::vector<Cut> cuts;
  for (size_t i = first_; bytes > 0; ++i) {
    FetchItem& item = *items_[i];
    const uint64_t begin = packed_offset(item.copy, item.begin);
    const uint64_t all = packed_offset(item.copy, item.end) - begin;
    Cut cut{&item, item.end, std::min(all, bytes), 0};
    if (cut.bytes < all) cut.target_end = target_of_packed(item.copy, begin + cut.bytes - 1) + 1;
    cuts.push_back(cut);
    bytes -= cut.bytes;
  }
  return cuts;
}

void WantedString::finish(const Cut& cut) {
  advance(*cut.item, cut.target_end);
  bytes_left_ -= cut.bytes;
  if (cut.item->begin == cut.item->end) ++first_;
}

std::span<const iovec> Landing::place(uint64_t bytes) {
  if (buffer_.size() < bytes) buffer_.resize(bytes);
  pieces_.clear();
  size_t buffered = 0;
  cuts_ = next_cuts(bytes);
  for (Cut& cut : cuts_) {
    FetchItem& item = *cut.item;
    if (item.writer == nullptr && cut.bytes >= kLongRun &&
        (item.copy.run_bytes >= kLongRun || cut.target_end - item.begin == cut.bytes)) {
      cut.buffered = kDirect;
      std::byte* const at_begin = target_of(item);
      for_each_run(item.copy, item.begin, cut.target_end,
                   [&](uint64_t, uint64_t target, uint64_t run) {
                     add_piece(pieces_, at_begin + (target - item.begin), run);
                   });
    } else {
      cut.buffered = buffered;
      add_piece(pieces_, buffer_.data() + buffered, cut.bytes);
      buffered += cut.bytes;
    }
  }
  return pieces_;
}

Result<> Landing::accept() {
  for (const Cut& cut : cuts_) {
    if (cut.buffered != kDirect) {
      PTC_TRY(put_runs(*cut.item, cut.target_end, buffer_.data() + cut.buffered));
    }
    finish(cut);
  }
  return ok();
}

}  // namespace ptc
