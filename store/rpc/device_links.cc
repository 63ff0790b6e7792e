#include "store/rpc/device_links.h"

#include <algorithm>
#include <random>
#include <utility>

#include "store/rpc/messages.h"

namespace ptc {

void LinkTable::Drop::operator()(StagedLink* link) const {
  const NodeMemory here = link->here;
  delete link;
  table->one_less(here);
}

void LinkTable::one_less(NodeMemory here) {
  MutexLock lock(mutex_);
  --in_use_[here];
  changed_.notify_all();
}

template <class Fits>
LinkTable::Held LinkTable::take(Fits fits) {
  MutexLock lock(mutex_);
  const auto found =
      std::find_if(kept_.rbegin(), kept_.rend(),
                   [&](const std::unique_ptr<StagedLink>& one) { return fits(*one); });
  if (found == kept_.rend()) return {nullptr, Drop{this}};
  Held link(found->release(), Drop{this});
  kept_.erase(std::next(found).base());
  ++in_use_[link->here];
  return link;
}

LinkTable::Held LinkTable::make_place(NodeMemory here) {
  std::unique_ptr<StagedLink> gives_way;  // ends without the lock
  auto place = std::make_unique<StagedLink>();
  place->here = here;
  const auto is_here = [&](const std::unique_ptr<StagedLink>& one) { return one->here == here; };
  MutexLock lock(mutex_);
  const auto kept = static_cast<size_t>(std::count_if(kept_.begin(), kept_.end(), is_here));
  if (in_use_[here] + kept >= most_) {
    const auto oldest = std::find_if(kept_.begin(), kept_.end(), is_here);
    if (oldest == kept_.end()) return {nullptr, Drop{this}};
    gives_way = std::move(*oldest);
    kept_.erase(oldest);
  }
  ++in_use_[here];
  return {place.release(), Drop{this}};
}

bool LinkTable::wait_for_one(NodeMemory here, DeviceLink::Deadline deadline,
                             const std::stop_token& stop) {
  MutexLock lock(mutex_);
  return changed_.wait_until(mutex_, stop, deadline,
                             [&]() PTC_REQUIRES(mutex_) { return in_use_[here] < most_; });
}

void LinkTable::keep(Held link) {
  MutexLock lock(mutex_);
  link->used = std::chrono::steady_clock::now();
  --in_use_[link->here];
  kept_.emplace_back(link.release());
  changed_.notify_all();
}

void LinkTable::end_unused(DeviceLink::Deadline since) {
  std::list<std::unique_ptr<StagedLink>> end;  // without the lock
  MutexLock lock(mutex_);
  while (!kept_.empty() && kept_.front()->used <= since)
    end.splice(end.end(), kept_, kept_.begin());
}

bool LinkTable::keeps_any() const {
  MutexLock lock(mutex_);
  return !kept_.empty();
}

size_t LinkTable::count() const {
  MutexLock lock(mutex_);
  size_t all = kept_.size();
  for (const auto& [here, links] : in_use_) all += links;
  return all;
}

DeviceLinks::DeviceLinks(std::shared_ptr<const Devices> devices, FindMaker find_maker,
                         const DeviceLinksOptions& options)
    : devices_(std::move(devices)),
      find_maker_(std::move(find_maker)),
      options_(options),
      // A node that starts again does not name the links that it had before.
      next_number_(std::random_device()() * (uint64_t{1} << 32)),
      asked_(options.most),
      answered_(options.most) {
  PTC_CHECK(options.chunk_bytes >= kLeastChunkBytes && options.chunk_bytes <= kMostChunkBytes);
}

Result<DeviceLinkMaker*> DeviceLinks::maker() {
  std::call_once(found_, [this] { maker_ = find_maker_(); });
  if (maker_.has_error()) return Error(maker_.error());
  return maker_.value().get();
}

Result<DeviceLinks::Held> DeviceLinks::ask(const std::string& node, NodeMemory there,
                                           NodeMemory here, DeviceLink::Deadline deadline,
                                           std::stop_token stop) {
  const auto fits = [&](const StagedLink& one) {
    return one.node == node && one.there == there && one.here == here;
  };
  for (;;) {
    if (Held kept = asked_.take(fits)) return kept;
    if (Held place = asked_.make_place(here)) {
      place->node = node;
      place->there = there;
      PTC_TRY(add_staging(*place));
      return place;
    }
    if (asked_.wait_for_one(here, deadline, stop)) continue;
    if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
    return make_error(Code::kUnavailable, "all {} links of {} to other nodes are in use",
                      options_.most, here.to_string());
  }
}

Result<> DeviceLinks::make(StagedLink& link) {
  link.link.reset();
  link.number = next_number_++;
  PTC_TRY(DeviceLinkMaker* const maker, this->maker());
  PTC_TRY(link.id, maker->make_id());
  PTC_TRY(link.link, maker->make(*link.device, link.id, DeviceLinkMaker::End::kAsks));
  link.link->keep(link.staging);
  return ok();
}

Result<DeviceLinks::Held> DeviceLinks::answer(const std::string& node, NodeMemory here,
                                              uint64_t number, const std::string& id) {
  PTC_TRY(devices_->at(here));
  if (id.empty()) {
    Held kept = answered_.take([&](const StagedLink& one) {
      return one.node == node && one.number == number && one.here == here;
    });
    if (kept) return kept;
  }
  Held place = answered_.make_place(here);
  if (!place) return too_busy(fmt::format("all {} links of other nodes are in use", options_.most));
  if (id.empty()) return Error(Code::kConflict, "there is no link of that number here");
  place->node = node;
  place->number = number;
  place->id = id;
  PTC_TRY(add_staging(*place));
  PTC_TRY(DeviceLinkMaker* const maker, this->maker());
  PTC_TRY(place->link, maker->make(*place->device, id, DeviceLinkMaker::End::kAnswers));
  place->link->keep(place->staging);
  return place;
}

Result<> DeviceLinks::add_staging(StagedLink& link) {
  PTC_TRY(link.device, devices_->at(link.here));
  const auto staging = std::make_shared<std::array<DeviceMemory, StagedLink::kBuffers>>();
  for (DeviceMemory& buffer : *staging) {
    Result<DeviceMemory> memory = link.device->allocate(options_.chunk_bytes);
    if (memory.has_error() && memory.error().code() == Code::kNoSpace) {
      // Perhaps links that nobody uses have it. Who comes while another ends them waits for that.
      MutexLock lock(making_room_);
      for (LinkTable* const table : {&asked_, &answered_})
        table->end_unused(DeviceLink::Deadline::max());
      memory = link.device->allocate(options_.chunk_bytes);
    }
    PTC_TRY(buffer, std::move(memory));
  }
  link.staging = staging;
  PTC_TRY(link.stream, link.device->stream());
  return ok();
}

void DeviceLinks::keep(Held link) {
  LinkTable* const table = link.get_deleter().table;
  table->keep(std::move(link));
  MutexLock lock(mutex_);
  any_kept_ = true;
  kept_.notify_all();
  if (ends_unused_.joinable()) return;
  try {
    ends_unused_ = std::jthread([this](const std::stop_token& stop) { end_unused(stop); });
  } catch (const std::exception&) {  // no thread: they stay until another one wants their place
  }
}

/// Their staging is room that images could have.
void DeviceLinks::end_unused(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    {
      MutexLock lock(mutex_);
      if (asked_.keeps_any() || answered_.keeps_any()) {
        const auto soon = std::chrono::steady_clock::now() + options_.unused / 4;
        (void)kept_.wait_until(mutex_, stop, soon, [] { return false; });
      } else {
        (void)kept_.wait(mutex_, stop, [&]() PTC_REQUIRES(mutex_) { return any_kept_; });
      }
      any_kept_ = false;
    }
    const auto since = std::chrono::steady_clock::now() - options_.unused;
    for (LinkTable* const table : {&asked_, &answered_}) table->end_unused(since);
  }
}

}  // namespace ptc
