// The background thread of a job: brings the newest checkpoint into the layout wanted, then flips.
#include <spdlog/spdlog.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <unordered_set>

#include "reshard/job/change.h"
#include "reshard/job/job_impl.h"
#include "store/base/file.h"
#include "store/base/size_text.h"

namespace ptc {

void Job::Impl::reshard_loop(std::stop_token stop) {
  // Checkpoints that are too many but in use are looked at again after this time.
  constexpr auto kRetryRemoval = std::chrono::seconds(2);
  constexpr auto kTryAgain = std::chrono::seconds(1);
  constexpr auto kAnotherLeads = std::chrono::milliseconds(100);
  while (!stop.stop_requested()) {
    CheckpointRef checkpoint;
    Layout wanted;
    int64_t wanted_revision = 0;
    bool work = false;
    {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, stop, kRetryRemoval, [&] { return !settled() || look; });
      auto waited = [&] { return std::chrono::steady_clock::now() >= others_first; };
      while (services.cluster != nullptr && !stop.stop_requested() && !waited()) {
        const auto time = others_first;  // a copy: it is read without the lock
        changed.wait_until(lock, stop, time, waited);
      }
      work = !settled() || look;
      if (const CheckpointRecord* record = latest()) checkpoint = record->checkpoint;
      wanted = layout;
      wanted_revision = revision;
    }
    if (stop.stop_requested()) return;
    if (work) report_missing_images();
    if (work && !lead()) {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, stop, kAnotherLeads, [] { return false; });
      continue;
    }
    if (work) {
      {
        std::lock_guard lock(mutex);
        look = false;
        at_work = true;
      }
      Result<> result = ok();
      try {
        result = settle(checkpoint, wanted, wanted_revision);
        if (result.has_value()) result = settle_older(wanted);
      } catch (const std::exception& error) {  // no memory
        result = make_error(Code::kNoSpace, "{}", error.what());
      }
      stop_leading();
      std::lock_guard lock(mutex);
      const bool abandoned = result.has_error() && (result.error().code() == Code::kCancelled ||
                                                    result.error().code() == Code::kConflict);
      // A node that does not answer is gone soon, and then the plan is another one.
      const bool again = services.cluster != nullptr && result.has_error() &&
                         result.error().code() == Code::kUnavailable;
      if (abandoned && services.cluster != nullptr) {  // there may be more to do than the newer edit says
        look = true;
        others_first = std::chrono::steady_clock::now() + kAnotherLeads;
      }
      if (again) {
        look = true;
        others_first = std::chrono::steady_clock::now() + kTryAgain;
        last_error = {"reshard to " + wanted.spec.name() + " is tried again: " +
                          result.error().message(), now_ns()};
        spdlog::warn("job {}: {}", job->name(), last_error->what);
      }
      at_work = false;
      if (!result.has_error()) {
        failed.reset();
        forget_error("reshard to ");
      }
      if (running && !result.has_error()) ++counts.reshards_done;
      if (running && abandoned) ++counts.reshards_abandoned;
      running.reset();
      running_plan.reset();
      if (result.has_error() && !abandoned && !again) {
        ++counts.reshards_failed;
        failed = {wanted_revision, checkpoint ? checkpoint->name() : ""};
        last_error = {"reshard to " + wanted.spec.name() + " failed: " + result.error().message() +
                          " (save layout.json again to try again)",
                      now_ns()};
        spdlog::error("job {}: {}", job->name(), last_error->what);
      }
      changed.notify_all();
    }
    remove_superfluous(stop);
    drop_undecided_parts();
  }
}

/// In a cluster one node at a time decides what a job's nodes do: the one that put the key, under its
/// lease. A flip names it, as all that it was based on: a later leader has the nodes throw away the parts of others.
bool Job::Impl::lead() {
  if (services.cluster == nullptr) return true;
  const std::shared_ptr<const MetaLease> lease = services.cluster->lease();
  if (lease == nullptr) return false;
  MetaTransaction transaction;
  transaction.compares = {{leader_key(), 0}, services.cluster->fence()};
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

void Job::Impl::name_leader(MetaTransaction& transaction) const {
  if (services.cluster != nullptr) transaction.compares.push_back({leader_key(), leader_epoch});
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
  return make_error(Code::kUnavailable, "no node is in service: all that are there are being drained (ptc "
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
                           int64_t wanted_revision) {
  std::shared_ptr<const StoredState> moved;
  Fences fences;
  CheckpointRecord record;
  if (checkpoint != nullptr &&
      (checkpoint->stored()->spec != wanted.spec || services.cluster != nullptr)) {
    std::stop_token stop;
    {
      std::lock_guard lock(mutex);
      const CheckpointRecord* newest = latest();
      if (revision != wanted_revision || newest == nullptr || newest->checkpoint != checkpoint)
        return Error(Code::kCancelled, "a newer edit came");
      if (stopping) return Error(Code::kCancelled, "shutting down");
      record = *newest;
      running.emplace(Running{});
      running->checkpoint = checkpoint->name();
      running->from = checkpoint->stored()->spec.name();
      running->to = wanted.spec.name();
      running->phase = "planning";
      running->bytes_done = std::make_shared<std::atomic<uint64_t>>(0);
      running->started = std::chrono::steady_clock::now();
      stop = running->stop.get_token();
    }
    PTC_TRY(auto state, wanted_state(*checkpoint, wanted, nodes_in_service()));
    PTC_TRY(moved, move_or_repair(record, state, stop, fences));
  } else {
    std::lock_guard lock(mutex);
    if (settled()) return ok();
  }
  if (moved == nullptr && checkpoint != nullptr) {  // all is where it shall be
    std::lock_guard lock(mutex);
    if (settled()) {
      running.reset();
      return ok();
    }
  }
  Result<bool> flipped = flip(checkpoint, wanted.spec, wanted_revision, moved, fences);
  if (moved != nullptr && (flipped.has_error() ? !services.meta->in_doubt() : !flipped.value())) {
    // Superseded at the last moment, or not written down: what was made for it goes.
    give_up(record, *moved);
  }
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
void Job::Impl::give_up(const CheckpointRecord& record, const StoredState& made) {
  remove_images_not_in(made, *record.checkpoint->stored());
  if (services.cluster == nullptr) return;
  for (const std::string& node : other_nodes())
    (void)ask(node, "drop", json::serialize(json::object{{"id", record.id}, {"epoch", leader_epoch.load()}}));
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move_or_repair(const CheckpointRecord& record,
                                                                     const WantedState& wanted,
                                                                     std::stop_token stop,
                                                                     Fences& fences) {
  auto moved = move(record, wanted, stop, fences);
  if (moved.has_value() || moved.error().code() != Code::kCorrupt) return moved;
  Result<Findings> found = repair(record.checkpoint->name());
  if (found.has_error() || found.value().replaceable.empty()) return moved;
  return make_error(Code::kCancelled, "damaged copies were taken out: what is made of the others comes next");
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move(const CheckpointRecord& record,
                                                           const WantedState& wanted,
                                                           std::stop_token stop,
                                                           Fences& fences) {
  auto start = std::chrono::steady_clock::now();
  const Checkpoint& checkpoint = *record.checkpoint;
  std::shared_ptr<const StoredState> stored = checkpoint.stored();
  PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
  if (change->nothing() && stored->spec == wanted.spec) return std::shared_ptr<const StoredState>();
  const PlanReport report(job->name(), services.node, checkpoint, *stored, wanted.spec, *change);
  PlanTexts texts = report.texts("running", 0);
  const TransferPlan::Totals totals = change->transfers.totals;
  std::shared_ptr<std::atomic<uint64_t>> bytes_done;
  {
    std::lock_guard lock(mutex);
    running_plan = std::move(texts);
    running->phase = "moving";
    running->bytes_total = totals.total_bytes - totals.kept_bytes;
    bytes_done = running->bytes_done;
  }

  PTC_TRY(auto parts, make_parts(record, wanted, *change, *bytes_done, stop, fences));
  auto compare = [&]() -> Result<> {
    ChecksumLedger ledger;
    for (const auto& [node, part] : parts)
      for (const PlanPart::Sum& sum : part.sums) {
        PTC_TRY(ledger.add(sum.tensor, sum.box, sum.sum));
      }
    if (change->same_states) return ok();  // copies of some files, and not of all tensors
    return compare_checksums(ledger, checkpoint.tensor_facts(), [&](uint32_t tensor) {
      return checkpoint.manifest().tensor_name(tensor);
    });
  };
  Result<> made = compare();
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
  std::lock_guard lock(mutex);
  running_plan = std::move(texts);
  running->phase = "committing";
  last_reshard = {checkpoint.name(), stored->spec.name(), wanted.spec.name(), totals, seconds.count()};
  return moved;
}

Result<bool> Job::Impl::flip(const CheckpointRef& checkpoint, const LayoutSpec& wanted,
                             int64_t wanted_revision, std::shared_ptr<const StoredState> moved,
                             const Fences& fences) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  PlanTexts plan;
  MetaTransaction transaction;
  {
    std::lock_guard lock(mutex);
    const CheckpointRecord* newest = latest();
    if (revision != wanted_revision || (newest != nullptr ? newest->checkpoint : nullptr) != checkpoint)
      return false;
    if (newest != nullptr) record = *newest;
    next = in_force;
    if (moved != nullptr) plan = *running_plan;
    transaction.compares = fences;
    name_leader(transaction);
    transaction.compares.push_back({meta_key("layout"), layout_meta_revision});
    transaction.compares.push_back({meta_key("in_force"), in_force.meta_revision});
  }
  next.spec = wanted;
  next.revision = wanted_revision;
  next.current.reset();
  if (checkpoint != nullptr) {
    next.current = checkpoint->name();
    const std::string key = meta_key("checkpoints/" + checkpoint->name());
    transaction.compares.push_back({key, record.meta_revision});
    if (moved != nullptr) {
      PTC_TRY(put_stored(record, *moved, plan, transaction));
    }
  }
  transaction.puts.emplace_back(meta_key("in_force"), in_force_text(next));
  PTC_TRY(int64_t meta_revision, commit_fenced(transaction));

  next.meta_revision = meta_revision;
  std::shared_ptr<const StoredState> before;
  {
    std::lock_guard lock(mutex);
    in_force = next;
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
                               const PlanTexts& plan, MetaTransaction& transaction) {
  ++record.generation;
  // Others may think that they lead, and write their own: the name is this decision's alone.
  PTC_TRY(auto unique, random_id());
  record.stored = fmt::format("stored-{}-{}.json", record.generation, unique);
  const std::string plan_file = plan_file_of(record.stored), directory = checkpoint_dir(record.id) + "/";
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + record.stored, moved.to_text()));
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + plan_file, plan.to_text()));
  if (services.cluster != nullptr) {
    PTC_TRY(give_files(record.id, {record.stored, plan_file}, moved));
  }
  transaction.puts.emplace_back(meta_key("checkpoints/" + record.checkpoint->name()),
                                record_text(record));
  return ok();
}

std::shared_ptr<const StoredState> Job::Impl::take_over(const CheckpointRecord& record,
                                                        std::shared_ptr<const StoredState> moved,
                                                        PlanTexts plan) {
  std::shared_ptr<const StoredState> before = record.checkpoint->stored();
  record.checkpoint->replace_stored(std::move(moved));
  checkpoints[record.checkpoint->name()] = record;
  last_plan = std::move(plan);
  last_plan_revision = record.meta_revision;
  return before;
}

void Job::Impl::remove_replaced(const CheckpointRecord& record, const StoredState& before) {
  remove_images_not_in(before, *record.checkpoint->stored());
  (void)remove_stale_files(record.id, record.stored);
}

void Job::Impl::remove_superfluous(const std::stop_token& stop) {
  std::vector<std::pair<std::string, std::string>> surplus;  // name and id
  {
    std::lock_guard lock(mutex);
    // Pinned ones stay besides those that `keep` counts.
    std::set<std::pair<int64_t, std::string>> by_sequence;
    for (const auto& [name, record] : checkpoints)
      if (!record.pinned) by_sequence.emplace(record.sequence, name);
    if (layout.keep == 0 || by_sequence.size() <= layout.keep) return;
    const size_t too_many = by_sequence.size() - layout.keep;
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
}

Result<> Job::Impl::remove(const std::string& name, bool only_unused) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  MetaTransaction transaction;
  {
    std::lock_guard lock(mutex);
    auto it = checkpoints.find(name);
    if (it == checkpoints.end())
      return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
    record = it->second;
    if (record.pinned)
      return make_error(Code::kPermissionDenied,
                        "checkpoint {} is pinned; ptc pin {}/{} --remove takes that off", name,
                        job->name(), name);
    if (only_unused && (record.checkpoint->in_use() || in_force.current == name))
      return make_error(Code::kBusy, "checkpoint {} is being read", name);
    next = in_force;
    if (running && running->checkpoint == name) running->stop.request_stop();
  }
  const std::string key = meta_key("checkpoints/" + name);
  transaction.compares = {{key, record.meta_revision},
                          {meta_key("in_force"), next.meta_revision}};
  transaction.deletes = {key};
  const bool was_current = next.current == name;
  if (was_current) {
    next.current.reset();
    transaction.puts.emplace_back(meta_key("in_force"), in_force_text(next));
  }
  PTC_TRY(int64_t meta_revision, commit_fenced(transaction));
  {
    std::lock_guard lock(mutex);
    services.removed->note(record.id, record.checkpoint);
    checkpoints.erase(name);
    if (was_current) {
      next.meta_revision = meta_revision;
      in_force = next;
    }
    failed.reset();
    if (listener != nullptr) listener->names_changed();
    changed.notify_all();
  }
  if (listener != nullptr) listener->checkpoint_changed(job->name(), name);
  remove_files_of(record);
  spdlog::info("job {}: checkpoint {} removed", job->name(), name);
  return ok();
}

}  // namespace ptc
