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
  wanted.spec = record.where->spec;
  wanted.replicas = replicas;
  wanted.alive = std::move(nodes);
  wanted.placement.node_of_rank.assign(wanted.spec.sizes.world_size(), "");
  if (wanted.alive.empty()) return no_node_in_service();
  return wanted;
}

Result<> Job::Impl::settle_older(const CheckpointRecord& record, Attempt& attempt) {
  const std::string name = record.checkpoint->name();
  const std::string spec = record.where->spec.name();
  // Before the look at the revision, as in settle_newest().
  attempt.activity = activities.begin({Activity::Kind::kReshard, name, spec, spec});
  if (knowledge.now()->saved.revision != attempt.revision)
    return Error(Code::kCancelled, "a newer edit came");
  Result<> settled = settle_one(record, attempt);
  if (settled.has_error() && !knowledge.now()->has(*record.checkpoint)) return ok();  // removed
  if (settled.has_error()) return std::move(settled).error().with_context("checkpoint " + name);
  return ok();
}

Result<> Job::Impl::settle_one(CheckpointRecord record, Attempt& attempt) {
  if (attempt.activity->stop_token().stop_requested())
    return Error(Code::kCancelled, "shutting down");
  PTC_TRY(auto wanted, where_it_is(record, attempt.wanted.replicas, nodes_in_service()));
  Fences fences;
  PTC_TRY(auto moved, move_or_repair(record, wanted, attempt, fences));
  if (moved == nullptr) return ok();

  const std::string name = record.checkpoint->name();
  auto decide = [&]() -> Result<std::shared_ptr<const StoredState>> {
    std::lock_guard change(changes);
    KnownJob::PlanRef plan;
    {
      const JobKnowledge::Snapshot now = knowledge.now();
      const auto known = now->checkpoints.find(name);
      if (known == now->checkpoints.end() || known->second.stored != record.stored)
        return Error(Code::kCancelled, "it has changed meanwhile");
      record = known->second;  // it may be pinned by now
      plan = now->running_plan;
    }
    JobDecision decision(job->name());
    decision.rests_on_keys(fences);
    attempt.leadership->name_in(decision);
    decision.rests_on(name, record);
    PTC_TRY(put_stored(record, moved, *plan, decision));
    PTC_TRY(record.meta_revision, commit_fenced(std::move(decision)));
    return knowledge.update([&](KnownJob& known) { return take_over(known, record, plan); });
  };
  Result<std::shared_ptr<const StoredState>> before = decide();
  if (before.has_error()) {
    undo_unless_decided(before.error(), record, moved, attempt.epoch());
    return std::move(before).error();
  }
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  remove_replaced(record, *before.value());
  return ok();
}

uint64_t Job::bytes_on(std::string_view node) const {
  return impl_->knowledge.now()->bytes_on(node);
}

std::optional<uint64_t> Job::rank_on(std::string_view node) const {
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  const std::vector<std::string>& devices = known->saved.layout.devices;
  for (uint64_t rank = 0; rank < devices.size(); ++rank)
    if (node_of(devices[rank]) == node) return rank;
  return std::nullopt;
}

Result<> Job::add_bytes_without(const std::string& node,
                                std::map<std::string, uint64_t>& bytes) const {
  std::vector<std::string> nodes = impl_->nodes_in_service();
  std::erase(nodes, node);
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  const CheckpointRecord* newest = known->latest();
  for (const auto& [name, record] : known->checkpoints) {
    const Checkpoint& checkpoint = *record.checkpoint;
    Result<WantedState> state =
        &record == newest ? impl_->wanted_state(checkpoint, known->saved.layout, nodes)
                          : impl_->where_it_is(record, known->saved.layout.replicas, nodes);
    if (state.has_error()) return std::move(state).error();
    const std::shared_ptr<const StoredState>& stored = record.where;
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
