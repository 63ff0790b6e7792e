#include "reshard/job/part_shelf.h"

#include "store/base/mutex.h"

namespace ptc {

Result<std::optional<PlanPart>> PartShelf::find(const std::string& id, const std::string& plan,
                                                int64_t epoch) {
  MutexLock lock(mutex_);
  const auto known = parts_.find(id);
  if (known == parts_.end()) return std::optional<PlanPart>();
  if (known->second.epoch > epoch) return Error(Code::kCancelled, "another node leads by now");
  if (known->second.plan != plan) return std::optional<PlanPart>();
  known->second.epoch = epoch;
  known->second.kept_at = ++now_;
  return std::optional<PlanPart>(known->second.part);
}

bool PartShelf::has_of_other_plan(const std::string& id, const std::string& plan) const {
  MutexLock lock(mutex_);
  const auto known = parts_.find(id);
  return known != parts_.end() && known->second.plan != plan;
}

void PartShelf::keep(const std::string& id, Part part) {
  MutexLock lock(mutex_);
  part.kept_at = ++now_;
  parts_.insert_or_assign(id, std::move(part));
}

uint64_t PartShelf::now() const {
  MutexLock lock(mutex_);
  return now_;
}

void PartShelf::drop(const std::string& id, int64_t epoch) {
  drop_if(id, [&](const Part& part) { return part.epoch <= epoch; });
}

void PartShelf::drop_of_before(uint64_t moment, const std::string& id) {
  drop_if(id, [&](const Part& part) { return part.kept_at <= moment; });
}

void PartShelf::drop_if(const std::string& id, const std::function<bool(const Part&)>& may_go) {
  PlanPart part;
  {
    MutexLock lock(mutex_);
    const auto known = parts_.find(id);
    if (known == parts_.end() || !may_go(known->second)) return;
    part = std::move(known->second.part);
    parts_.erase(known);
  }
  const ImageNames used = decided_(id);
  for (const auto* list : {&part.images, &part.copies})
    for (const auto& [number, image] : *list)
      if (!used.contains(image)) remove_(image);
}

bool PartShelf::empty() const {
  MutexLock lock(mutex_);
  return parts_.empty();
}

std::map<std::string, int64_t> PartShelf::epochs() const {
  MutexLock lock(mutex_);
  std::map<std::string, int64_t> epochs;
  for (const auto& [id, part] : parts_) epochs.emplace(id, part.epoch);
  return epochs;
}

std::optional<ReshardProgress> PartShelf::done() const {
  MutexLock lock(mutex_);
  for (const auto& [id, part] : parts_)
    if (part.epoch != 0) return part.done;
  return std::nullopt;
}

}  // namespace ptc
