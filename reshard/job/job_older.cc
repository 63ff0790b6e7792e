// Checkpoints beside the newest: no layout is made of them any more, and their files stay where
// they are. But they get the copies that `replicas` asks for, and leave nodes that shall hold
// nothing.
#include <spdlog/spdlog.h>

#include "reshard/job/job_impl.h"
#include "reshard/move/change.h"
#include "reshard/move/space.h"

namespace ptc {

/// Ranks on no node in particular: then place_files() leaves each file with who holds most of it.
Result<WantedState> Job::Impl::where_it_is(const CheckpointRecord& record, uint32_t replicas,
                                           std::vector<std::string> nodes) const {
  WantedState wanted;
  wanted.spec = record.checkpoint->stored()->spec;
  wanted.replicas = replicas;
  wanted.alive = std::move(nodes);
  wanted.placement.node_of_rank.assign(wanted.spec.sizes.world_size(), "");
  if (wanted.alive.empty()) return no_node_in_service();
  return wanted;
}

Result<> Job::Impl::settle_older(const Layout& wanted, int64_t wanted_revision,
                                 std::unique_ptr<Activity>& activity) {
  if (services.cluster == nullptr) return ok();
  std::vector<CheckpointRecord> older;
  {
    std::lock_guard lock(mutex);
    const CheckpointRecord* newest = latest();
    for (const auto& [name, record] : checkpoints)
      if (&record != newest) older.push_back(record);
  }
  for (CheckpointRecord& record : older) {
    const std::string name = record.checkpoint->name();
    {
      std::lock_guard lock(mutex);
      if (saved.revision != wanted_revision) return Error(Code::kCancelled, "a newer edit came");
      const std::string spec = record.checkpoint->stored()->spec.name();
      activity = activities.begin({Activity::Kind::kReshard, name, spec, spec});
    }
    const CheckpointRef checkpoint = record.checkpoint;
    Result<> settled = settle_one(std::move(record), wanted.replicas, *activity);
    if (settled.has_error() && !is_there(*checkpoint)) continue;
    if (settled.has_error()) return std::move(settled).error().with_context("checkpoint " + name);
  }
  return ok();
}

Result<> Job::Impl::settle_one(CheckpointRecord record, uint32_t replicas, Activity& activity) {
  if (activity.stop_token().stop_requested()) return Error(Code::kCancelled, "shutting down");
  PTC_TRY(auto wanted, where_it_is(record, replicas, nodes_in_service()));
  Fences fences;
  PTC_TRY(auto moved, move_or_repair(record, wanted, activity, fences));
  if (moved == nullptr) return ok();

  const std::string name = record.checkpoint->name();
  auto decide = [&]() -> Result<std::shared_ptr<const StoredState>> {
    std::lock_guard change(changes);
    PlanTexts plan;
    {
      std::lock_guard lock(mutex);
      const auto known = checkpoints.find(name);
      if (known == checkpoints.end() || known->second.stored != record.stored)
        return Error(Code::kCancelled, "it has changed meanwhile");
      record = known->second;  // it may be pinned by now
      plan = *running_plan;
    }
    JobDecision decision(job->name());
    decision.rests_on_keys(fences);
    name_leader(decision);
    decision.rests_on(name, record);
    PTC_TRY(put_stored(record, *moved, plan, decision));
    PTC_TRY(record.meta_revision, commit_fenced(std::move(decision)));
    std::lock_guard lock(mutex);
    return take_over(record, moved, std::move(plan));
  };
  Result<std::shared_ptr<const StoredState>> before = decide();
  if (before.has_error()) {
    undo_unless_decided(before.error(), record, moved);
    return std::move(before).error();
  }
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  remove_replaced(record, *before.value());
  return ok();
}

uint64_t Job::Impl::bytes_on(std::string_view node) const {
  uint64_t bytes = 0;
  for (const auto& [name, record] : checkpoints) {
    const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
    for (size_t i = 0; i < stored->images.size(); ++i)
      if (stored->images[i].node == node) bytes += stored->layouts()[i].bytes;
  }
  return bytes;
}

uint64_t Job::bytes_on(std::string_view node) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->bytes_on(node);
}

std::optional<uint64_t> Job::rank_on(std::string_view node) const {
  std::lock_guard lock(impl_->mutex);
  const std::vector<std::string>& devices = impl_->saved.layout.devices;
  for (uint64_t rank = 0; rank < devices.size(); ++rank)
    if (node_of(devices[rank]) == node) return rank;
  return std::nullopt;
}

Result<> Job::add_bytes_without(const std::string& node,
                                std::map<std::string, uint64_t>& bytes) const {
  std::vector<std::string> nodes = impl_->nodes_in_service();
  std::erase(nodes, node);
  std::vector<CheckpointRecord> records;
  const Checkpoint* newest = nullptr;
  Layout wanted;
  {
    std::lock_guard lock(impl_->mutex);
    for (const auto& [name, record] : impl_->checkpoints) records.push_back(record);
    if (const CheckpointRecord* record = impl_->latest()) newest = record->checkpoint.get();
    wanted = impl_->saved.layout;
  }
  for (const CheckpointRecord& record : records) {
    const Checkpoint& checkpoint = *record.checkpoint;
    Result<WantedState> state = &checkpoint == newest
                                    ? impl_->wanted_state(checkpoint, wanted, nodes)
                                    : impl_->where_it_is(record, wanted.replicas, nodes);
    if (state.has_error()) return std::move(state).error();
    const std::shared_ptr<const StoredState> stored = checkpoint.stored();
    Result<std::shared_ptr<const ChangePlan>> plan =
        plan_change(checkpoint, *stored, state.value());
    if (plan.has_error())
      return std::move(plan).error().with_context(
          fmt::format("job {}, checkpoint {}", name_, checkpoint.name()));
    add_bytes(*plan.value(), *stored, bytes);
  }
  return ok();
}

}  // namespace ptc
