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

std::optional<StepPool::Time> Job::Impl::carry_on(const std::stop_token& stop) {
  using Kind = JobStep::Kind;
  const bool alone = place.alone();
  Round round;
  Attempt attempt;
  for (;; round.began = true) {
    if (stop.stop_requested() && !round.leads) return std::nullopt;
    const JobStep step =
        next_step(*knowledge.now(), alone, !shelf.empty(), round, std::chrono::steady_clock::now());
    switch (step.kind) {
      case Kind::kWait:
        return step.until;
      case Kind::kLead:
        report_missing_images();
        round.leads = begin(attempt);
        round.another_leads = !round.leads;
        break;
      case Kind::kSettleNewest:
        attempt.go_on([&] { return settle_newest(attempt); });
        round.newest_is_brought = true;
        break;
      case Kind::kSettleOlder:
        attempt.go_on([&] { return settle_older(*step.older, attempt); });
        round.brought.insert(step.older->id);
        break;
      case Kind::kGiveBack:
        end(attempt);
        round.leads = false;
        break;
      case Kind::kTrim:
        remove_superfluous(step.too_many, stop);
        round.trimmed = true;
        break;
      case Kind::kDropParts:
        drop_undecided_parts();
        round.looked_at_parts = true;
        break;
    }
    round.gives_back = attempt.result.has_error();
  }
}

bool Job::Impl::begin(Attempt& attempt) {
  constexpr auto kAnotherLeads = std::chrono::milliseconds(100);
  attempt.leadership = Leadership::take(place);
  // What was decided until then is known from here on.
  if (attempt.leadership && !place.alone() && sync().has_error()) attempt.leadership.reset();
  return knowledge.update([&](KnownJob& known) {
    if (!attempt.leadership) {
      known.others_first = std::chrono::steady_clock::now() + kAnotherLeads;
      return false;
    }
    if (const CheckpointRecord* newest = known.latest()) attempt.newest = newest->checkpoint;
    attempt.wanted = known.saved.layout;
    attempt.revision = known.saved.revision;
    known.look_anyway = false;
    known.leads = true;
    return true;
  });
}

void Job::Impl::end(Attempt& attempt) {
  const std::string newest = attempt.newest != nullptr ? attempt.newest->name() : "";
  attempt.leadership.reset();
  if (attempt.result.has_error() && attempt.newest != nullptr &&
      !knowledge.now()->has(*attempt.newest))
    attempt.result = make_error(Code::kCancelled, "checkpoint {} was removed", newest);
  const Error* error = attempt.result.has_error() ? &attempt.result.error() : nullptr;
  const Outcome outcome = outcome_of(error, place.alone());
  knowledge.update([&](KnownJob& known) {
    note_outcome(known, outcome, error, place.alone(), place.name, attempt.wanted.spec.name(),
                 {attempt.revision, newest}, std::chrono::steady_clock::now());
    if (attempt.activity && outcome == Outcome::kDone) ++known.counts.reshards_done;
    if (attempt.activity && outcome == Outcome::kAbandoned) ++known.counts.reshards_abandoned;
    known.running_plan.reset();
    attempt.activity.reset();
  });
  attempt.result = ok();
  knowledge.tell();
}

std::vector<std::string> Job::Impl::nodes_in_service() const {
  if (place.alone()) return {};
  return knowledge.now()->in_service(services.cluster->alive());
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

Result<> Job::Impl::settle_newest(Attempt& attempt) {
  const CheckpointRef& checkpoint = attempt.newest;
  const Layout& wanted = attempt.wanted;
  std::shared_ptr<const StoredState> moved;
  Fences fences;
  CheckpointRecord record;
  if (checkpoint != nullptr && (checkpoint->stored()->spec != wanted.spec || !place.alone())) {
    // Before the look at the revision: an edit that comes after that finds it, and stops it.
    attempt.activity = activities.begin({Activity::Kind::kReshard, checkpoint->name(),
                                         checkpoint->stored()->spec.name(), wanted.spec.name()});
    const JobKnowledge::Snapshot known = knowledge.now();
    const CheckpointRecord* newest = known->latest();
    if (known->saved.revision != attempt.revision || newest == nullptr ||
        newest->checkpoint != checkpoint) {
      attempt.activity.reset();
      return Error(Code::kCancelled, "a newer edit came");
    }
    record = *newest;
    if (attempt.activity->stop_token().stop_requested())
      return Error(Code::kCancelled, "shutting down");
    PTC_TRY(auto state, wanted_state(*checkpoint, wanted, nodes_in_service()));
    PTC_TRY(moved, move_or_repair(record, state, attempt, fences));
  } else if (knowledge.now()->settled()) {
    return ok();
  }
  // All is where it shall be.
  if (moved == nullptr && checkpoint != nullptr && knowledge.now()->settled()) {
    attempt.activity.reset();
    return ok();
  }
  Result<bool> flipped = flip(attempt, moved, fences);
  // Superseded at the last moment, or not written down: what was made for it goes.
  if (moved != nullptr && flipped.has_error())
    undo_unless_decided(flipped.error(), record, moved, attempt.epoch());
  else if (moved != nullptr && !flipped.value()) give_up(record, *moved, attempt.epoch());
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
                                    std::shared_ptr<const StoredState> made, int64_t epoch) {
  if (error.code() != Code::kInDoubt) return give_up(record, *made, epoch);
  doubts.add([this, record, made, epoch] {
    give_up(record, *made, epoch);
  });  // but for what is named by then
  housekeeping.wake();
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move_or_repair(const CheckpointRecord& record,
                                                                     const WantedState& wanted,
                                                                     Attempt& attempt,
                                                                     Fences& fences) {
  auto moved = move(record, wanted, attempt, fences);
  if (moved.has_value() || moved.error().code() != Code::kCorrupt) return moved;
  Result<Findings> found = repair(record.checkpoint->name());
  if (found.has_error() || found.value().replaceable.empty()) return moved;
  return make_error(Code::kCancelled,
                    "damaged copies were taken out: what is made of the others comes next");
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move(const CheckpointRecord& record,
                                                           const WantedState& wanted,
                                                           Attempt& attempt, Fences& fences) {
  Activity& activity = *attempt.activity;
  auto start = std::chrono::steady_clock::now();
  const Checkpoint& checkpoint = *record.checkpoint;
  std::shared_ptr<const StoredState> stored = record.where;
  PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
  if (change->nothing() && stored->spec == wanted.spec) return std::shared_ptr<const StoredState>();
  const PlanReport report(job->name(), services.node, checkpoint, *stored, wanted.spec, *change);
  auto show = [&](std::string_view state, double seconds) {
    knowledge.update([texts = std::make_shared<const PlanTexts>(report.texts(state, seconds))](
                         KnownJob& known) { known.running_plan = texts; });
  };
  show("running", 0);
  const TransferPlan::Totals totals = change->transfers.totals;
  activity.begin("moving", totals.total_bytes - totals.kept_bytes);

  PTC_TRY(auto parts,
          make_parts(record, *stored, wanted, *change, activity, fences, attempt.epoch()));
  Result<> made = compare_parts(record, *stored, *change, parts, /*known=*/true);
  Result<std::shared_ptr<const StoredState>> moved = Error(Code::kInternal, "");
  if (made.has_value()) {
    Result<std::vector<StoredImage>> images = compose(checkpoint, *stored, *change, parts);
    if (images.has_value()) moved = checkpoint.make_stored(wanted.spec, std::move(images).value());
    else moved = std::move(images).error();
    if (moved.has_error()) made = moved.error();
  }
  if (made.has_error()) {
    give_up(record, parts, attempt.epoch());
    return std::move(made).error();
  }
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  activity.begin("committing");
  show("done", seconds.count());
  return moved;
}

Result<bool> Job::Impl::flip(const Attempt& attempt, std::shared_ptr<const StoredState> moved,
                             const Fences& fences) {
  const CheckpointRef& checkpoint = attempt.newest;
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  KnownJob::PlanRef plan;
  JobDecision decision(job->name());
  {
    const JobKnowledge::Snapshot known = knowledge.now();
    const CheckpointRecord* newest = known->latest();
    if (known->saved.revision != attempt.revision ||
        (newest != nullptr ? newest->checkpoint : nullptr) != checkpoint)
      return false;
    if (newest != nullptr) record = *newest;
    next = known->in_force;
    if (moved != nullptr) plan = known->running_plan;
    decision.rests_on_keys(fences);
    attempt.leadership->name_in(decision);
    decision.rests_on(known->saved);
    decision.rests_on(known->in_force);
  }
  next.spec = attempt.wanted.spec;
  next.revision = attempt.revision;
  next.current.reset();
  if (checkpoint != nullptr) {
    next.current = checkpoint->name();
    decision.rests_on(checkpoint->name(), record);
    if (moved != nullptr) {
      PTC_TRY(put_stored(record, moved, *plan, decision));
    }
  }
  decision.put(next);
  PTC_TRY(int64_t meta_revision, commit_fenced(std::move(decision)));
  std::shared_ptr<const StoredState> before;
  knowledge.update([&](KnownJob& known) {
    known.in_force = {next, meta_revision};
    known.failed.reset();
    known.forget_error("reshard to ");
    if (checkpoint != nullptr && moved != nullptr) {
      record.meta_revision = meta_revision;
      before = take_over(known, record, plan);
    }
  });
  knowledge.tell();
  if (listener != nullptr && checkpoint != nullptr) {
    listener->checkpoint_changed(job->name(), checkpoint->name());
  }
  spdlog::info("job {}: revision {} in force, layout {}, current {}", job->name(), next.revision,
               next.spec.name(), next.current.value_or("none"));
  if (before != nullptr) remove_replaced(record, *before);
  return true;
}

Result<> Job::Impl::put_stored(CheckpointRecord& record, std::shared_ptr<const StoredState> moved,
                               const PlanTexts& plan, JobDecision& decision) {
  ++record.generation;
  // Others may think that they lead, and write their own: the name is this decision's alone.
  PTC_TRY(auto unique, random_id());
  record.stored = fmt::format("stored-{}-{}.json", record.generation, unique);
  const std::string plan_file = plan_file_of(record.stored),
                    directory = checkpoint_dir(record.id) + "/";
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + record.stored, moved->to_text()));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + plan_file, plan.to_text()));
  if (services.cluster != nullptr) {
    PTC_TRY(give_files(record.id, {record.stored, plan_file}, *moved));
  }
  if (services.cluster != nullptr) record.nodes = moved->nodes;
  record.where = std::move(moved);
  decision.put(record.checkpoint->name(), record);
  return ok();
}

std::shared_ptr<const StoredState> Job::Impl::take_over(KnownJob& known,
                                                        const CheckpointRecord& record,
                                                        KnownJob::PlanRef plan) {
  std::shared_ptr<const StoredState> before = record.checkpoint->stored();
  record.checkpoint->replace_stored(record.where);
  known.take_over(record, std::move(plan));
  return before;
}

void Job::Impl::remove_replaced(const CheckpointRecord& record, const StoredState& before) {
  confirm(record);
  remove_images_not_in(before, *record.checkpoint->stored());
  (void)remove_stale_files(record.id, record.stored);
}

void Job::Impl::remove_superfluous(const std::vector<std::pair<std::string, std::string>>& surplus,
                                   const std::stop_token& stop) {
  for (const auto& [name, id] : surplus) {
    if (is_used_elsewhere(id, stop)) continue;
    Result<> removed = remove(name, /*only_unused=*/true);
    if (removed.has_error() && removed.error().code() != Code::kBusy)
      spdlog::warn("job {}: checkpoint {} is one too many, but: {}", job->name(), name,
                   removed.error().message());
  }
}

Result<> Job::Impl::remove(const std::string& name, bool only_unused) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  JobDecision decision(job->name());
  {
    const JobKnowledge::Snapshot known = knowledge.now();
    const CheckpointRecord* it = known->record_of(name);
    if (it == nullptr || (it->checkpoint == nullptr && only_unused))
      return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
    record = *it;
    if (record.pinned)
      return Error(Code::kPermissionDenied,
                   fmt::format("checkpoint {} is pinned; ptc pin {}/{} --remove takes that off",
                               name, job->name(), name),
                   EPERM);
    if (only_unused && (record.checkpoint->in_use() || known->in_force.current == name))
      return make_error(Code::kBusy, "checkpoint {} is being read", name);
    next = known->in_force;
    decision.rests_on(known->in_force);
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
  knowledge.update([&](KnownJob& known) {
    if (record.checkpoint != nullptr) services.removed->note(record.id, record.checkpoint);
    known.checkpoints.erase(name);
    if (const auto one = known.damaged.find(name);
        one != known.damaged.end() && one->second.record.id == record.id)
      known.damaged.erase(one);
    if (was_current) known.in_force = {next, meta_revision};
    known.failed.reset();
    if (listener != nullptr) listener->names_changed();
  });
  knowledge.tell();
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
