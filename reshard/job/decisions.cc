#include "reshard/job/decisions.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/base/random_id.h"

namespace ptc {

Result<Decisions::NewStored> Decisions::write_stored(const CheckpointRecord& record,
                                                     std::shared_ptr<const StoredState> moved,
                                                     const PlanTexts& plan) const {
  NewStored next{"", record.generation + 1, std::move(moved)};
  // Others may think that they lead, and write their own: the name is this decision's alone.
  PTC_TRY(auto unique, random_id());
  next.file = fmt::format("stored-{}-{}.json", next.generation, unique);
  const std::string plan_file = plan_file_of(next.file),
                    directory = place_.checkpoint_dir(record.id) + "/";
  const std::string text = next.stored->to_text();
  next.facts = FileFacts::of(text);
  auto write = [&]() -> Result<> {
    PTC_TRY(write_file_atomically(AT_FDCWD, directory + next.file, text));
    PTC_TRY(write_file_atomically(AT_FDCWD, directory + plan_file, plan.to_text()));
    return files_.give(record.id, {next.file, plan_file}, *next.stored);
  };
  if (Result<> written = write(); written.has_error()) {
    // Nothing will name them, and the same may be tried again each second.
    for (const std::string& file : {next.file, plan_file})
      (void)remove_tree(AT_FDCWD, directory + file);
    return std::move(written).error();
  }
  return next;
}

Result<int64_t> Decisions::update(const Leadership* leader, const JobUpdate::Decide& decide) const {
  MetaTransaction transaction;
  {
    // While the transaction is on its way no snapshot is held, nor the images of what is removed.
    JobUpdate update(place_, knowledge_.now(), leader);
    PTC_TRY(const bool is_decided, decide(update));
    if (!is_decided) return 0;
    PTC_TRY(transaction, std::move(update).transaction());
  }
  return place_.commit(std::move(transaction));
}

void Decisions::put_stored(CheckpointRecord& record, NewStored next, JobUpdate& update) {
  record.generation = next.generation;
  record.files.erase(record.stored);
  record.files.insert_or_assign(next.file, std::move(next.facts));
  record.stored = std::move(next.file);
  record.lies(std::move(next.stored));
  update.put(record.checkpoint->name(), record);
}

std::shared_ptr<const StoredState> Decisions::take_over(KnownJob& known,
                                                        const CheckpointRecord& record,
                                                        KnownJob::PlanRef plan) {
  std::shared_ptr<const StoredState> before = record.checkpoint->stored();
  record.checkpoint->replace_stored(record.where);
  known.take_over(record, std::move(plan));
  return before;
}

void Decisions::remove_replaced(const CheckpointRecord& record, const StoredState& before) const {
  files_.confirm(record);
  files_.remove_images_not_in(before, *record.checkpoint->stored());
  (void)files_.remove_stale(record.id, record.stored);
}

Result<bool> Decisions::replace_images(const CheckpointRecord& seen,
                                       std::vector<StoredImage> images, const Leadership* leader,
                                       const JobUpdate::Decide& besides, bool were_damaged) {
  const Checkpoint& checkpoint = *seen.checkpoint;
  std::shared_ptr<const StoredState> before;
  CheckpointRecord record;
  KnownJob::PlanRef plan;
  {
    const JobKnowledge::Snapshot now = knowledge_.now();
    const auto known = now->checkpoints.find(checkpoint.name());
    if (known == now->checkpoints.end() || known->second.stored != seen.stored) return false;
    record = known->second;
    plan = now->last_plan;
  }
  PTC_TRY(auto left, checkpoint.make_stored(record.where->spec, std::move(images)));
  Result<NewStored> next = write_stored(record, std::move(left), *plan);
  const auto replaces = [&](JobUpdate& update) -> Result<bool> {
    const CheckpointRecord* known = update.checkpoint(checkpoint.name());
    if (known == nullptr || known->stored != seen.stored) return false;
    record = *known;
    plan = update.glance().last_plan;  // nothing was moved, and so this one is shown still
    PTC_TRY(auto written, std::move(next));
    PTC_TRY(const bool holds, besides(update));
    if (!holds) return false;
    record.mended += were_damaged;
    put_stored(record, std::move(written), update);
    return true;
  };
  {
    MutexLock change(mutex_);
    Result<int64_t> decided = update(leader, replaces);
    if (decided.has_error() && decided.error().code() == Code::kConflict) return false;
    PTC_TRY(record.meta_revision, std::move(decided));
    if (record.meta_revision == 0) return false;
    knowledge_.update([&](KnownJob& known) {
      before = take_over(known, record, plan);
      known.look_anyway = true;  // what is missing is made anew
    });
    knowledge_.tell();
  }
  if (place_.listener != nullptr)
    place_.listener->checkpoint_changed(place_.name, checkpoint.name());
  remove_replaced(record, *before);
  return true;
}

bool Decisions::report_missing_images() {
  if (!place_.services.cluster->shares_bytes()) return true;  // there is no copy to make of it
  bool all_said = true;
  const JobKnowledge::Snapshot known = knowledge_.now();
  for (const auto& [name, record] : known->checkpoints) {
    const std::shared_ptr<const StoredState>& stored = record.where;
    auto says_otherwise = [&](const StoredImage& image) {
      return image.missing != (image.image == nullptr) &&
             image.node == place_.services.cluster->self();
    };
    if (std::none_of(stored->images.begin(), stored->images.end(), says_otherwise)) continue;
    std::vector<StoredImage> images = stored->images;
    size_t missing = 0;
    for (StoredImage& image : images) {
      if (!says_otherwise(image)) continue;
      image.missing = image.image == nullptr;
      missing += image.missing;
    }
    // Of its own files each node says this, whoever leads.
    Result<bool> done =
        replace_images(record, std::move(images), /*leader=*/nullptr, nothing_besides);
    all_said = all_said && done.has_value() && done.value();
    if (done.has_error()) spdlog::warn("job {}: {}", place_.name, done.error().message());
    else if (done.value() && missing > 0)
      spdlog::warn(
          "job {}: checkpoint {}: {} of the files that lay on this node are missing; what other "
          "nodes "
          "have of them is copied anew",
          place_.name, record.checkpoint->name(), missing);
  }
  return all_said;
}

Result<bool> Decisions::count_mending(const std::string& name, const std::string& id) {
  MutexLock change(mutex_);
  CheckpointRecord record;
  const auto counts = [&](JobUpdate& update) -> Result<bool> {
    const CheckpointRecord* known = update.checkpoint(name);
    if (known == nullptr || known->id != id) return false;
    record = *known;
    ++record.mended;
    update.put(name, record);
    return true;
  };
  PTC_TRY(record.meta_revision, update(counts));
  if (record.meta_revision == 0) return false;
  knowledge_.update([&](KnownJob& known) { known.checkpoints[name] = record; });
  return true;
}

}  // namespace ptc
