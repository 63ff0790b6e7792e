#include "store/transport/device.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "store/tensor/packed_copy.h"
#include "store/transport/file_runs.h"

namespace ptc {
namespace {

/// The next bytes of an item's string, for one chunk of a lane.
struct LaneCut {
  FetchItem* item;
  uint64_t begin, end;  // of the string
  uint64_t target_end;  // where the window ends that they fill
  uint64_t at;          // in the chunk
};

void move_behind(FetchItem& item, uint64_t to) {
  item.target_at_begin += to - item.begin;
  item.begin = to;
}

/// From which the target's offsets count.
MemoryPointer target_base(const FetchItem& item) {
  return {item.target_at_begin.memory(), item.target_at_begin.address() - item.begin};
}

/// Of one in a device's memory.
MemoryPointer source_base(const FetchItem& item) { return item.source->device()->memory.begin(); }

/// Moves items behind what is done, chunk by chunk.
template <class Move>
Result<> move_in_chunks(const std::vector<FetchItem*>& items, const std::stop_token& stop,
                        Move move) {
  std::vector<LaneCut> cuts;
  uint64_t bytes = 0;
  const auto flush = [&]() -> Result<> {
    if (cuts.empty()) return ok();
    if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
    PTC_TRY(move(std::span<const LaneCut>(cuts)));
    cuts.clear();
    bytes = 0;
    return ok();
  };
  for (FetchItem* const item : items) {
    const uint64_t end = packed_offset(item->copy, item->end);
    for (uint64_t at = packed_offset(item->copy, item->begin); at < end;) {
      const uint64_t to = std::min(end, at + (Staging::kBytes - bytes));
      const uint64_t target_end = to == end ? item->end : target_of_packed(item->copy, to - 1) + 1;
      cuts.push_back({item, at, to, target_end, bytes});
      bytes += to - at;
      at = to;
      if (bytes == Staging::kBytes) {
        PTC_TRY(flush());
      }
    }
  }
  return flush();
}

std::vector<StagedPart> parts_to(std::span<const LaneCut> cuts) {
  std::vector<StagedPart> parts;
  for (const LaneCut& cut : cuts)
    parts.push_back({cut.item->copy, cut.item->begin, cut.target_end, target_base(*cut.item)});
  return parts;
}

std::vector<StagedPart> parts_from(std::span<const LaneCut> cuts) {
  std::vector<StagedPart> parts;
  for (const LaneCut& cut : cuts)
    parts.push_back({packed(cut.item->copy), cut.begin, cut.end, source_base(*cut.item)});
  return parts;
}

Result<> check_long_enough(const FetchItem& item) {
  if (item.copy.source_end() > item.source->bytes())
    return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed",
                      item.source->id().text, item.source->bytes(), item.copy.source_end());
  return ok();
}

class DeviceTransport final : public Transport {
 public:
  DeviceTransport(std::shared_ptr<const Devices> devices, std::unique_ptr<Transport> next)
      : devices_(std::move(devices)), next_(std::move(next)) {}

  Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                 std::chrono::milliseconds silence) override {
    Work work;
    for (FetchItem& item : items) {
      const NodeMemory target = item.target_at_begin.memory();
      if (target.is_host()) continue;
      if (const auto device = devices_->at(target); device.has_error())
        return Error(device.error()).with_context("fetching image " + item.source->id().text);
    }
    for (FetchItem& item : items) work.add(item);
    if (work.others.size() == items.size()) return next_->fetch(items, stop, silence);

    if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
    Result<> first = ok();
    const auto note = [&](Result<> result) {
      if (first.has_value() && result.has_error()) first = std::move(result);
    };
    for (const auto& [memory, list] : work.within) note(copy_within(memory, list));
    for (const auto& [pair, list] : work.across)
      note(copy_across(pair.first, pair.second, list, stop));
    for (const auto& [memory, list] : work.out) note(bring_out(memory, list, stop));
    for (const auto& [memory, list] : work.in) note(bring_in(memory, list, stop, silence));
    if (!work.others.empty()) note(fetch_others(work.others, stop, silence));
    return first;
  }

 private:
  using Items = std::vector<FetchItem*>;
  struct Work {
    std::map<NodeMemory, Items> within, out, in;                // by device
    std::map<std::pair<NodeMemory, NodeMemory>, Items> across;  // from, to
    Items others;

    void add(FetchItem& item) {
      const NodeMemory target = item.target_at_begin.memory();
      const bool from_device = item.source->device() != nullptr;
      if (target.is_host() && !from_device) {
        others.push_back(&item);
      } else if (bytes_between(item.copy, item.begin, item.end) == 0) {
        if (item.begin < item.end) move_behind(item, item.end);
      } else if (!from_device) {
        in[target].push_back(&item);
      } else if (const NodeMemory source = item.source->place().memory; target.is_host()) {
        out[source].push_back(&item);
      } else if (source == target) {
        within[target].push_back(&item);
      } else {
        across[{source, target}].push_back(&item);
      }
    }
  };

  Result<> copy_within(NodeMemory memory, const Items& items) {
    std::vector<DeviceCopy> copies;
    for (const FetchItem* item : items) {
      PTC_TRY(check_long_enough(*item));
      const MemoryPointer source = source_base(*item);
      for_each_rectangle(item->copy, item->begin, item->end, [&](const StridedCopy& rectangle) {
        copies.push_back({{source.memory(), source.address()}, target_base(*item), rectangle});
      });
    }
    PTC_TRY(Staging::Lane lane, devices_->lane(memory));
    PTC_TRY(lane->within(copies));
    for (FetchItem* item : items) move_behind(*item, item->end);
    return ok();
  }

  Result<> copy_across(NodeMemory from, NodeMemory to, const Items& items,
                       const std::stop_token& stop) {
    for (const FetchItem* item : items) {
      PTC_TRY(check_long_enough(*item));
    }
    PTC_TRY(Staging::Lane lane, devices_->waiting_lane(to));
    return move_in_chunks(items, stop, [&](std::span<const LaneCut> cuts) -> Result<> {
      PTC_TRY(Staging::Lane source, devices_->lane(from));
      PTC_TRY(source->down(parts_from(cuts), lane->host().data()));
      PTC_TRY(lane->up(parts_to(cuts)));
      for (const LaneCut& cut : cuts) move_behind(*cut.item, cut.target_end);
      return ok();
    });
  }

  Result<> bring_out(NodeMemory memory, const Items& items, const std::stop_token& stop) {
    for (const FetchItem* item : items) {
      PTC_TRY(check_long_enough(*item));
    }
    return move_in_chunks(items, stop, [&](std::span<const LaneCut> cuts) -> Result<> {
      PTC_TRY(Staging::Lane lane, devices_->lane(memory));
      PTC_TRY(lane->down(parts_from(cuts)));
      for (const LaneCut& cut : cuts) {
        PTC_TRY(put_runs(*cut.item, cut.target_end, lane->host().data() + cut.at));
        move_behind(*cut.item, cut.target_end);
      }
      return ok();
    });
  }

  Result<> bring_in(NodeMemory memory, const Items& items, const std::stop_token& stop,
                    std::chrono::milliseconds silence) {
    PTC_TRY(Staging::Lane lane, devices_->waiting_lane(memory));
    return move_in_chunks(items, stop, [&](std::span<const LaneCut> cuts) -> Result<> {
      std::vector<FetchItem> to_lane;
      for (const LaneCut& cut : cuts)
        to_lane.push_back({cut.item->source, packed(cut.item->copy), cut.begin, cut.end,
                           in_host_memory(lane->host().data() + cut.at)});
      Result<> fetched = next_->fetch(to_lane, stop, silence);
      if (fetched.has_value()) {
        PTC_TRY(lane->up(parts_to(cuts)));
        for (const LaneCut& cut : cuts) move_behind(*cut.item, cut.target_end);
        return ok();
      }
      // What came so far goes on all the same: it is not asked for again.
      for (size_t i = 0; i < cuts.size(); ++i) {
        LaneCut cut = cuts[i];
        if (to_lane[i].begin == cut.begin) continue;
        if (to_lane[i].begin < cut.end)
          cut.target_end = target_of_packed(cut.item->copy, to_lane[i].begin - 1) + 1;
        PTC_TRY(lane->up(parts_to({&cut, 1}), lane->host().data() + cut.at));
        move_behind(*cut.item, cut.target_end);
      }
      return fetched;
    });
  }

  Result<> fetch_others(const Items& wanted, const std::stop_token& stop,
                        std::chrono::milliseconds silence) {
    std::vector<FetchItem> items;
    for (const FetchItem* item : wanted) items.push_back(*item);
    Result<> result = next_->fetch(items, stop, silence);
    for (size_t i = 0; i < items.size(); ++i) *wanted[i] = items[i];
    return result;
  }

  const std::shared_ptr<const Devices> devices_;
  const std::unique_ptr<Transport> next_;
};

}  // namespace

std::unique_ptr<Transport> make_device_transport(std::shared_ptr<const Devices> devices,
                                                 std::unique_ptr<Transport> next) {
  if (devices == nullptr) return next;
  return std::make_unique<DeviceTransport>(std::move(devices), std::move(next));
}

}  // namespace ptc
