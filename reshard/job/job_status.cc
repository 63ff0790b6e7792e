#include "reshard/job/job_status.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <map>

#include "reshard/job/job_numbers.h"
#include "reshard/job/job_parts.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

/// [{"memory": "w0/cuda:1", "bytes": 4096}], of a node that is alone "cuda:1"; what is within
/// reach.
json::array bytes_in_devices(const StoredState& stored) {
  std::map<MemoryPlace, uint64_t> bytes;
  for (size_t i = 0; i < stored.images.size(); ++i) {
    const StoredImage& image = stored.images[i];
    if (image.image != nullptr && !image.memory.is_host())
      bytes[{image.node, image.memory}] += stored.layouts()[i].bytes;
  }
  json::array list;
  for (const auto& [place, count] : bytes)
    list.push_back(
        json::object{{"memory", place.node.empty() ? place.memory.to_string() : place.to_string()},
                     {"bytes", count}});
  return list;
}

bool is_in_devices_alone(const StoredState& stored) {
  for (size_t i = 0; i < stored.images.size(); ++i)
    if (stored.images[i].image != nullptr && stored.images[i].memory.is_host() &&
        !stored.layouts()[i].arrays.empty())
      return false;
  return true;
}

/// Bytes of files in devices of a node of which there is no other copy within reach.
uint64_t bytes_ending_with(const StoredState& stored, const std::string& node) {
  const std::vector<StoredImage>& images = stored.images;
  uint64_t bytes = 0;
  for (size_t begin = 0, end; begin < images.size(); begin = end) {  // copies stand side by side
    bool ends = false, stays = false;
    for (end = begin;
         end < images.size() && images[end].state == images[begin].state &&
         images[end].path == images[begin].path && images[end].written == images[begin].written;
         ++end) {
      const StoredImage& image = images[end];
      if (image.image == nullptr || stored.layouts()[end].arrays.empty()) continue;
      const bool is_here = image.node.empty() || image.node == node;
      (is_here && !image.memory.is_host() ? ends : stays) = true;
    }
    if (ends && !stays) bytes += stored.layouts()[begin].bytes;
  }
  return bytes;
}

json::value error_of(const std::optional<KnownJob::LastError>& error) {
  if (!error) return nullptr;
  return json::object{{"what", error->what}, {"time", time_text(error->time_ns)}};
}

/// status.json is for all who see the job: of what some of them may not read only how many.
json::array told_to_all(const Checkpoint& checkpoint, const std::vector<std::string>& names) {
  if (names.empty() || checkpoint.is_open_to_all()) return json::array(names.begin(), names.end());
  return {json::value(fmt::format("{} of names that are not for all", names.size()))};
}

/// The same of facts, which config.json says.
std::vector<std::string> contradicted_of(const Checkpoint& checkpoint, const LayoutSpec& spec) {
  const auto all = checkpoint.contradictions_under(spec);
  if (all->empty() || checkpoint.is_open_to_all()) return *all;
  return {"its tensors contradict its config.json: ptc rules check says how"};
}

}  // namespace

std::optional<ReshardProgress> Job::own_progress() const {
  if (const std::optional<Activity::Progress> own = impl_->activities.reshard()) {
    const Activity::Subject& subject = own->subject;
    return ReshardProgress{subject.kind != Activity::Kind::kPart,
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
  // Where nothing is to do here, others may still give copies to older checkpoints; and what was
  // heard of them is believed only as long as it is new.
  constexpr auto kNew = std::chrono::milliseconds(1500), kOlder = std::chrono::milliseconds(5000);
  const JobState state = impl_->knowledge.now()->state(impl_->activities.any_reshard());
  if (state == JobState::kFailed) return std::nullopt;
  std::vector<ReshardProgress> nodes =
      impl_->services.reports->reshard_of(name_, state == JobState::kIdle ? kNew : kOlder);
  if (auto own = own_progress()) nodes.push_back(*std::move(own));
  // Parts may be left of what nobody leads any more.
  const bool led =
      std::any_of(nodes.begin(), nodes.end(), [](const ReshardProgress& one) { return one.leads; });
  if (state == JobState::kIdle && !led) return std::nullopt;
  return add_up(nodes);
}

std::string Job::status_json() const {
  StatusBeside beside;
  beside.progress = progress();
  beside.reshards = impl_->activities.any_reshard() || beside.progress.has_value();
  beside.commits = impl_->activities.commits();
  beside.fetches = impl_->activities.fetches();
  const Cluster& cluster = *impl_->services.cluster;
  beside.distrusted = cluster.distrusted();
  beside.alive = cluster.alive();
  return status_of(*impl_->knowledge.now(), name_, impl_->services.node, cluster.shares_bytes(),
                   beside);
}

std::string status_of(const KnownJob& known, const std::string& job, const std::string& node_name,
                      bool shares_bytes, const StatusBeside& beside) {
  json::object status{{"format", "ptc-status/1"}, {"job", job}};
  status["state"] = state_name(known.state(beside.reshards));
  status["revision"] = known.saved.revision;
  status["layout"] = known.in_force.spec.name();
  status["in_force_revision"] = known.in_force.revision;
  status["wanted"] = known.saved.layout.spec.name();
  status["checkpoint"] = known.in_force.current ? json::value(*known.in_force.current) : nullptr;
  status["progress"] = beside.progress ? json::value(beside.progress->to_json()) : nullptr;
  json::array commits;
  for (const Activity::Progress& commit : beside.commits)
    commits.push_back(json::object{{"phase", commit.phase},
                                   {"checkpoint", commit.subject.checkpoint},
                                   {"from", commit.subject.from},
                                   {"bytes_done", commit.bytes_done},
                                   {"bytes_total", commit.bytes_total},
                                   {"seconds", commit.seconds}});
  status["commits"] = std::move(commits);
  if (const std::optional<LastReshard>& last = known.last_reshard) {
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
  status["last_error"] = error_of(known.last_error);
  status["layout_error"] = error_of(known.layout_error);
  json::array warnings;
  if (known.saved.layout.replicas > 0 && !shares_bytes)
    warnings.push_back(json::value(fmt::format(
        "replicas: {} further copies are wanted, but this cluster has one node: there are none",
        known.saved.layout.replicas)));
  const size_t in_service = known.in_service(known.alive).size();
  if (const uint64_t missing = known.missing_copies();
      shares_bytes && missing > 0 && in_service <= known.saved.layout.replicas)
    warnings.push_back(json::value(fmt::format(
        "replicas: {} further copies are wanted, and {} node{} in service: of {} bytes there are "
        "fewer",
        known.saved.layout.replicas, in_service, in_service == 1 ? " is" : "s are", missing)));
  if (beside.distrusted)
    warnings.push_back(json::value(
        "nothing is decided, for the agreement store is not believed: " + *beside.distrusted +
        "; the log of this node says what to do, as does ptc(1) under recover"));
  for (const std::string& what : known.unnamed)
    warnings.push_back(json::value(what + " is kept, though no checkpoint of the job is in it"));
  for (const Activity::Progress& one : beside.fetches)
    warnings.push_back(json::value(fmt::format(
        "{} of checkpoint {} comes from another node: {} of {} bytes in {:.1f} s", one.subject.to,
        one.subject.checkpoint, one.bytes_done, one.bytes_total, one.seconds)));
  json::array unreadable;
  for (const auto& [name, one] : known.damaged) {
    warnings.push_back(json::value(fmt::format(
        "checkpoint {} {}: {}", name, one.lost ? "cannot be read" : "is damaged", one.why)));
    unreadable.push_back(
        json::object{{"name", name},
                     {"why", one.why},
                     {"nodes", json::array(one.record.nodes.begin(), one.record.nodes.end())},
                     {"more_nodes", one.record.more_nodes}});
  }
  status["unreadable"] = std::move(unreadable);
  std::vector<const CheckpointRecord*> records;
  for (const auto& [name, record] : known.checkpoints) records.push_back(&record);
  std::stable_sort(records.begin(), records.end(),
                   [](const auto* a, const auto* b) { return a->sequence < b->sequence; });
  json::array checkpoints;
  for (const CheckpointRecord* record : records) {
    const Checkpoint& checkpoint = *record->checkpoint;
    const std::shared_ptr<const StoredState>& stored = record->where;
    json::object object{{"name", checkpoint.name()},
                        {"time", time_text(checkpoint.manifest().time_ns)},
                        {"tensors", checkpoint.model().tensors().size()},
                        {"bytes", bytes_of(*stored)},
                        {"pinned", record->pinned},
                        {"layouts", json::array{stored->spec.name()}},
                        {"looked_over", nullptr}};
    if (const auto looked = known.looked_over.find(record->id); looked != known.looked_over.end()) {
      const LookedOver& found = looked->second;
      std::vector<std::string> damaged = found.found;
      if (found.more > 0) damaged.push_back(fmt::format("and {} more", found.more));
      object["looked_over"] =
          json::object{{"time", time_text(found.time_ns)},
                       {"damaged", told_to_all(checkpoint, damaged)},
                       {"mended", told_to_all(checkpoint, found.mended)},
                       {"away", json::array(found.away.begin(), found.away.end())}};
      for (const json::value& what : told_to_all(checkpoint, damaged))
        warnings.push_back(
            json::value(fmt::format("checkpoint {} is damaged: {}; no other copy has it right",
                                    checkpoint.name(), std::string_view(what.as_string()))));
    }
    if (json::array devices = bytes_in_devices(*stored); !devices.empty()) {
      object["devices"] = std::move(devices);
      if (const uint64_t bytes = bytes_ending_with(*stored, node_name); bytes > 0)
        object["ends_with_daemon_bytes"] = bytes;
      if (is_in_devices_alone(*stored))
        warnings.push_back(json::value(
            fmt::format("checkpoint {} is in the memory of devices alone: what no other node has a "
                        "copy of ('replicas') is lost when the daemon ends",
                        checkpoint.name())));
    }
    if (const uint64_t missing = bytes_of_missing_copies(*stored, known.saved.layout.replicas);
        missing > 0)
      object["missing_copy_bytes"] = missing;
    std::vector<std::string> lost = checkpoint.lost_tensors();
    if (!lost.empty()) {
      object["lost"] = told_to_all(checkpoint, lost);
      warnings.push_back(json::value(*checkpoint.loss()));
    }
    if (record == records.back())
      for (const std::string& what : contradicted_of(checkpoint, known.saved.layout.spec))
        warnings.push_back(json::value(fmt::format("checkpoint {}: {}", checkpoint.name(), what)));
    for (const CheckpointFacts::LeftOut& one : checkpoint.left_out())
      if (one.same_names)
        warnings.push_back(json::value(
            fmt::format("checkpoint {}: {} tensors of {} have the names of others with other "
                        "values: hf/ is without them; if they are "
                        "parts of the same tensors, each part belongs to a rank of its own",
                        checkpoint.name(), one.tensors, one.file)));
    if (const CheckpointFacts::Uncut& zero = checkpoint.zero_uncut(); zero.files > 0)
      warnings.push_back(json::value(fmt::format(
          "checkpoint {}: {} files of DeepSpeed's ({} …) lie beside files that have the "
          "tensors, and are kept as they were written: no layout cuts what is in them. "
          "If that is wanted, commit their directory as a checkpoint of its own",
          checkpoint.name(), zero.files, zero.first)));
    checkpoints.push_back(std::move(object));
  }
  status["warnings"] = std::move(warnings);
  status["checkpoints"] = std::move(checkpoints);
  std::map<std::string, const char*> nodes;
  nodes[node_name] = "fenced";  // until its lease lives
  for (const CheckpointRecord* record : records)
    for (const std::string& node : record->where->nodes)
      if (!node.empty()) nodes[node] = "away";
  for (const std::string& node : beside.alive) nodes[node] = "up";
  for (const std::string& node : known.drained) nodes.emplace(node, "away");
  json::array list;
  for (const auto& [name, state] : nodes) {
    json::object node{{"name", name}, {"state", state}};
    if (std::find(known.drained.begin(), known.drained.end(), name) != known.drained.end())
      node["drain"] = json::object{{"bytes_left", known.bytes_on(name)}};
    list.push_back(std::move(node));
  }
  status["nodes"] = std::move(list);
  return pretty_json(status);
}

}  // namespace ptc
