#include "reshard/exec/remote_fetch.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint32_t kMostAttempts = 8;
constexpr size_t kStreams = 2;              // from each node
constexpr size_t kNodesAtOnce = 16;         // others come when these have given all
constexpr uint64_t kBatchBytes = 16 << 20;  // asked for at a time: many round trips' worth

uint64_t bytes_to_come(const std::vector<FetchItem>& items) {
  uint64_t bytes = 0;
  for (const FetchItem& item : items) bytes += bytes_between(item.copy, item.begin, item.end);
  return bytes;
}

/// Of two names, the same on all nodes.
uint64_t hash_of_both(std::string_view one, std::string_view other) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, then mixed as splitmix64 does
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    hash *= 0x100000001b3;  // where it ends
  };
  add(one);
  add(other);
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

/// The same bytes out of an image that has them where the target has them.
StridedCopy in_place(StridedCopy copy) {
  copy.source_offset = copy.target_offset;
  for (uint32_t level = 0; level < copy.level_count; ++level)
    copy.levels[level].source_stride = copy.levels[level].target_stride;
  return copy;
}

}  // namespace

std::vector<size_t> order_of_senders(const std::string& self, bool gives,
                                     const std::vector<std::string>& senders) {
  std::vector<size_t> order(senders.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (gives) {
    const auto behind = std::upper_bound(senders.begin(), senders.end(), self);
    std::rotate(order.begin(), order.begin() + (behind - senders.begin()), order.end());
    return order;
  }
  std::vector<uint64_t> hashes;
  for (const std::string& sender : senders) hashes.push_back(hash_of_both(self, sender));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t one, size_t other) { return hashes[one] < hashes[other]; });
  return order;
}

void RemoteFetch::add(size_t image, uint32_t target, const Transfer& transfer,
                      const FetchItem& item, const ImageId& id) {
  auto add_to = [&](Batch& batch) {
    batch.items.push_back(item);
    batch.parts.push_back({image, item.begin, item.end});
    batch.sources.push_back(transfer.source_image);
    batch.bytes += bytes_between(item.copy, item.begin, item.end);
  };
  if (transfer.relay) {
    const uint32_t node = sources_.relays->node_of(*transfer.relay);
    a_target_ = target;
    return add_to(relayed_[node].windows[{*transfer.relay, transfer.begin}]);
  }
  Lane& lane = lanes_[item.source->node()];
  if (!transfer.has_window()) {
    if (lane.others.empty() || lane.others.back().bytes >= kBatchBytes) lane.others.emplace_back();
    return add_to(lane.others.back());
  }
  const Window window{target, transfer.begin};
  Batch& batch = lane.windows[window];
  if (batch.items.empty()) {
    MutexLock lock(mutex_);
    ++coming_.try_emplace(window, Coming{id}).first->second.batches;
  }
  add_to(batch);
}

Result<> RemoteFetch::fetch_counted(std::vector<FetchItem>& items, const std::stop_token& stop) {
  const uint64_t before = bytes_to_come(items);
  Result<> fetched = transport_.fetch(items, stop);
  bytes_done_ += before - bytes_to_come(items);
  return fetched;
}

/// Tried with other holders when one fails.
Result<> RemoteFetch::fetch(Lane& lane, Batch batch, const std::stop_token& stop) {
  std::vector<FetchItem> left = batch.items;
  std::vector<uint32_t> source_of = batch.sources;
  std::map<uint32_t, ImageRef> instead;
  {
    MutexLock lock(mutex_);
    instead = lane.instead;
  }
  for (size_t i = 0; i < left.size(); ++i) {
    const auto other = instead.find(source_of[i]);
    if (other != instead.end()) left[i].source = other->second.get();
  }
  for (uint32_t attempt = 1; !left.empty(); ++attempt) {
    Result<> fetched = fetch_counted(left, stop);
    if (fetched.has_value()) break;
    if (fetched.error().code() == Code::kCancelled || attempt > kMostAttempts)
      return std::move(fetched).error();
    std::map<uint32_t, ImageRef> others;
    std::vector<FetchItem> again;
    std::vector<uint32_t> again_source;
    for (size_t i = 0; i < left.size(); ++i) {
      if (left[i].begin >= left[i].end) continue;
      auto [other, is_new] = others.try_emplace(source_of[i]);
      if (is_new) other->second = sources_.alternative(source_of[i], attempt);
      if (other->second != nullptr) left[i].source = other->second.get();
      again.push_back(left[i]);
      again_source.push_back(source_of[i]);
    }
    std::erase_if(others, [](const auto& other) { return other.second == nullptr; });
    if (others.empty()) return std::move(fetched).error();
    for (auto& [source, image] : others) instead[source] = image;
    {
      MutexLock lock(mutex_);
      for (auto& [source, image] : others) lane.instead[source] = std::move(image);
    }
    left = std::move(again);
    source_of = std::move(again_source);
  }
  came_(batch.parts);
  return ok();
}

std::optional<RemoteFetch::Work> RemoteFetch::next_window(Lane& lane) {
  MutexLock lock(mutex_);
  if (lane.windows.empty()) return std::nullopt;
  auto first = lane.windows.extract(lane.windows.begin());
  return Work{first.key(), std::move(first.mapped())};
}

std::optional<RemoteFetch::Work> RemoteFetch::next_other(Lane& lane) {
  MutexLock lock(mutex_);
  if (lane.others.empty()) return std::nullopt;
  Work work{std::nullopt, std::move(lane.others.front())};
  lane.others.pop_front();
  return work;
}

Result<> RemoteFetch::fetch_windows(Lane& lane, const std::stop_token& stop) {
  while (std::optional<Work> work = next_window(lane)) {
    PTC_TRY(fetch(lane, std::move(work->batch), stop));
    MutexLock lock(mutex_);
    Coming& coming = coming_.at(*work->window);
    if (--coming.batches == 0)
      sources_.relays->arrived(work->window->first, work->window->second, coming.image);
  }
  return ok();
}

Result<> RemoteFetch::fetch_others(Lane& lane, const std::stop_token& stop) {
  while (std::optional<Work> work = next_other(lane)) {
    PTC_TRY(fetch(lane, std::move(work->batch), stop));
  }
  return ok();
}

Result<> RemoteFetch::fetch_relayed(Lane& lane, const std::stop_token& stop) {
  while (std::optional<Work> work = next_window(lane)) {
    Batch& batch = work->batch;
    bool ask = false;
    {
      MutexLock lock(mutex_);
      ask = lane.relays;
    }
    if (ask) {
      Result<ImageRef> image =
          sources_.relays->wait_for(work->window->first, work->window->second, stop);
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
      if (fetched.has_value()) {
        came_(batch.parts);
        continue;
      }
      if (fetched.error().code() == Code::kCancelled) return fetched;
      MutexLock lock(mutex_);
      if (std::exchange(lane.relays, false))
        spdlog::warn("what another node should have passed on is taken from its source: {}",
                     fetched.error().message());
    }
    PTC_TRY(fetch(lane, std::move(batch), stop));
  }
  return ok();
}

std::vector<RemoteFetch::Lane*> RemoteFetch::lanes_in_order() {
  std::vector<std::string> names;
  std::vector<Lane*> by_name, in_order;
  for (auto& [node, lane] : lanes_) {
    names.push_back(node);
    by_name.push_back(&lane);
  }
  const bool gives =
      std::any_of(sources_.images.begin(), sources_.images.end(),
                  [](const ImageRef& image) { return image != nullptr && image->is_here(); });
  for (const size_t i : order_of_senders(sources_.self, gives, names))
    in_order.push_back(by_name[i]);
  return in_order;
}

/// Who relays takes what others relay: all begin behind themselves.
std::vector<RemoteFetch::Lane*> RemoteFetch::relayed_in_order() {
  std::vector<Lane*> in_order;
  if (!a_target_) return in_order;
  const auto behind = relayed_.upper_bound(sources_.relays->node_of(*a_target_));
  for (auto lane = behind; lane != relayed_.end(); ++lane) in_order.push_back(&lane->second);
  for (auto lane = relayed_.begin(); lane != behind; ++lane) in_order.push_back(&lane->second);
  return in_order;
}

Result<> RemoteFetch::run(std::stop_token stop) {
  struct Shared {
    Mutex mutex;
    std::optional<Error> first_error PTC_GUARDED_BY(mutex);  // ends the other lanes
  } shared;
  std::stop_source lanes_stop;
  const std::stop_callback pass_on(stop, [&] { lanes_stop.request_stop(); });
  auto note = [&](Result<> result) {
    if (result.has_value()) return;
    {
      MutexLock lock(shared.mutex);
      if (!shared.first_error) shared.first_error = std::move(result).error();
    }
    lanes_stop.request_stop();
  };
  {
    std::vector<std::jthread> threads;
    // Those that wait for what others pass on have threads of their own: others may wait for what
    // the rest bring.
    using Fetch = Result<> (RemoteFetch::*)(Lane&, const std::stop_token&);
    const auto begin = [&](const std::vector<Lane*>& lanes, const std::vector<Fetch>& rounds) {
      const size_t at_once = std::min(lanes.size(), kNodesAtOnce);
      for (size_t i = 0; i < kStreams * at_once; ++i)
        threads.emplace_back(
            [&note, &lanes_stop, this, lanes, rounds, first = i / kStreams, at_once] {
              for (const Fetch fetch_all : rounds)
                for (size_t lane = first; lane < lanes.size() && !lanes_stop.stop_requested();
                     lane += at_once)
                  note((this->*fetch_all)(*lanes[lane], lanes_stop.get_token()));
            });
    };
    begin(lanes_in_order(), {&RemoteFetch::fetch_windows, &RemoteFetch::fetch_others});
    begin(relayed_in_order(), {&RemoteFetch::fetch_relayed});
  }
  MutexLock lock(shared.mutex);
  if (shared.first_error) return *std::move(shared.first_error);
  return ok();
}

}  // namespace ptc
