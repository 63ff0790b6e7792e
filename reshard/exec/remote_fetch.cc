#include "reshard/exec/remote_fetch.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <optional>
#include <thread>

namespace ptc {
namespace {

constexpr uint32_t kMostAttempts = 8;

uint64_t bytes_to_come(const std::vector<FetchItem>& items) {
  uint64_t bytes = 0;
  for (const FetchItem& item : items) bytes += bytes_between(item.copy, item.begin, item.end);
  return bytes;
}

/// The same bytes out of an image that has them where the target has them.
StridedCopy in_place(StridedCopy copy) {
  copy.source_offset = copy.target_offset;
  for (uint32_t level = 0; level < copy.level_count; ++level)
    copy.levels[level].source_stride = copy.levels[level].target_stride;
  return copy;
}

}  // namespace

void RemoteFetch::Batch::add(const FetchItem& item, uint32_t source) {
  items.push_back(item);
  source_of.push_back(source);
}

void RemoteFetch::add(uint32_t target, const Transfer& transfer, std::span<std::byte> memory,
                      const ImageId& id) {
  const Image* source = sources_.images[transfer.source_image].get();
  const uint64_t begin = std::max(transfer.begin, transfer.copy.target_offset);
  const uint64_t end = std::min(transfer.end, transfer.copy.target_end());
  const FetchItem item{source, transfer.copy, begin, end, memory.data() + begin};
  if (!transfer.has_window()) return plain_.add(item, transfer.source_image);
  if (transfer.relay) {
    relayed_[sources_.relays->node_of(*transfer.relay)][{*transfer.relay, transfer.begin}].add(
        item, transfer.source_image);
    return;
  }
  const Window window{target, transfer.begin};
  Batch& batch = lanes_[source->node()][window];
  Coming& coming = coming_.try_emplace(window, Coming{id}).first->second;
  if (batch.items.empty()) ++coming.batches;
  batch.add(item, transfer.source_image);
}

Result<> RemoteFetch::fetch_counted(std::vector<FetchItem>& items, const std::stop_token& stop) {
  const uint64_t before = bytes_to_come(items);
  Result<> fetched = transport_.fetch(items, stop);
  bytes_done_ += before - bytes_to_come(items);
  return fetched;
}

/// Tried with other holders when one fails.
Result<> RemoteFetch::fetch(Batch left, const std::stop_token& stop) {
  std::vector<ImageRef> held;  // alternatives in use
  for (uint32_t attempt = 1; !left.items.empty(); ++attempt) {
    Result<> fetched = fetch_counted(left.items, stop);
    if (fetched.has_value()) return ok();
    if (fetched.error().code() == Code::kCancelled || attempt > kMostAttempts)
      return std::move(fetched).error();
    Batch again;
    bool other = false;
    for (size_t i = 0; i < left.items.size(); ++i) {
      FetchItem& item = left.items[i];
      if (item.begin >= item.end) continue;
      if (ImageRef image = sources_.alternative(left.source_of[i], attempt)) {
        item.source = image.get();
        held.push_back(std::move(image));
        other = true;
      }
      again.add(item, left.source_of[i]);
    }
    if (!other) return std::move(fetched).error();
    left = std::move(again);
  }
  return ok();
}

Result<> RemoteFetch::fetch_lane(Lane& lane, const std::stop_token& stop) {
  for (auto& [window, batch] : lane) {
    PTC_TRY(fetch(std::move(batch), stop));
    std::lock_guard lock(mutex_);
    Coming& coming = coming_.at(window);
    if (--coming.batches == 0) sources_.relays->arrived(window.first, window.second, coming.image);
  }
  return ok();
}

Result<> RemoteFetch::fetch_relayed(Lane& lane, const std::stop_token& stop) {
  bool asked = true;
  for (auto& [window, batch] : lane) {
    if (asked) {
      Result<ImageRef> image = sources_.relays->wait_for(window.first, window.second, stop);
      Result<> fetched = ok();
      if (image.has_value()) {
        std::vector<FetchItem> items = batch.items;
        for (FetchItem& item : items) {
          item.source = image.value().get();
          item.copy = in_place(item.copy);
        }
        fetched = fetch_counted(items, stop);
        for (size_t i = 0; i < items.size(); ++i) {
          batch.items[i].begin = items[i].begin;
          batch.items[i].target_at_begin = items[i].target_at_begin;
        }
      } else {
        fetched = std::move(image).error();
      }
      if (fetched.has_value()) continue;
      if (fetched.error().code() == Code::kCancelled) return fetched;
      spdlog::warn("what another node should have passed on is taken from its source: {}",
                   fetched.error().message());
      asked = false;
    }
    PTC_TRY(fetch(std::move(batch), stop));
  }
  return ok();
}

Result<> RemoteFetch::run(std::stop_token stop) {
  std::mutex mutex;
  std::optional<Error> first_error;  // guarded by mutex
  auto note = [&](Result<> result) {
    std::lock_guard lock(mutex);
    if (result.has_error() && !first_error) first_error = std::move(result).error();
  };
  {
    std::vector<std::jthread> threads;
    for (auto& [node, lane] : lanes_)
      threads.emplace_back([&, lane = &lane] { note(fetch_lane(*lane, stop)); });
    for (auto& [node, lane] : relayed_)
      threads.emplace_back([&, lane = &lane] { note(fetch_relayed(*lane, stop)); });
    note(fetch(std::move(plain_), stop));
  }
  if (first_error) return *std::move(first_error);
  return ok();
}

}  // namespace ptc
