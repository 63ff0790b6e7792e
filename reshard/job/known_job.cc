#include "reshard/job/known_job.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <span>
#include <string_view>

#include "reshard/job/job.h"
#include "store/base/utf8.h"
#include "store/base/wall_time.h"
#include "store/tensor/checksum.h"

namespace ptc {
namespace {

std::vector<std::string> without(std::vector<std::string> nodes,
                                 const std::vector<std::string>& drained) {
  std::erase_if(nodes, [&](const std::string& node) {
    return std::find(drained.begin(), drained.end(), node) != drained.end();
  });
  return nodes;
}

}  // namespace

void CheckpointRecord::lies(std::shared_ptr<const StoredState> there) {
  where = std::move(there);
  nodes = where->nodes;
  std::erase(nodes, "");  // of a node that is alone
  more_nodes = static_cast<int64_t>(nodes.size()) - static_cast<int64_t>(kNamedNodes);
  if (more_nodes > 0) nodes.resize(kNamedNodes);
  else more_nodes = 0;
}

JobRecord KnownJob::record() const {
  return {.saved = saved,
          .in_force = in_force,
          .sequence = sequence,
          .attributes = attributes,
          .rules_text = rules_text,
          .custom_specs = custom_specs,
          .checkpoints = {checkpoints.begin(), checkpoints.end()},
          .looked_over = looked_over};
}

const CheckpointRecord* KnownJob::latest() const {
  const CheckpointRecord* newest = nullptr;
  for (const auto& [name, record] : checkpoints)
    if (newest == nullptr || record.sequence >= newest->sequence) newest = &record;
  return newest;
}

LayoutRules KnownJob::rules_of_id(std::string_view id) const {
  for (const auto& [name, spec] : custom_specs)
    if (spec.rules && spec.rules.id() == id) return spec.rules;
  return {};
}

std::string_view KnownJob::latest_name() const {
  const CheckpointRecord* newest = latest();
  for (const auto& [name, record] : checkpoints)
    if (&record == newest) return name;
  return {};
}

const CheckpointRecord* KnownJob::record_of(std::string_view name) const {
  if (const auto it = checkpoints.find(name); it != checkpoints.end()) return &it->second;
  const auto one = damaged.find(name);
  return one == damaged.end() ? nullptr : &one->second.record;
}

const CheckpointRecord* KnownJob::find_id(std::string_view id) const {
  for (const auto& [name, record] : checkpoints)
    if (record.id == id) return &record;
  return nullptr;
}

bool KnownJob::has(const Checkpoint& checkpoint) const {
  const auto known = checkpoints.find(checkpoint.name());
  return known != checkpoints.end() && known->second.checkpoint.get() == &checkpoint;
}

const std::pair<const std::string, Unreadable>* KnownJob::lost() const {
  const auto found =
      std::find_if(damaged.begin(), damaged.end(), [](const auto& one) { return one.second.lost; });
  return found == damaged.end() ? nullptr : &*found;
}

bool KnownJob::has_failed() const {
  return failed && failed->revision == saved.revision && failed->checkpoint == latest_name();
}

bool KnownJob::settled() const {
  if (has_failed()) return true;
  if (in_force.revision != saved.revision) return false;
  return in_force.current.value_or("") == latest_name();  // no checkpoint has an empty name
}

std::set<std::string> KnownJob::show_damage(bool reads_damaged) const {
  std::set<std::string> news;
  for (const auto& [name, record] : checkpoints) {
    const auto looked = looked_over.find(record.id);
    const bool none = reads_damaged || looked == looked_over.end();
    if (record.checkpoint->replace_damage(none ? KnownDamage() : looked->second.not_right))
      news.insert(name);
  }
  return news;
}

std::string KnownJob::view() const {
  std::string text = fmt::format("{} {}", saved.meta_revision, in_force.meta_revision);
  for (const auto& [name, record] : checkpoints)
    text += fmt::format("\n{} {}", record.id, record.stored);
  for (const auto& [name, one] : damaged)
    text += fmt::format("\nunreadable {} {}", one.record.id, one.record.stored);
  for (const std::string& node : followed_alive) text += "\nthere " + node;
  for (const std::string& node : followed_drained) text += "\ndrained " + node;
  return fmt::format("{} {}", text.size(),
                     checksum_of_run(std::as_bytes(std::span(text)), 0).to_hex());
}

JobState KnownJob::state(bool reshards) const {
  if (has_failed()) return JobState::kFailed;
  if (lost() != nullptr && !settled()) return JobState::kFailed;
  return reshards || !settled() ? JobState::kResharding : JobState::kIdle;
}

uint64_t KnownJob::bytes_on(std::string_view node) const {
  uint64_t bytes = 0;
  for (const auto& [name, record] : checkpoints)
    for (size_t i = 0; i < record.where->images.size(); ++i)
      if (const StoredImage& image = record.where->images[i]; image.node == node && !image.missing)
        bytes += record.where->layouts()[i].bytes;
  return bytes;
}

uint64_t KnownJob::missing_copies() const {
  uint64_t missing = 0;
  for (const auto& [name, record] : checkpoints)
    missing += bytes_of_missing_copies(*record.where, saved.layout.replicas);
  return missing;
}

std::vector<std::string> KnownJob::in_service(std::vector<std::string> nodes) const {
  return without(std::move(nodes), drained);
}

std::vector<std::string> KnownJob::followed_in_service() const {
  return without(followed_alive, followed_drained);
}

void KnownJob::set_error(const std::string& what) {
  last_error = {printable(what, 4096), now_ns()};
}

void KnownJob::forget_error(std::string_view beginning) {
  if (last_error && last_error->what.starts_with(beginning)) last_error.reset();
}

void KnownJob::forget_errors() {
  last_error.reset();
  layout_error.reset();
}

void KnownJob::note_refused_save(const std::string& file, const std::string& why) {
  set_error(file + " refused: " + why);
  if (file == "layout.json") layout_error = last_error;
}

void KnownJob::forget_refused_save(const std::string& file) {
  forget_error(file + " refused: ");
  if (file == "layout.json") layout_error.reset();
}

void KnownJob::set_attributes(Agreed<AttributesInForce> now) {
  for (const std::string& text : now.all->opened_since(*attributes.all))
    conceal_refused_save(text, kNotToldToAll);
  attributes = std::move(now);
}

void KnownJob::conceal_refused_save(const std::string& file, const std::string& why) {
  const std::string about = file + " refused: ";
  if (last_error && last_error->what.starts_with(about)) last_error->what = about + why;
  if (file == "layout.json" && layout_error) layout_error->what = about + why;
}

void KnownJob::set_last_plan(PlanRef plan, int64_t decided) {
  last_plan = std::move(plan);
  last_reshard = LastReshard::of(*last_plan);
  last_plan_revision = decided;
}

void KnownJob::take_over(const CheckpointRecord& record, PlanRef plan) {
  checkpoints[record.checkpoint->name()] = record;
  set_last_plan(std::move(plan), record.meta_revision);
}

void KnownJob::take_over_damaged(const std::string& job,
                                 std::map<std::string, Unreadable, std::less<>> now) {
  constexpr std::string_view kLost = "cannot read checkpoint ";
  for (const auto& [name, one] : now) {
    damaged_ids.insert(one.record.id);
    const auto before = damaged.find(name);
    if (before == damaged.end() || before->second.why != one.why)
      spdlog::error("job {}: {}{}: {}", job, kLost, name, one.why);
  }
  damaged = std::move(now);
  if (const auto* one = lost(); one == nullptr) forget_error(kLost);
  else if (!last_error || last_error->what.starts_with(kLost))
    set_error(fmt::format("{}{}: {}", kLost, one->first, one->second.why));
}

uint64_t bytes_of(const StoredState& stored) {
  uint64_t bytes = 0;
  for (const ImageLayout& layout : stored.layouts()) bytes += layout.bytes;
  return bytes;
}

uint64_t bytes_of_missing_copies(const StoredState& stored, uint32_t replicas) {
  uint64_t missing = 0;
  const std::vector<StoredImage>& images = stored.images;
  auto same = [&](size_t a, size_t b) {  // they stand beside each other
    return images[a].state == images[b].state && images[a].path == images[b].path &&
           images[a].written == images[b].written;
  };
  for (size_t begin = 0, end; begin < images.size(); begin = end) {
    std::set<std::string_view> hosts, devices;  // nodes
    for (end = begin; end < images.size() && same(begin, end); ++end)
      if (images[end].image != nullptr)
        (images[end].memory.is_host() ? hosts : devices).insert(images[end].node);
    // Of those in devices one counts, on a node that has no other.
    const uint64_t there =
        hosts.size() + !std::includes(hosts.begin(), hosts.end(), devices.begin(), devices.end());
    if (there <= replicas)
      missing += (replicas + uint64_t{1} - there) * stored.layouts()[begin].bytes;
  }
  return missing;
}

}  // namespace ptc
