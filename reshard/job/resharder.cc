#include "reshard/job/resharder.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "reshard/job/wanted_states.h"
#include "reshard/move/change.h"
#include "reshard/move/plan_report.h"
#include "reshard/move/space.h"
#include "store/base/mutex.h"

namespace ptc {

void Resharder::start(StepPool& pool) {
  loop_.start(pool, [this](const std::stop_token& stop) { return carry_on(stop); });
}

void Resharder::stop() { loop_.stop(); }

void Resharder::wake() { loop_.wake(); }

std::optional<StepPool::Time> Resharder::carry_on(const std::stop_token& stop) {
  using Kind = JobStep::Kind;
  Round round;
  Attempt attempt;
  for (;; round.began = true) {
    if (stop.stop_requested() && !round.leads) return std::nullopt;
    const JobStep step = next_step(*uses_.knowledge.now(), shares_bytes_, !uses_.shelf.empty(),
                                   round, std::chrono::steady_clock::now());
    switch (step.kind) {
      case Kind::kWait:
        return step.until;
      case Kind::kLead:
        // Where not all of it is said, that others have looked says nothing of these.
        round.leads = begin(attempt, uses_.decisions.report_missing_images());
        round.another_leads = !round.leads;
        break;
      case Kind::kSettleNewest:
        round.newest_is_brought = true;
        attempt.go_on([&]() -> Result<> {
          Result<> settled = settle_newest(attempt);
          if (!lacks_room_of_older(attempt, settled, round)) return settled;
          round.newest_is_brought = false;
          round.newest_lacks_room = true;
          return ok();
        });
        break;
      case Kind::kMakeRoom:
        // What stays for now shows in whether there is room.
        if (const Result<> trimmed = trim_all(attempt); trimmed.has_error())
          look_again_at_copies(trimmed.error());
        round.room_is_made = true;
        break;
      case Kind::kSettleOlder:
        attempt.go_on([&] { return settle_older(*step.older, attempt); });
        round.brought.insert(step.older->id);
        break;
      case Kind::kGiveBack: {
        const Result<> trimmed = attempt.result.has_error() ? ok() : trim_all(attempt);
        // Before it is said that nobody leads: who waits for that finds what is still to be done.
        if (trimmed.has_error()) look_again_at_copies(trimmed.error());
        else copies_tried_again_ = {};
        end(attempt);
        round.leads = false;
        break;
      }
      case Kind::kTrim:
        remove_superfluous(step.too_many, stop);
        round.trimmed = true;
        break;
      case Kind::kDropParts:
        drop_undecided_parts();
        round.looked_at_parts = true;
        break;
    }
    round.gives_back = !attempt.goes_on();
  }
}

/// The newest has no room in devices, and what older ones have there has not left yet.
bool Resharder::lacks_room_of_older(const Attempt& attempt, const Result<>& settled,
                                    const Round& round) const {
  return settled.has_error() && settled.error().code() == Code::kNoSpace &&
         attempt.wanted.in_devices && !round.newest_lacks_room &&
         is_older_in_devices(*uses_.knowledge.now());
}

/// So this node has nothing to do, unless there is more by now.
bool Resharder::another_has_looked() {
  const JobKnowledge::Snapshot known = uses_.knowledge.now();
  if (!known->settled() || known->failed) return false;
  const std::string view = known->view();
  if (!Leadership::has_anybody_looked(uses_.place, view)) return false;
  const bool done = uses_.knowledge.update([&](KnownJob& now) {
    if (!now.settled() || now.failed || now.view() != view) return false;
    now.look_anyway = false;
    return true;
  });
  if (done) uses_.knowledge.tell();
  return done;
}

bool Resharder::begin(Attempt& attempt, bool others_know_all) {
  constexpr auto kAnotherLeads = std::chrono::milliseconds(100),
                 kOfEach = std::chrono::milliseconds(1);
  if (others_know_all && another_has_looked()) return false;
  attempt.leadership = Leadership::take(uses_.place);
  // What was decided until then is known from here on.
  if (attempt.leadership) {
    const Result<Followed> followed = uses_.hear_others();
    if (followed.has_error() || followed.value().lacking) attempt.leadership.reset();
  }
  return uses_.knowledge.update([&](KnownJob& known) {
    if (!attempt.leadership) {
      // All that wait ask again and again: the more they are, the less often each.
      known.others_first =
          std::chrono::steady_clock::now() +
          std::max<KnownJob::Clock::duration>(kAnotherLeads, known.alive.size() * kOfEach);
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

void Resharder::end(Attempt& attempt) {
  const std::string newest = attempt.newest != nullptr ? attempt.newest->name() : "";
  if (const JobKnowledge::Snapshot known = uses_.knowledge.now();
      attempt.result.has_value() && known->settled() && !known->failed && !known->look_anyway &&
      known->saved.revision == attempt.revision)
    attempt.leadership->has_looked(known->view());
  attempt.leadership.reset();
  if (attempt.result.has_error() && attempt.newest != nullptr &&
      !uses_.knowledge.now()->has(*attempt.newest))
    attempt.result = make_error(Code::kCancelled, "checkpoint {} was removed", newest);
  const Error* error = attempt.result.has_error() ? &attempt.result.error() : nullptr;
  const Outcome outcome = outcome_of(error, shares_bytes_);
  uses_.knowledge.update([&](KnownJob& known) {
    note_outcome(known, outcome, error, shares_bytes_, uses_.place.name, attempt.wanted.spec.name(),
                 {attempt.revision, newest}, std::chrono::steady_clock::now());
    if (attempt.activity && outcome == Outcome::kDone) ++known.counts.reshards_done;
    if (attempt.activity && outcome == Outcome::kAbandoned) ++known.counts.reshards_abandoned;
    known.running_plan.reset();
    attempt.activity.reset();
  });
  attempt.result = ok();
  attempt.plans.clear();
  uses_.knowledge.tell();
}

Result<> Resharder::settle_newest(Attempt& attempt) {
  const CheckpointRef& checkpoint = attempt.newest;
  const Layout& wanted = attempt.wanted;
  std::shared_ptr<const StoredState> moved;
  Fences fences;
  CheckpointRecord record;
  if (checkpoint != nullptr && (checkpoint->stored()->spec != wanted.spec || shares_bytes_ ||
                                uses_devices(wanted, *checkpoint->stored()))) {
    // Before the look at the revision: an edit that comes after that finds it, and stops it.
    attempt.activity =
        uses_.activities.begin({Activity::Kind::kReshard, checkpoint->name(),
                                checkpoint->stored()->spec.name(), wanted.spec.name()});
    // A snapshot keeps the images of all checkpoints: none is held while bytes are moved.
    if (const JobKnowledge::Snapshot known = uses_.knowledge.now();
        known->saved.revision == attempt.revision && known->latest() != nullptr &&
        known->latest()->checkpoint == checkpoint)
      record = *known->latest();
    if (record.checkpoint == nullptr) {
      attempt.activity.reset();
      return Error(Code::kCancelled, "a newer edit came");
    }
    if (attempt.activity->stop_token().stop_requested())
      return Error(Code::kCancelled, "shutting down");
    PTC_TRY(auto state, wanted_state(uses_.place, *checkpoint, wanted,
                                     uses_.knowledge.now()->followed_in_service()));
    PTC_TRY(moved, move_or_repair(record, state, attempt, fences));
  } else if (uses_.knowledge.now()->settled()) {
    return ok();
  }
  // All is where it shall be.
  if (moved == nullptr && checkpoint != nullptr && uses_.knowledge.now()->settled()) {
    attempt.activity.reset();
    return ok();
  }
  std::string stored_file;
  Result<bool> flipped = flip(attempt, record, moved, fences, stored_file);
  // Superseded at the last moment, or not written down: what was made for it goes.
  if (moved != nullptr && flipped.has_error())
    undo_unless_decided(flipped.error(), record, moved, attempt.epoch(), stored_file);
  else if (moved != nullptr && !flipped.value())
    uses_.maker.give_up(record, *moved, attempt.epoch(), stored_file);
  if (flipped.has_error()) return std::move(flipped).error();
  if (moved != nullptr && !flipped.value()) return Error(Code::kCancelled, "a newer edit came");
  return ok();
}

void Resharder::undo_unless_decided(const Error& error, const CheckpointRecord& record,
                                    std::shared_ptr<const StoredState> made, int64_t epoch,
                                    const std::string& stored_file) {
  if (error.code() != Code::kInDoubt) return uses_.maker.give_up(record, *made, epoch, stored_file);
  uses_.doubts.add([this, record, made, epoch, stored_file] {
    uses_.maker.give_up(record, *made, epoch, stored_file);
  });  // but for what is named by then
  uses_.settle_doubts();
}

Result<std::shared_ptr<const StoredState>> Resharder::move_or_repair(const CheckpointRecord& record,
                                                                     const WantedState& wanted,
                                                                     Attempt& attempt,
                                                                     Fences& fences) {
  constexpr int kMostInARow = 3;  // then what is found is not what is wrong
  constexpr int kTriesForSpace = 6;
  constexpr auto kFreed = std::chrono::milliseconds(300);
  auto moved = move(record, wanted, attempt, fences);
  // What was removed a moment ago, perhaps to make this fit, is given back bit by bit. Where older
  // ones are to leave devices first, that is not waited for.
  const bool waits = record.checkpoint != attempt.newest || !attempt.wanted.in_devices ||
                     !is_older_in_devices(*uses_.knowledge.now());
  for (int tries = 1; waits && moved.has_error() && moved.error().code() == Code::kNoSpace &&
                      tries < kTriesForSpace && !attempt.activity->stop_token().stop_requested();
       ++tries) {
    std::this_thread::sleep_for(kFreed);
    moved = move(record, wanted, attempt, fences);
  }
  if (moved.has_value()) damaged_in_a_row_ = 0;
  if (moved.has_value() || moved.error().code() != Code::kCorrupt) return moved;
  Result<Findings> found =
      uses_.mender.repair(record.checkpoint->name(), attempt.activity->stop_token());
  if (found.has_error() && found.error().code() == Code::kUnavailable)
    return std::move(found).error();  // who has it right does not answer now
  if (found.has_error() || found.value().replaceable.empty()) return moved;
  if (++damaged_in_a_row_ > kMostInARow) {
    damaged_in_a_row_ = 0;
    return moved;
  }
  return make_error(Code::kCancelled,
                    "damaged copies were taken out: what is made of the others comes next");
}

Result<std::shared_ptr<const StoredState>> Resharder::move(const CheckpointRecord& record,
                                                           const WantedState& wanted,
                                                           Attempt& attempt, Fences& fences) {
  Activity& activity = *attempt.activity;
  auto start = std::chrono::steady_clock::now();
  const Checkpoint& checkpoint = *record.checkpoint;
  std::shared_ptr<const StoredState> stored = record.where;
  PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
  attempt.plans.push_back(change);
  if (change->nothing() && stored->spec == wanted.spec) return std::shared_ptr<const StoredState>();
  const PlanReport report(uses_.place.name, uses_.place.services.node, checkpoint, *stored,
                          wanted.spec, *change);
  auto show = [&](std::string_view state, double seconds) {
    uses_.knowledge.update([texts = std::make_shared<const PlanTexts>(report.texts(
                                state, seconds))](KnownJob& known) { known.running_plan = texts; });
  };
  show("running", 0);
  const TransferPlan::Totals totals = change->transfers.totals;
  activity.begin("moving", totals.total_bytes - totals.kept_bytes);

  PTC_TRY(check_devices_have_room(*change, *stored));
  PTC_TRY(auto parts, uses_.maker.make_all(record, *stored, wanted, *change, activity, fences,
                                           attempt.epoch()));
  Result<> made =
      uses_.maker.compare(record, *stored, *change, parts, /*known=*/true, activity.stop_token());
  Result<std::shared_ptr<const StoredState>> moved = Error(Code::kInternal, "");
  if (made.has_value()) {
    Result<std::vector<StoredImage>> images =
        uses_.maker.compose(checkpoint, *stored, *change, parts);
    if (images.has_value()) moved = checkpoint.make_stored(wanted.spec, std::move(images).value());
    else moved = std::move(images).error();
    if (moved.has_error()) made = moved.error();
  }
  if (made.has_error()) {
    uses_.maker.give_up(record, parts, attempt.epoch());
    return std::move(made).error();
  }
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  activity.begin("committing");
  show("done", seconds.count());
  return moved;
}

/// Before anything moves: of several devices one could be full last.
Result<> Resharder::check_devices_have_room(const ChangePlan& change,
                                            const StoredState& stored) const {
  BytesByPlace needed;
  add_bytes(change, stored, needed);
  std::erase_if(needed, [](const auto& one) { return one.first.memory.is_host(); });
  if (needed.empty()) return ok();
  return check_space(*uses_.place.services.cluster, *uses_.place.services.images, needed);
}

Result<bool> Resharder::flip(const Attempt& attempt, const CheckpointRecord& planned,
                             std::shared_ptr<const StoredState> moved, const Fences& fences,
                             std::string& stored_file) {
  const CheckpointRef& checkpoint = attempt.newest;
  const auto is_newest = [&](const KnownJob& known) {
    const CheckpointRecord* newest = known.latest();
    if ((newest != nullptr ? newest->checkpoint : nullptr) != checkpoint) return false;
    // What was damaged may have been taken out of it since, and shall not come back.
    return moved == nullptr || newest->stored == planned.stored;
  };
  std::optional<Result<Decisions::NewStored>> written;
  KnownJob::PlanRef plan;
  if (moved != nullptr) {
    const JobKnowledge::Snapshot known = uses_.knowledge.now();
    if (known->saved.revision != attempt.revision || !is_newest(*known)) return false;
    plan = known->running_plan;
    written = uses_.decisions.write_stored(*known->latest(), moved, *plan);
    if (written->has_value()) stored_file = written->value().file;
  }
  MutexLock change(uses_.decisions.mutex());
  CheckpointRecord record;
  InForce next;
  const auto flips = [&](JobUpdate& update) -> Result<bool> {
    update.rests_on(fences);
    if (update.saved().revision != attempt.revision) return false;
    // A newer one that is committed in place puts what is in force, and that is read; after any
    // other it is looked for what is to do once more.
    if (!is_newest(update.glance())) return false;
    next = update.in_force();
    next.spec = attempt.wanted.spec;
    next.revision = attempt.revision;
    next.current.reset();
    if (checkpoint != nullptr) {
      next.current = checkpoint->name();
      record = *update.checkpoint(checkpoint->name());  // which is_newest() has found
      if (written) {
        PTC_TRY(auto stored, *std::move(written));
        Decisions::put_stored(record, std::move(stored), update);
      }
    }
    update.put(next);
    return true;
  };
  PTC_TRY(int64_t meta_revision, uses_.decisions.update_as(*attempt.leadership, flips));
  if (meta_revision == 0) return false;
  std::shared_ptr<const StoredState> before;
  uses_.knowledge.update([&](KnownJob& known) {
    known.in_force = {next, meta_revision};
    known.failed.reset();
    known.forget_error("reshard to ");
    if (checkpoint != nullptr && moved != nullptr) {
      record.meta_revision = meta_revision;
      before = Decisions::take_over(known, record, plan);
    }
  });
  uses_.knowledge.tell();
  if (uses_.place.listener != nullptr && checkpoint != nullptr) {
    uses_.place.listener->checkpoint_changed(uses_.place.name, checkpoint->name());
  }
  spdlog::info("job {}: revision {} in force, layout {}, current {}", uses_.place.name,
               next.revision, next.spec.name(), next.current.value_or("none"));
  if (before != nullptr) uses_.decisions.remove_replaced(record, *before);
  return true;
}

Result<> Resharder::settle_older(const CheckpointRecord& record, Attempt& attempt) {
  const std::string name = record.checkpoint->name();
  const std::string spec = record.where->spec.name();
  // Before the look at the revision, as in settle_newest().
  attempt.activity = uses_.activities.begin({Activity::Kind::kReshard, name, spec, spec});
  if (uses_.knowledge.now()->saved.revision != attempt.revision)
    return Error(Code::kCancelled, "a newer edit came");
  Result<> settled = settle_one(record, attempt);
  if (settled.has_error() && !uses_.knowledge.now()->has(*record.checkpoint))
    return ok();  // removed
  if (settled.has_error()) return std::move(settled).error().with_context("checkpoint " + name);
  return ok();
}

Result<> Resharder::settle_one(CheckpointRecord record, Attempt& attempt) {
  if (attempt.activity->stop_token().stop_requested())
    return Error(Code::kCancelled, "shutting down");
  PTC_TRY(auto wanted, where_it_is(uses_.place, record, attempt.wanted.replicas,
                                   uses_.knowledge.now()->followed_in_service()));
  Fences fences;
  PTC_TRY(auto moved, move_or_repair(record, wanted, attempt, fences));
  if (moved == nullptr) return ok();

  const std::string name = record.checkpoint->name();
  std::string stored_file;
  auto decide = [&]() -> Result<std::shared_ptr<const StoredState>> {
    const KnownJob::PlanRef plan = uses_.knowledge.now()->running_plan;
    Result<Decisions::NewStored> written = uses_.decisions.write_stored(record, moved, *plan);
    if (written.has_value()) stored_file = written.value().file;
    const auto settles = [&](JobUpdate& update) -> Result<bool> {
      update.rests_on(fences);
      const CheckpointRecord* known = update.checkpoint(name);
      if (known == nullptr || known->stored != record.stored)
        return Error(Code::kCancelled, "it has changed meanwhile");
      record = *known;  // it may be pinned by now
      PTC_TRY(auto stored, std::move(written));
      Decisions::put_stored(record, std::move(stored), update);
      return true;
    };
    MutexLock change(uses_.decisions.mutex());
    PTC_TRY(record.meta_revision, uses_.decisions.update_as(*attempt.leadership, settles));
    return uses_.knowledge.update(
        [&](KnownJob& known) { return Decisions::take_over(known, record, plan); });
  };
  Result<std::shared_ptr<const StoredState>> before = decide();
  if (before.has_error()) {
    undo_unless_decided(before.error(), record, moved, attempt.epoch(), stored_file);
    return std::move(before).error();
  }
  if (uses_.place.listener != nullptr)
    uses_.place.listener->checkpoint_changed(uses_.place.name, name);
  uses_.decisions.remove_replaced(record, *before.value());
  return ok();
}

void Resharder::remove_superfluous(const std::vector<std::pair<std::string, std::string>>& surplus,
                                   const std::stop_token& stop) {
  for (const auto& [name, id] : surplus) {
    if (is_used_elsewhere(id, stop)) continue;
    Result<> removed = uses_.remove_unused(name, id);
    if (removed.has_error() && removed.error().code() != Code::kBusy &&
        removed.error().code() != Code::kNotFound)
      spdlog::warn("job {}: checkpoint {} is one too many, but: {}", uses_.place.name, name,
                   removed.error().message());
  }
}

bool Resharder::is_used_elsewhere(const std::string& id, const std::stop_token& stop) {
  const auto answers = ask_whether_open(*uses_.place.services.cluster, uses_.peers.others(),
                                        uses_.place.which(), id, stop);
  return std::any_of(answers.begin(), answers.end(), [](const Result<std::string>& answer) {
    return answer.has_error() || answer.value() == "yes";
  });
}

void Resharder::drop_undecided_parts() {
  std::map<std::string, int64_t> parts = uses_.shelf.epochs();  // by id
  if (parts.empty()) return;
  {
    const JobKnowledge::Snapshot known = uses_.knowledge.now();
    std::erase_if(parts, [&](const auto& part) {  // a commit decides without leading
      return known->find_id(part.first) == nullptr;
    });
  }
  if (parts.empty()) return;
  Result<std::optional<MetaEntry>> leader =
      uses_.place.services.meta->get(uses_.place.leader_key());
  if (leader.has_error()) return;
  if (leader.value())
    std::erase_if(parts, [&](const auto& part) { return part.second == leader.value()->revision; });
  // Who asked for the rest leads no more: what it has not decided by now it never will.
  if (parts.empty()) return;
  const Result<Followed> followed = uses_.hear_others();
  if (followed.has_error()) return;
  for (const auto& [id, epoch] : parts)
    if (!followed.value().without.contains(id)) uses_.shelf.drop(id, epoch);
}

}  // namespace ptc
