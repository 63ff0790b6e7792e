// status.json: what a job is doing, for people and programs.
#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <map>

#include "reshard/job/job_impl.h"
#include "reshard/job/job_numbers.h"

namespace ptc {

std::string Job::status_json() const {
  std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  json::object status{{"format", "ptc-status/1"}, {"job", name_}};
  status["state"] = state_name(impl.state());
  status["revision"] = impl.revision;
  status["layout"] = impl.in_force.spec.name();
  status["in_force_revision"] = impl.in_force.revision;
  status["wanted"] = impl.layout.spec.name();
  status["checkpoint"] = impl.in_force.current ? json::value(*impl.in_force.current) : nullptr;
  if (impl.running) {
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - impl.running->started;
    status["progress"] = json::object{{"phase", impl.running->phase},
                                      {"checkpoint", impl.running->checkpoint},
                                      {"from", impl.running->from},
                                      {"to", impl.running->to},
                                      {"bytes_done", impl.running->bytes_done->load()},
                                      {"bytes_total", impl.running->bytes_total},
                                      {"seconds", seconds.count()}};
  } else {
    status["progress"] = nullptr;
  }
  if (impl.last_reshard) {
    status["last_reshard"] = json::object{{"checkpoint", impl.last_reshard->checkpoint},
                                          {"from", impl.last_reshard->from},
                                          {"to", impl.last_reshard->to},
                                          {"bytes_kept", impl.last_reshard->totals.kept_bytes},
                                          {"bytes_written", impl.last_reshard->totals.total_bytes -
                                                                impl.last_reshard->totals.kept_bytes},
                                          {"seconds", impl.last_reshard->seconds}};
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
  if (impl.layout.replicas > 0 && impl.services.cluster == nullptr)
    warnings.push_back(json::value(fmt::format(
        "replicas: {} further copies are wanted, but this cluster has one node: there are none",
        impl.layout.replicas)));
  for (const auto& [name, why] : impl.damaged)
    warnings.push_back(json::value(fmt::format("checkpoint {} is damaged: {}", name, why)));
  std::vector<const CheckpointRecord*> records;
  for (const auto& [name, record] : impl.checkpoints) records.push_back(&record);
  std::stable_sort(records.begin(), records.end(), [](const auto* a, const auto* b) {
    return a->sequence < b->sequence;
  });
  json::array checkpoints;
  for (const CheckpointRecord* record : records) {
    const Checkpoint& checkpoint = *record->checkpoint;
    std::shared_ptr<const StoredState> stored = checkpoint.stored();
    json::object object{{"name", checkpoint.name()},
                        {"time", time_text(checkpoint.manifest().time_ns)},
                        {"tensors", checkpoint.model().tensors().size()},
                        {"bytes", stored_bytes(checkpoint)},
                        {"pinned", record->pinned},
                        {"layouts", json::array{stored->spec.name()}}};
    std::vector<std::string> lost = checkpoint.lost_tensors();
    if (!lost.empty()) {
      json::array names;
      for (const std::string& tensor : lost) names.push_back(json::value(tensor));
      object["lost"] = std::move(names);
      warnings.push_back(json::value(fmt::format("checkpoint {} has lost {} tensor{}",
                                                 checkpoint.name(), lost.size(),
                                                 lost.size() == 1 ? "" : "s")));
    }
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
