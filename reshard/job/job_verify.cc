// Whether what is stored is what was committed. Every node reads what lies on it; a part of a tensor that
// is stored twice and differs is right where the tensor's checksum, a sum over its parts, comes out with it.
// A copy that is damaged or cut is taken out of the stored state, by a decision like any other; then it is
// missing, as after the loss of a node, and is made anew.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <future>
#include <thread>
#include <unordered_map>

#include "reshard/exec/image_sums.h"
#include "reshard/job/change.h"
#include "reshard/job/examine.h"
#include "reshard/job/job_impl.h"
#include "reshard/job/tell.h"

namespace ptc {

namespace {

/// What no tensor's checksum covers. Empty: nothing is wrong.
std::string problem_beside_tensors(const ImageLayout& layout, const std::vector<TensorFacts>& tensors,
                                   std::span<const std::byte> bytes) {
  const std::span<const std::byte> header = std::as_bytes(std::span(layout.header.text()));
  if (bytes.size() != layout.bytes) return "it does not have all of its bytes";
  if (!std::ranges::equal(bytes.first(header.size()), header)) return "its header is not what it was";
  const Result<ImageSums> sums = ImageSums::make(layout, tensors);
  if (sums.has_error()) return sums.error().message();
  return sums.value().padding_is_zero(bytes, header.size()) ? "" : "its padding is not zero any more";
}

}  // namespace

/// This node's images of the stored state, each by itself.
Result<std::vector<ImageContent>> Job::Impl::read_own_images(const Checkpoint& checkpoint,
                                                             const StoredState& stored) const {
  const Manifest& manifest = checkpoint.manifest();
  const std::vector<TensorFacts>& facts = checkpoint.tensor_facts();
  std::vector<ImageContent> contents;
  for (uint32_t i = 0; i < stored.images.size(); ++i) {
    const StoredImage& image = stored.images[i];
    if (image.node != node_key(services)) continue;
    ImageContent content{i};
    const bool other = image.written >= 0 && !manifest.files[image.written].has_tensors;
    Result<> read = ok();
    if (image.image == nullptr) {
      read = make_error(Code::kCorrupt, "its file is gone or cut short");
    } else if (Result<std::span<const std::byte>> bytes = image.image->map(); bytes.has_error()) {
      read = std::move(bytes).error();
    } else if (other) {
      content.whole = checksum_of_run(bytes.value(), 0);
    } else {
      ChecksumLedger ledger;
      read = services.executor->hash_images({{&stored.layouts()[i], image.image.get()}}, facts, ledger, {});
      ledger.for_each([&](uint32_t tensor, const Box& box, const Checksum& sum) {
        content.sums.push_back({tensor, box, sum});
      });
      if (read.has_value()) content.problem = problem_beside_tensors(stored.layouts()[i], facts, bytes.value());
    }
    if (read.has_error()) {
      if (read.error().code() != Code::kCorrupt) return std::move(read).error();
      content.problem = read.error().message();
    }
    contents.push_back(std::move(content));
  }
  return contents;
}

Result<std::string> Job::Impl::answer_examine(const std::string& id, const std::string& stored_file) {
  auto find = [&] {
    std::lock_guard lock(mutex);
    for (const auto& [name, known] : checkpoints)
      if (known.id == id && known.stored == stored_file) return known;
    return CheckpointRecord();
  };
  CheckpointRecord record = find();
  if (record.checkpoint == nullptr) {  // decided a moment ago
    PTC_TRY(sync());
    record = find();
  }
  if (record.checkpoint == nullptr)
    return make_error(Code::kBusy, "it is being moved; try again");
  PTC_TRY(auto contents, read_own_images(*record.checkpoint, *record.checkpoint->stored()));
  return to_text(contents);
}

Result<Findings> Job::Impl::examine(const CheckpointRecord& record) {
  const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
  std::vector<std::future<Result<std::vector<ImageContent>>>> elsewhere;
  for (const std::string& node : stored->nodes) {
    if (node == node_key(services) || !is_among(services.cluster->alive(), node)) continue;
    elsewhere.push_back(std::async(std::launch::async, [&, node]() -> Result<std::vector<ImageContent>> {
      const json::object request{{"id", record.id}, {"stored", record.stored}};
      PTC_TRY(auto answer, ask(node, "examine", json::serialize(request)));
      return contents_from(answer);
    }));
  }
  PTC_TRY(auto contents, read_own_images(*record.checkpoint, *stored));
  for (auto& answer : elsewhere) {
    PTC_TRY(auto theirs, answer.get());
    std::move(theirs.begin(), theirs.end(), std::back_inserter(contents));
  }
  return find_damage(*record.checkpoint, *stored, std::move(contents));
}

Result<CheckpointRecord> Job::Impl::find_record(std::string_view name) const {
  std::lock_guard lock(mutex);
  const auto known = checkpoints.find(name);
  if (known == checkpoints.end())
    return make_error(Code::kNotFound, "job {} has no checkpoint '{}'", job->name(), name);
  return known->second;
}

Result<bool> Job::Impl::replace_images(const CheckpointRecord& seen, std::vector<StoredImage> images) {
  const Checkpoint& checkpoint = *seen.checkpoint;
  std::shared_ptr<const StoredState> before;
  CheckpointRecord record;
  {
    std::lock_guard change(changes);
    PlanTexts plan;
    {
      std::lock_guard lock(mutex);
      const auto known = checkpoints.find(checkpoint.name());
      if (known == checkpoints.end() || known->second.stored != seen.stored) return false;
      record = known->second;
      plan = last_plan;
    }
    PTC_TRY(auto left, checkpoint.make_stored(checkpoint.stored()->spec, std::move(images)));
    MetaTransaction transaction;
    transaction.compares.push_back({meta_key("checkpoints/" + checkpoint.name()), record.meta_revision});
    PTC_TRY(put_stored(record, *left, plan, transaction));
    Result<int64_t> decided = commit_fenced(transaction);
    if (decided.has_error() && decided.error().code() == Code::kConflict) return false;
    PTC_TRY(record.meta_revision, std::move(decided));
    std::lock_guard lock(mutex);
    before = take_over(record, left, std::move(plan));
    look = true;  // what is missing is made anew
    changed.notify_all();
  }
  if (listener != nullptr) listener->checkpoint_changed(job->name(), checkpoint.name());
  remove_replaced(record, *before);
  return true;
}

void Job::Impl::report_missing_images() {
  if (services.cluster == nullptr) return;
  std::vector<CheckpointRecord> records;
  {
    std::lock_guard lock(mutex);
    for (const auto& [name, record] : checkpoints) records.push_back(record);
  }
  for (const CheckpointRecord& record : records) {
    const std::shared_ptr<const StoredState> stored = record.checkpoint->stored();
    auto says_otherwise = [&](const StoredImage& image) {
      return image.missing != (image.image == nullptr) && image.node == services.cluster->self();
    };
    if (std::none_of(stored->images.begin(), stored->images.end(), says_otherwise)) continue;
    std::vector<StoredImage> images = stored->images;
    size_t missing = 0;
    for (StoredImage& image : images) {
      if (!says_otherwise(image)) continue;
      image.missing = image.image == nullptr;
      missing += image.missing;
    }
    Result<bool> done = replace_images(record, std::move(images));
    if (done.has_error())
      spdlog::warn("job {}: {}", job->name(), done.error().message());
    else if (done.value() && missing > 0)
      spdlog::warn("job {}: checkpoint {}: {} of the files that lay on this node are missing; what other nodes "
                   "have of them is copied anew", job->name(), record.checkpoint->name(), missing);
  }
}

Result<Findings> Job::Impl::repair(const std::string& name) {
  for (;;) {
    PTC_TRY(auto record, find_record(name));
    PTC_TRY(auto found, examine(record));
    if (found.replaceable.empty()) return found;
    PTC_TRY(bool done, replace_images(record, images_without(*record.checkpoint->stored(), found.replaceable)));
    if (!done) continue;
    for (const std::string& what : found.replaced)
      spdlog::warn("job {}: checkpoint {}: {}; it is made anew from another copy", job->name(), name, what);
    return found;
  }
}

namespace {

json::object report_of(const Checkpoint& checkpoint, const Findings& found) {
  return {{"checkpoint", checkpoint.name()},
          {"tensors", checkpoint.manifest().checksums.size()},
          {"images", found.images},
          {"bytes", found.bytes}};
}

}  // namespace

Result<std::string> Job::verify(std::string_view checkpoint_name) const {
  constexpr int kTries = 50;
  constexpr auto kAgain = std::chrono::milliseconds(100);
  for (int tries = 1;; ++tries) {
    // What others decided a moment ago; a node that is cut off looks at what it knows.
    if (impl_->services.cluster != nullptr) (void)impl_->sync();
    PTC_TRY(auto record, impl_->find_record(checkpoint_name));
    const Checkpoint& checkpoint = *record.checkpoint;
    if (const std::vector<std::string> lost = checkpoint.lost_tensors(); !lost.empty())
      return make_error(Code::kCorrupt, "checkpoint {} has lost {} tensors, {} among them",
                        checkpoint_name, lost.size(), lost.front());
    Result<Findings> found = impl_->examine(record);
    if (found.has_error() && found.error().code() == Code::kBusy && tries < kTries) {  // it is being moved
      std::this_thread::sleep_for(kAgain);
      continue;
    }
    if (found.has_error()) return std::move(found).error();
    if (!found.value().good()) return make_error(Code::kCorrupt, "{}", found.value().message());
    return json::serialize(report_of(checkpoint, found.value()));
  }
}

Result<std::string> Job::repair(std::string_view checkpoint_name) {
  PTC_TRY(check_member(impl_->services.cluster));
  PTC_TRY(auto found, impl_->repair(std::string(checkpoint_name)));
  tell_others(impl_->services.cluster, name_);
  if (!found.beyond.empty()) return make_error(Code::kCorrupt, "{}", found.message());
  PTC_TRY(auto record, impl_->find_record(checkpoint_name));
  json::object report = report_of(*record.checkpoint, found);
  report["repaired"] = json::array(found.replaced.begin(), found.replaced.end());
  return json::serialize(report);
}

}  // namespace ptc
