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

void Decisions::put_stored(CheckpointRecord& record, NewStored next, JobDecision& decision) const {
  record.generation = next.generation;
  record.files.erase(record.stored);
  record.files.insert_or_assign(next.file, std::move(next.facts));
  record.stored = std::move(next.file);
  record.lies(std::move(next.stored));
  decision.put(record.checkpoint->name(), record);
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
                                       std::vector<StoredImage> images, JobDecision decision,
                                       bool were_damaged) {
  const Checkpoint& checkpoint = *seen.checkpoint;
  std::shared_ptr<const StoredState> before;
  CheckpointRecord record;
  KnownJob::PlanRef plan;
  const auto is_as_seen = [&] {
    const JobKnowledge::Snapshot now = knowledge_.now();
    const auto known = now->checkpoints.find(checkpoint.name());
    if (known == now->checkpoints.end() || known->second.stored != seen.stored) return false;
    record = known->second;
    plan = now->last_plan;
    return true;
  };
  if (!is_as_seen()) return false;
  PTC_TRY(auto left, checkpoint.make_stored(record.where->spec, std::move(images)));
  Result<NewStored> next = write_stored(record, std::move(left), *plan);
  {
    MutexLock change(mutex_);
    if (!is_as_seen()) return false;
    PTC_TRY(auto written, std::move(next));
    decision.rests_on(checkpoint.name(), record);
    record.mended += were_damaged;
    put_stored(record, std::move(written), decision);
    Result<int64_t> decided = place_.commit(std::move(decision));
    if (decided.has_error() && decided.error().code() == Code::kConflict) return false;
    PTC_TRY(record.meta_revision, std::move(decided));
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
    Result<bool> done = replace_images(record, std::move(images), JobDecision(place_.name));
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
  {
    const JobKnowledge::Snapshot now = knowledge_.now();
    const auto known = now->checkpoints.find(name);
    if (known == now->checkpoints.end() || known->second.id != id) return false;
    record = known->second;
  }
  JobDecision decision(place_.name);
  decision.rests_on(name, record);
  ++record.mended;
  decision.put(name, record);
  PTC_TRY(record.meta_revision, place_.commit(std::move(decision)));
  knowledge_.update([&](KnownJob& known) { known.checkpoints[name] = record; });
  return true;
}

}  // namespace ptc
