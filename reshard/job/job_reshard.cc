// The background thread of a job: brings the newest checkpoint into the layout wanted, then flips.
#include <spdlog/spdlog.h>

#include <unordered_set>

#include "reshard/job/change.h"
#include "reshard/job/job_impl.h"
#include "store/base/file.h"
#include "store/base/size_text.h"

namespace ptc {

void Job::Impl::reshard_loop(std::stop_token stop) {
  // Checkpoints that are too many but in use are looked at again after this time.
  constexpr auto kRetryRemoval = std::chrono::seconds(2);
  while (!stop.stop_requested()) {
    CheckpointRef checkpoint;
    LayoutSpec wanted;
    int64_t wanted_revision = 0;
    PlanTexts plan_before;
    bool work = false;
    {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, stop, kRetryRemoval, [&] { return !settled(); });
      work = !settled();
      if (const CheckpointRecord* record = latest()) checkpoint = record->checkpoint;
      wanted = layout.spec;
      wanted_revision = revision;
      plan_before = plan;
    }
    if (stop.stop_requested()) return;
    if (work) {
      Result<> result = ok();
      try {
        result = settle(checkpoint, wanted, wanted_revision);
      } catch (const std::exception& error) {  // no memory
        result = make_error(Code::kNoSpace, "{}", error.what());
      }
      std::lock_guard lock(mutex);
      const bool abandoned = result.has_error() && (result.error().code() == Code::kCancelled ||
                                                    result.error().code() == Code::kConflict);
      if (running && !result.has_error()) ++counts.reshards_done;
      if (running && abandoned) ++counts.reshards_abandoned;
      running.reset();
      if (result.has_error()) plan = std::move(plan_before);
      if (result.has_error() && !abandoned) {
        ++counts.reshards_failed;
        failed = {wanted_revision, checkpoint ? checkpoint->name() : ""};
        last_error = {"reshard to " + wanted.name() + " failed: " + result.error().message() +
                          " (save layout.json again to try again)",
                      now_ns()};
        spdlog::error("job {}: {}", job->name(), last_error->what);
      }
      changed.notify_all();
    }
    remove_superfluous();
  }
}

Result<> Job::Impl::settle(const CheckpointRef& checkpoint, const LayoutSpec& wanted,
                           int64_t wanted_revision) {
  std::shared_ptr<const StoredState> moved;
  if (checkpoint != nullptr && checkpoint->stored()->spec != wanted) {
    std::stop_token stop;
    {
      std::lock_guard lock(mutex);
      if (revision != wanted_revision) return Error(Code::kCancelled, "a newer edit came");
      if (stopping) return Error(Code::kCancelled, "shutting down");
      running.emplace(Running{});
      running->checkpoint = checkpoint->name();
      running->from = checkpoint->stored()->spec.name();
      running->to = wanted.name();
      running->phase = "planning";
      running->bytes_done = std::make_shared<std::atomic<uint64_t>>(0);
      running->started = std::chrono::steady_clock::now();
      stop = running->stop.get_token();
    }
    PTC_TRY(moved, move(*checkpoint, wanted, stop));
  }
  Result<bool> flipped = flip(checkpoint, wanted, wanted_revision, moved);
  if (moved != nullptr && (flipped.has_error() ? !services.meta->in_doubt() : !flipped.value())) {
    // Superseded at the last moment, or not written down: what was made for it goes.
    remove_images_not_in(*moved, *checkpoint->stored());
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
}

Result<std::shared_ptr<const StoredState>> Job::Impl::move(const Checkpoint& checkpoint,
                                                           const LayoutSpec& wanted,
                                                           std::stop_token stop) {
  auto start = std::chrono::steady_clock::now();
  std::shared_ptr<const StoredState> stored = checkpoint.stored();
  PTC_TRY(auto change, plan_change(checkpoint, *stored, wanted));
  const PlanReport report(job->name(), services.node, checkpoint, *stored, wanted, change);
  PlanTexts texts = report.texts("running", 0);
  const TransferPlan::Totals& totals = change.transfers.totals;
  std::shared_ptr<std::atomic<uint64_t>> bytes_done;
  {
    std::lock_guard lock(mutex);
    plan = std::move(texts);
    running->phase = "moving";
    running->bytes_total = totals.total_bytes - totals.kept_bytes;
    bytes_done = running->bytes_done;
  }

  std::vector<StoredImage> images;
  if (change.nothing) {
    images = stored->images;
  } else {
    const Manifest& manifest = checkpoint.manifest();
    const std::vector<TensorFacts> facts = manifest.tensor_facts();
    const std::vector<ImageRef> sources = stored->image_refs();
    std::vector<std::unique_ptr<GatherProgram>> programs;
    std::vector<Executor::Target> targets;
    std::vector<Executor::StoredArrays> kept;
    for (size_t i = 0; i < change.targets.size(); ++i) {
      ImagePlan& image = change.transfers.images[i];
      const ImageLayout& wanted_layout = change.targets[i].layout;
      if (image.kept) {
        kept.push_back({&wanted_layout, sources[*image.kept].get()});
        continue;
      }
      programs.push_back(std::make_unique<GatherProgram>(wanted_layout.header, wanted_layout.bytes,
                                                         std::move(image.transfers), sources));
      targets.push_back({&wanted_layout, programs.back().get()});
    }
    ChecksumLedger ledger;
    PTC_TRY(services.executor->hash_images(kept, facts, ledger, stop));
    PTC_TRY(auto written, services.executor->materialise(*services.images, targets, facts, ledger,
                                                         *bytes_done, stop));
    Result<> right = compare_checksums(
        ledger, facts, [&](uint32_t tensor) { return manifest.tensor_name(tensor); });
    if (right.has_value()) right = services.images->sync();
    if (right.has_error()) {
      for (const ImageRef& image : written) (void)services.images->remove(image->id());
      return std::move(right).error();
    }
    size_t next = 0;
    for (size_t i = 0; i < change.targets.size(); ++i) {
      const std::optional<uint32_t>& from = change.transfers.images[i].kept;
      ImageRef image = from ? sources[*from] : written[next++];
      images.push_back({image->id().text, image, change.targets[i].owner, change.targets[i].path, -1});
    }
  }
  std::vector<StoredImage> described = images;
  Result<std::shared_ptr<const StoredState>> made = checkpoint.make_stored(wanted, std::move(described));
  if (made.has_error()) {
    StoredState orphans;
    orphans.images = std::move(images);
    remove_images_not_in(orphans, *stored);
    return std::move(made).error();
  }
  std::shared_ptr<const StoredState> moved = std::move(made).value();
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  texts = report.texts("done", seconds.count());
  std::lock_guard lock(mutex);
  plan = std::move(texts);
  running->phase = "committing";
  last_reshard = {checkpoint.name(), stored->spec.name(), wanted.name(), totals, seconds.count()};
  return moved;
}

Result<bool> Job::Impl::flip(const CheckpointRef& checkpoint, const LayoutSpec& wanted,
                             int64_t wanted_revision, std::shared_ptr<const StoredState> moved) {
  std::lock_guard change(changes);
  CheckpointRecord record;
  InForce next;
  MetaTransaction transaction;
  {
    std::lock_guard lock(mutex);
    const CheckpointRecord* newest = latest();
    if (revision != wanted_revision || (newest != nullptr ? newest->checkpoint : nullptr) != checkpoint)
      return false;
    if (newest != nullptr) record = *newest;
    next = in_force;
    transaction.compares = {{meta_key("layout"), layout_meta_revision},
                            {meta_key("in_force"), in_force.meta_revision}};
  }
  next.spec = wanted;
  next.revision = wanted_revision;
  next.current.reset();
  const int64_t old_generation = record.generation;
  if (checkpoint != nullptr) {
    next.current = checkpoint->name();
    const std::string key = meta_key("checkpoints/" + checkpoint->name());
    transaction.compares.push_back({key, record.meta_revision});
    if (moved != nullptr) {
      ++record.generation;
      PTC_TRY(write_file_atomically(AT_FDCWD,
                                    fmt::format("{}/stored-{}.json", checkpoint_dir(record.id),
                                                record.generation),
                                    moved->to_text()));
      transaction.puts.emplace_back(key, record_text(record));
    }
  }
  transaction.puts.emplace_back(meta_key("in_force"), in_force_text(next));
  PTC_TRY(int64_t meta_revision, services.meta->commit(transaction));

  next.meta_revision = meta_revision;
  std::shared_ptr<const StoredState> before;
  {
    std::lock_guard lock(mutex);
    in_force = next;
    failed.reset();
    if (checkpoint != nullptr && moved != nullptr) {
      before = checkpoint->stored();
      checkpoint->replace_stored(moved);
      record.meta_revision = meta_revision;
      checkpoints[checkpoint->name()] = record;
    }
    changed.notify_all();
  }
  if (listener != nullptr && checkpoint != nullptr) {
    listener->checkpoint_changed(job->name(), checkpoint->name());
  }
  spdlog::info("job {}: revision {} in force, layout {}, current {}", job->name(), next.revision,
               wanted.name(), next.current.value_or("none"));
  if (before != nullptr) {
    remove_images_not_in(*before, *moved);
    (void)remove_tree(AT_FDCWD, fmt::format("{}/stored-{}.json", checkpoint_dir(record.id),
                                            old_generation));
  }
  return true;
}

void Job::Impl::remove_superfluous() {
  std::vector<std::string> names;
  {
    std::lock_guard lock(mutex);
    // Pinned ones stay besides those that `keep` counts.
    std::map<int64_t, std::string> by_sequence;
    for (const auto& [name, record] : checkpoints)
      if (!record.pinned) by_sequence.emplace(record.sequence, name);
    if (layout.keep == 0 || by_sequence.size() <= layout.keep) return;
    size_t surplus = by_sequence.size() - layout.keep;
    // The newest stays, also while it is not current yet (or cannot become so).
    by_sequence.erase(std::prev(by_sequence.end()));
    for (const auto& [sequence, name] : by_sequence) {
      if (names.size() == surplus) break;
      if (in_force.current != name) names.push_back(name);
    }
  }
  for (const std::string& name : names) {
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
  PTC_TRY(int64_t meta_revision, services.meta->commit(transaction));
  {
    std::lock_guard lock(mutex);
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
  for (const StoredImage& image : record.checkpoint->stored()->images)
    (void)services.images->remove({image.id});
  for (const WrittenFile& file : record.checkpoint->manifest().files)
    if (!file.has_tensors) (void)services.images->remove({file.image});
  (void)remove_tree(AT_FDCWD, checkpoint_dir(record.id));
  spdlog::info("job {}: checkpoint {} removed", job->name(), name);
  return ok();
}

}  // namespace ptc
