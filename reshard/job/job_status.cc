// status.json: what a job is doing, for people and programs.
#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <map>

#include "reshard/job/job_impl.h"
#include "reshard/job/job_numbers.h"
#include "store/base/wall_time.h"

namespace ptc {

std::optional<ReshardProgress> Job::own_progress() const {
  if (const std::optional<Activity::Progress> own = impl_->activities.reshard()) {
    const Activity::Subject& subject = own->subject;
    return ReshardProgress{subject.kind == Activity::Kind::kReshard,
                           own->phase,
                           subject.checkpoint,
                           subject.from,
                           subject.to,
                           own->bytes_done,
                           own->bytes_total,
                           own->seconds};
  }
  return impl_->shelf.done();
}

std::optional<ReshardProgress> Job::progress() const {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->state() != JobState::kResharding) return std::nullopt;
  }
  std::vector<ReshardProgress> nodes = impl_->services.reports->reshard_of(name_);
  if (auto own = own_progress()) nodes.push_back(*std::move(own));
  return add_up(nodes);
}

std::string Job::status_json() const {
  const std::optional<ReshardProgress> shown = progress();
  std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  json::object status{{"format", "ptc-status/1"}, {"job", name_}};
  status["state"] = state_name(impl.state());
  status["revision"] = impl.saved.revision;
  status["layout"] = impl.in_force.spec.name();
  status["in_force_revision"] = impl.in_force.revision;
  status["wanted"] = impl.saved.layout.spec.name();
  status["checkpoint"] = impl.in_force.current ? json::value(*impl.in_force.current) : nullptr;
  status["progress"] = shown ? json::value(shown->to_json()) : nullptr;
  json::array commits;
  for (const Activity::Progress& commit : impl.activities.commits())
    commits.push_back(json::object{{"phase", commit.phase},
                                   {"checkpoint", commit.subject.checkpoint},
                                   {"from", commit.subject.from},
                                   {"bytes_done", commit.bytes_done},
                                   {"bytes_total", commit.bytes_total},
                                   {"seconds", commit.seconds}});
  status["commits"] = std::move(commits);
  if (const std::optional<LastReshard>& last = impl.last_reshard) {
    status["last_reshard"] =
        json::object{{"checkpoint", last->checkpoint},
                     {"from", last->from},
                     {"to", last->to},
                     {"bytes_kept", last->totals.kept_bytes},
                     {"bytes_written", last->totals.total_bytes - last->totals.kept_bytes},
                     {"seconds", last->seconds}};
  } else {
    status["last_reshard"] = nullptr;
  }
  if (impl.last_error) {
    status["last_error"] = json::object{{"what", impl.last_error->what},
                                        {"time", time_text(impl.last_error->time_ns)}};
  } else {
    status["last_error"] = nullptr;
  }
  json::array warnings;
  if (impl.saved.layout.replicas > 0 && impl.services.cluster == nullptr)
    warnings.push_back(json::value(fmt::format(
        "replicas: {} further copies are wanted, but this cluster has one node: there are none",
        impl.saved.layout.replicas)));
  if (impl.services.cluster != nullptr)
    if (const auto why = impl.services.cluster->distrusted())
      warnings.push_back(
          json::value("nothing is decided, for the agreement store is not believed: " + *why));
  for (const std::string& what : impl.unnamed)
    warnings.push_back(json::value(what + " is kept, though no checkpoint of the job is in it"));
  json::array unreadable;
  for (const auto& [name, one] : impl.damaged) {
    warnings.push_back(json::value(fmt::format(
        "checkpoint {} {}: {}", name, one.lost ? "cannot be read" : "is damaged", one.why)));
    unreadable.push_back(
        json::object{{"name", name},
                     {"why", one.why},
                     {"nodes", json::array(one.record.nodes.begin(), one.record.nodes.end())}});
  }
  status["unreadable"] = std::move(unreadable);
  std::vector<const CheckpointRecord*> records;
  for (const auto& [name, record] : impl.checkpoints) records.push_back(&record);
  std::stable_sort(records.begin(), records.end(),
                   [](const auto* a, const auto* b) { return a->sequence < b->sequence; });
  json::array checkpoints;
  for (const CheckpointRecord* record : records) {
    const Checkpoint& checkpoint = *record->checkpoint;
    std::shared_ptr<const StoredState> stored = checkpoint.stored();
    json::object object{{"name", checkpoint.name()},
                        {"time", time_text(checkpoint.manifest().time_ns)},
                        {"tensors", checkpoint.model().tensors().size()},
                        {"bytes", stored_bytes(checkpoint)},
                        {"pinned", record->pinned},
                        {"layouts", json::array{stored->spec.name()}},
                        {"looked_over", nullptr}};
    if (const auto looked = impl.looked_over.find(record->id); looked != impl.looked_over.end()) {
      const LookedOver& found = looked->second;
      object["looked_over"] =
          json::object{{"time", time_text(found.time_ns)},
                       {"damaged", json::array(found.found.begin(), found.found.end())},
                       {"mended", json::array(found.mended.begin(), found.mended.end())}};
      for (const std::string& what : found.found)
        warnings.push_back(json::value(fmt::format(
            "checkpoint {} is damaged: {}; no other copy has it right", checkpoint.name(), what)));
    }
    if (const uint64_t missing = bytes_of_missing_copies(checkpoint, impl.saved.layout.replicas);
        missing > 0)
      object["missing_copy_bytes"] = missing;
    std::vector<std::string> lost = checkpoint.lost_tensors();
    if (!lost.empty()) {
      json::array names;
      for (const std::string& tensor : lost) names.push_back(json::value(tensor));
      object["lost"] = std::move(names);
      warnings.push_back(json::value(*checkpoint.loss()));
    }
    for (const CheckpointFacts::LeftOut& one : checkpoint.left_out())
      if (one.same_names)
        warnings.push_back(json::value(
            fmt::format("checkpoint {}: {} tensors of {} have the names of others with other "
                        "values: hf/ is without them; if they are "
                        "parts of the same tensors, each part belongs to a rank of its own",
                        checkpoint.name(), one.tensors, one.file)));
    checkpoints.push_back(std::move(object));
  }
  status["warnings"] = std::move(warnings);
  status["checkpoints"] = std::move(checkpoints);
  std::map<std::string, const char*> nodes;
  if (impl.services.cluster == nullptr) {
    nodes[impl.services.node] = "up";
  } else {
    nodes[impl.services.node] = "fenced";  // until its lease lives
    for (const CheckpointRecord* record : records)
      for (const std::string& node : record->checkpoint->stored()->nodes) nodes[node] = "away";
    for (const std::string& node : impl.services.cluster->alive()) nodes[node] = "up";
  }
  for (const std::string& node : impl.drained) nodes.emplace(node, "away");
  json::array list;
  for (const auto& [name, state] : nodes) {
    json::object node{{"name", name}, {"state", state}};
    if (std::find(impl.drained.begin(), impl.drained.end(), name) != impl.drained.end())
      node["drain"] = json::object{{"bytes_left", impl.bytes_on(name)}};
    list.push_back(std::move(node));
  }
  status["nodes"] = std::move(list);
  return pretty_json(status);
}

}  // namespace ptc
