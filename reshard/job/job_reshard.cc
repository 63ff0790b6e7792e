// What a job does in the background: brings the newest checkpoint into the layout wanted, then
// flips.
#include <spdlog/spdlog.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <unordered_set>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/job_impl.h"
#include "reshard/move/change.h"
#include "reshard/move/plan_report.h"
#include "store/base/file.h"
#include "store/base/random_id.h"
#include "store/base/size_text.h"
#include "store/base/wall_time.h"

namespace ptc {

std::optional<StepPool::Time> Job::Impl::next_step(const std::stop_token& stop) {
  // Checkpoints that are too many but in use, and parts without a decision, are looked at again
  // after this time.
  constexpr auto kRetryRemoval = std::chrono::seconds(2);
  constexpr auto kAnotherLeads = std::chrono::milliseconds(100);
  CheckpointRef newest;
  Layout wanted;
  int64_t wanted_revision = 0;
  bool work = false;
  {
    std::lock_guard lock(mutex);
    if (services.cluster != nullptr && std::chrono::steady_clock::now() < others_first)
      return others_first;
    work = has_work();
    if (const CheckpointRecord* record = latest()) newest = record->checkpoint;
    wanted = saved.layout;
    wanted_revision = saved.revision;
  }
  if (stop.stop_requested()) return std::nullopt;
  if (work) {
    report_missing_images();
    if (!lead()) {
      std::lock_guard lock(mutex);
      return others_first = std::chrono::steady_clock::now() + kAnotherLeads;
    }
    settle_all(newest, wanted, wanted_revision);
  }
  const bool removed = remove_superfluous(stop);
  drop_undecided_parts();
  std::lock_guard lock(mutex);
  if (removed && !has_work() && shelf.empty()) return std::nullopt;
  return std::chrono::steady_clock::now() + (has_work() ? std::chrono::seconds(0) : kRetryRemoval);
}

/// This node leads; then no more.
void Job::Impl::settle_all(const CheckpointRef& newest, const Layout& wanted,
                           int64_t wanted_revision) {
  constexpr auto kTryAgain = std::chrono::seconds(1);
  constexpr auto kAfterAnother = std::chrono::milliseconds(100);
  {
    std::lock_guard lock(mutex);
    look = false;
    at_work = true;
  }
  Result<> result = ok();
  std::unique_ptr<Activity> activity;
  try {
    result = settle(newest, wanted, wanted_revision, activity);
    if (result.has_value()) result = settle_older(wanted, wanted_revision, activity);
  } catch (const std::exception& error) {  // no memory
    result = make_error(Code::kNoSpace, "{}", error.what());
  }
  stop_leading();
  if (result.has_error() && newest != nullptr && !is_there(*newest))
    result = make_error(Code::kCancelled, "checkpoint {} was removed", newest->name());
  std::lock_guard lock(mutex);
  const bool abandoned = result.has_error() && (result.error().code() == Code::kCancelled ||
                                                result.error().code() == Code::kConflict);
  // A node that does not answer is gone soon, and then the plan is another one.
  const bool again =
      services.cluster != nullptr && result.has_error() &&
      (result.error().code() == Code::kUnavailable || result.error().code() == Code::kInDoubt);
  if (abandoned &&
      services.cluster != nullptr) {  // there may be more to do than the newer edit says
    look = true;
    others_first = std::chrono::steady_clock::now() + kAfterAnother;
  }
  if (again) {
    look = true;
    others_first = std::chrono::steady_clock::now() + kTryAgain;
    last_error = {
        "reshard to " + wanted.spec.name() + " is tried again: " + result.error().message(),
        now_ns()};
    spdlog::warn("job {}: {}", job->name(), last_error->what);
  }
  at_work = false;
  if (!result.has_error()) {
    failed.reset();
    forget_error("reshard to ");
  }
  if (activity && !result.has_error()) ++counts.reshards_done;
  if (activity && abandoned) ++counts.reshards_abandoned;
  activity.reset();
  running_plan.reset();
  if (result.has_error() && !abandoned && !again) {
    ++counts.reshards_failed;
    failed = {wanted_revision, newest ? newest->name() : ""};
    last_error = {"reshard to " + wanted.spec.name() + " failed: " + result.error().message() +
                      " (save layout.json again to try again)",
                  now_ns()};
    spdlog::error("job {}: {}", job->name(), last_error->what);
  }
  changed.notify_all();
}

/// In a cluster one node at a time decides what a job's nodes do: the one that put the key, under
/// its lease. A flip names it, as all that it was based on: a later leader has the nodes throw away
/// the parts of others. This names no fence: nothing is put under a lease that has ended, and one
/// that a former life of this node left can decide nothing, for what it would decide names its
/// fence.
bool Job::Impl::lead() {
  if (services.cluster == nullptr) return true;
  const std::shared_ptr<const MetaLease> lease = services.cluster->lease();
  if (lease == nullptr) return false;
  // One of this node's own is left where it could not be deleted: nobody leads by it.
  const auto held = services.meta->get(leader_key());
  if (held.has_error() || (held.value() && held.value()->value != services.cluster->self()))
    return false;
  MetaTransaction transaction;
  transaction.compares = {{leader_key(), held.value() ? held.value()->revision : 0}};
  transaction.leased_puts = {{leader_key(), services.cluster->self()}};
  transaction.lease = lease.get();
  Result<int64_t> led = services.meta->commit(transaction);
  if (led.has_error()) return false;
  leader_epoch = led.value();
  // What was decided until then is known from here on.
  if (sync().has_value()) return true;
  stop_leading();
  return false;
}

void Job::Impl::name_leader(JobDecision& decision) const {
  if (services.cluster != nullptr) decision.rests_on_key(leader_key(), leader_epoch);
}

void Job::Impl::stop_leading() {
  if (services.cluster == nullptr) return;
  MetaTransaction transaction;
  transaction.compares = {{leader_key(), leader_epoch}};  // not a later leader's
  transaction.deletes = {leader_key()};
  Result<int64_t> done = commit_fenced(std::move(transaction));
  if (done.has_error() && done.error().code() != Code::kConflict)
    spdlog::warn("job {}: another node can lead when the lease of this one ends: {}", job->name(),
                 done.error().message());
}

std::vector<std::string> Job::Impl::nodes_in_service() const {
  if (services.cluster == nullptr) return {};
  std::vector<std::string> nodes = services.cluster->alive();
  std::lock_guard lock(mutex);
  std::erase_if(nodes, [&](const std::string& node) {
    return std::find(drained.begin(), drained.end(), node) != drained.end();
  });
  return nodes;
}

Error no_node_in_service() {
  return make_error(Code::kUnavailable,
                    "no node is in service: all that are there are being drained (ptc "
                    "drain NODE --cancel)");
}

Result<WantedState> Job::Impl::wanted_state(const Checkpoint& checkpoint, const Layout& wanted,
                                            std::vector<std::string> nodes) const {
  WantedState state;
  state.spec = wanted.spec;
  if (services.cluster == nullptr) return state;
  state.replicas = wanted.replicas;
  state.alive = std::move(nodes);
  if (state.alive.empty()) return no_node_in_service();
  PTC_TRY(state.placement, place_ranks(wanted, checkpoint, *checkpoint.stored(), state.alive));
  return state;
}

Result<> Job::Impl::settle(const CheckpointRef& checkpoint, const Layout& wanted,
                           int64_t wanted_revision, std::unique_ptr<Activity>& activity) {
  std::shared_ptr<const StoredState> moved;
  Fences fences;
  CheckpointRecord record;
  if (checkpoint != nullptr &&
      (checkpoint->stored()->spec != wanted.spec || services.cluster != nullptr)) {
    {
      std::lock_guard lock(mutex);
      const CheckpointRecord* newest = latest();
      if (saved.revision != wanted_revision || newest == nullptr ||
          newest->checkpoint != checkpoint)
        return Error(Code::kCancelled, "a newer edit came");
      record = *newest;
      // Under the lock: an edit that comes after the look at the revision finds it, and stops it.
      activity = activities.begin({Activity::Kind::kReshard, checkpoint->name(),
                                   checkpoint->stored()->spec.name(), wanted.spec.name()});
    }
    if (activity->stop_token().stop_requested()) return Error(Code::kCancelled, "shutting down");
    PTC_TRY(auto state, wanted_state(*checkpoint, wanted, nodes_in_service()));
    PTC_TRY(moved, move_or_repair(record, state, *activity, fences));
  } else {
    std::lock_guard lock(mutex);
    if (settled()) return ok();
  }
  if (moved == nullptr && checkpoint != nullptr) {  // all is where it shall be
    std::lock_guard lock(mutex);
    if (settled()) {
      activity.reset();
      return ok();
    }
  }
  Result<bool> flipped = flip(checkpoint, wanted.spec, wanted_revision, moved, fences);
  // Superseded at the last moment, or not written down: what was made for it goes.
  if (moved != nullptr && flipped.has_error()) undo_unless_decided(flipped.error(), record, moved);
  else if (moved != nullptr && !flipped.value()) give_up(record, *moved, leader_epoch);
  if (flipped.has_error()) return std::move(flipped).error();
  if (moved != nullptr && !flipped.value()) return Error(Code::kCancelled, "a newer edit came");
  return ok();
}

void Job::Impl::remove_images_not_in(const StoredState& these, const StoredState& those) {
  std::unordered_set<std::string_view> kept;
  for (const StoredImage& image : those.images) kept.insert(image.id);
  for (const StoredImage& image : these.images)
    if (!kept.contains(image.id)) (void)services.images->remove({image.id});
  if (listener != nullptr) listener->images_removed(job->name());
}

/// What was made for a decision that did not come: here, and on the other nodes.
void Job::Impl::give_up(const CheckpointRecord& record, const StoredState& made, int64_t epoch) {
  remove_images_not_in(made, *record.checkpoint->stored());
  if (services.cluster == nullptr) return;
  for (const std::string& node : peers.others())
    (void)peers.ask(node, "drop",
                    json::serialize(json::object{{"id", record.id}, {"epoch", epoch}}));
}

void Job::Impl::undo_unless_decided(const Error& error, const CheckpointRecord& record,
                                    std::shared_ptr<const StoredState> made) {
  const int64_t epoch = leader_epoch;
  if (error.code() != Code::kInDoubt) return give_up(record, *made, epoch);
  doubts.add([this, record, made, epoch] {
    give_up(record, *made, epoch);
  });  // but for what is named by then
  housekeeping.wake();
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move_or_repair(const CheckpointRecord& record,
                                                                     const WantedState& wanted,
                                                                     Activity& activity,
                                                                     Fences& fences) {
  auto moved = move(record, wanted, activity, fences);
  if (moved.has_value() || moved.error().code() != Code::kCorrupt) return moved;
  Result<Findings> found = repair(record.checkpoint->name());
  if (found.has_error() || found.value().replaceable.empty()) return moved;
  return make_error(Code::kCancelled,
                    "damaged copies were taken out: what is made of the others comes next");
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move(const CheckpointRecord& record,
                                                           const WantedState& wanted,
                                                           Activity& activity, Fences& fences) {
  auto start = std::chrono::steady_clock::now();
  const Checkpoint& checkpoint = *record.checkpoint;
  std::shared_ptr<const StoredState> stored = checkpoint.stored();
  PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
  if (change->nothing() && stored->spec == wanted.spec) return std::shared_ptr<const StoredState>();
  const PlanReport report(job->name(), services.node, checkpoint, *stored, wanted.spec, *change);
  PlanTexts texts = report.texts("running", 0);
  const TransferPlan::Totals totals = change->transfers.totals;
  {
    std::lock_guard lock(mutex);
    running_plan = std::move(texts);
  }
  activity.begin("moving", totals.total_bytes - totals.kept_bytes);

  PTC_TRY(auto parts, make_parts(record, *stored, wanted, *change, activity, fences));
  Result<> made = compare_parts(record, *stored, *change, parts, /*known=*/true);
  Result<std::shared_ptr<const StoredState>> moved = Error(Code::kInternal, "");
  if (made.has_value()) {
    Result<std::vector<StoredImage>> images = compose(checkpoint, *stored, *change, parts);
    if (images.has_value()) moved = checkpoint.make_stored(wanted.spec, std::move(images).value());
    else moved = std::move(images).error();
    if (moved.has_error()) made = moved.error();
  }
  if (made.has_error()) {
    give_up(record, parts);
    return std::move(made).error();
  }
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  texts = report.texts("done", seconds.count());
  activity.begin("committing");
  std::lock_guard lock(mutex);
  running_plan = std::move(texts);
  return moved;
}

Result<bool> Job::Impl::flip(const CheckpointRef& checkpoint, const LayoutSpec& wanted,
                             int64_t wanted_revision, std::shared_ptr<const StoredState> moved,
                             const Fences& fences) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  PlanTexts plan;
  JobDecision decision(job->name());
  {
    std::lock_guard lock(mutex);
    const CheckpointRecord* newest = latest();
    if (saved.revision != wanted_revision ||
        (newest != nullptr ? newest->checkpoint : nullptr) != checkpoint)
      return false;
    if (newest != nullptr) record = *newest;
    next = in_force;
    if (moved != nullptr) plan = *running_plan;
    decision.rests_on_keys(fences);
    name_leader(decision);
    decision.rests_on(saved);
    decision.rests_on(in_force);
  }
  next.spec = wanted;
  next.revision = wanted_revision;
  next.current.reset();
  if (checkpoint != nullptr) {
    next.current = checkpoint->name();
    decision.rests_on(checkpoint->name(), record);
    if (moved != nullptr) {
      PTC_TRY(put_stored(record, *moved, plan, decision));
    }
  }
  decision.put(next);
  PTC_TRY(int64_t meta_revision, commit_fenced(std::move(decision)));
  std::shared_ptr<const StoredState> before;
  {
    std::lock_guard lock(mutex);
    in_force = {next, meta_revision};
    failed.reset();
    if (last_error && last_error->what.starts_with("reshard to ")) last_error.reset();
    if (checkpoint != nullptr && moved != nullptr) {
      record.meta_revision = meta_revision;
      before = take_over(record, moved, std::move(plan));
    }
    changed.notify_all();
  }
  if (listener != nullptr && checkpoint != nullptr) {
    listener->checkpoint_changed(job->name(), checkpoint->name());
  }
  spdlog::info("job {}: revision {} in force, layout {}, current {}", job->name(), next.revision,
               wanted.name(), next.current.value_or("none"));
  if (before != nullptr) remove_replaced(record, *before);
  return true;
}

Result<> Job::Impl::put_stored(CheckpointRecord& record, const StoredState& moved,
                               const PlanTexts& plan, JobDecision& decision) {
  ++record.generation;
  // Others may think that they lead, and write their own: the name is this decision's alone.
  PTC_TRY(auto unique, random_id());
  record.stored = fmt::format("stored-{}-{}.json", record.generation, unique);
  const std::string plan_file = plan_file_of(record.stored),
                    directory = checkpoint_dir(record.id) + "/";
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + record.stored, moved.to_text()));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + plan_file, plan.to_text()));
  if (services.cluster != nullptr) {
    PTC_TRY(give_files(record.id, {record.stored, plan_file}, moved));
  }
  if (services.cluster != nullptr) record.nodes = moved.nodes;
  decision.put(record.checkpoint->name(), record);
  return ok();
}

void Job::Impl::set_last_plan(PlanTexts plan, int64_t decided) {
  last_plan = std::move(plan);
  last_reshard = LastReshard::of(last_plan);
  last_plan_revision = decided;
}

std::shared_ptr<const StoredState> Job::Impl::take_over(const CheckpointRecord& record,
                                                        std::shared_ptr<const StoredState> moved,
                                                        PlanTexts plan) {
  std::shared_ptr<const StoredState> before = record.checkpoint->stored();
  record.checkpoint->replace_stored(std::move(moved));
  checkpoints[record.checkpoint->name()] = record;
  set_last_plan(std::move(plan), record.meta_revision);
  return before;
}

void Job::Impl::remove_replaced(const CheckpointRecord& record, const StoredState& before) {
  confirm(record);
  remove_images_not_in(before, *record.checkpoint->stored());
  (void)remove_stale_files(record.id, record.stored);
}

bool Job::Impl::remove_superfluous(const std::stop_token& stop) {
  std::vector<std::pair<std::string, std::string>> surplus;  // name and id
  {
    std::lock_guard lock(mutex);
    // Pinned ones stay besides those that `keep` counts.
    std::set<std::pair<int64_t, std::string>> by_sequence;
    for (const auto& [name, record] : checkpoints)
      if (!record.pinned) by_sequence.emplace(record.sequence, name);
    if (saved.layout.keep == 0 || by_sequence.size() <= saved.layout.keep) return true;
    const size_t too_many = by_sequence.size() - saved.layout.keep;
    // The newest stays, also while it is not current yet (or cannot become so).
    by_sequence.erase(std::prev(by_sequence.end()));
    for (const auto& [sequence, name] : by_sequence) {
      if (surplus.size() == too_many) break;
      if (in_force.current != name) surplus.emplace_back(name, checkpoints.find(name)->second.id);
    }
  }
  for (const auto& [name, id] : surplus) {
    if (is_used_elsewhere(id, stop)) continue;
    Result<> removed = remove(name, /*only_unused=*/true);
    if (removed.has_error() && removed.error().code() != Code::kBusy)
      spdlog::warn("job {}: checkpoint {} is one too many, but: {}", job->name(), name,
                   removed.error().message());
  }
  return surplus.empty();
}

Result<> Job::Impl::remove(const std::string& name, bool only_unused) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  JobDecision decision(job->name());
  {
    std::lock_guard lock(mutex);
    auto it = checkpoints.find(name);
    const auto unreadable = damaged.find(name);
    if (it == checkpoints.end() && (unreadable == damaged.end() || only_unused))
      return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
    record = it != checkpoints.end() ? it->second : unreadable->second.record;
    if (record.pinned)
      return Error(Code::kPermissionDenied,
                   fmt::format("checkpoint {} is pinned; ptc pin {}/{} --remove takes that off",
                               name, job->name(), name),
                   EPERM);
    if (only_unused && (record.checkpoint->in_use() || in_force.current == name))
      return make_error(Code::kBusy, "checkpoint {} is being read", name);
    next = in_force;
    decision.rests_on(in_force);
    activities.stop_with(name);
  }
  decision.rests_on(name, record);
  decision.remove(name, record);
  const bool was_current = next.current == name;
  if (was_current) {
    next.current.reset();
    decision.put(next);
  }
  PTC_TRY(int64_t meta_revision, commit_fenced(std::move(decision)));
  {
    std::lock_guard lock(mutex);
    if (record.checkpoint != nullptr) services.removed->note(record.id, record.checkpoint);
    checkpoints.erase(name);
    if (const auto one = damaged.find(name);
        one != damaged.end() && one->second.record.id == record.id)
      damaged.erase(one);
    if (was_current) in_force = {next, meta_revision};
    failed.reset();
    if (listener != nullptr) listener->names_changed();
    changed.notify_all();
  }
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  if (record.checkpoint != nullptr) remove_files_of(record);
  else {
    PTC_TRY(remove_damaged(record.id));
  }
  // Of a store that is alone: it is carried out. (Else at the next start.)
  if (services.cluster == nullptr)
    (void)services.meta->commit({.deletes = {removed_checkpoint_key(record.id)}});
  spdlog::info("job {}: checkpoint {} removed", job->name(), name);
  return ok();
}

}  // namespace ptc
