#include "tools/planner/run/record.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/json/array.hpp>
#include <span>
#include <utility>

#include "store/base/file.h"
#include "tools/planner/run/json_fields.h"
#include "tools/planner/run/pace.h"

namespace ptc::planner {
namespace {

constexpr const char* kName = "autoscale.json";
constexpr const char* kFormat = "ptc-autoscale/1";
constexpr size_t kMostRecord = 1 << 20;
constexpr std::array<std::pair<LiveState, std::string_view>, 7> kWords{
    {{LiveState::kWaits, "waits"},
     {LiveState::kChanges, "changes"},
     {LiveState::kRuns, "runs"},
     {LiveState::kStops, "stops"},
     {LiveState::kDone, "done"},
     {LiveState::kGivenUp, "given up"},
     {LiveState::kByHand, "by hand"}}};

json::object point_json(const CurvePoint& point) {
  return json::object{{"gpus", point.gpus}, {"batch", point.batch},
                      {"way", point.way},   {"samples_per_s", point.samples_per_s},
                      {"tp", point.tp},     {"pp", point.pp},
                      {"dp", point.dp},     {"technique", point.technique}};
}

CurvePoint point_of(const json::object& object) {
  CurvePoint point;
  point.gpus = static_cast<uint32_t>(number_of(object, "gpus"));
  point.batch = number_of(object, "batch");
  point.way = json_text(object, "way");
  point.samples_per_s = real_of(object, "samples_per_s", 0);
  point.tp = static_cast<uint32_t>(number_of(object, "tp"));
  point.pp = static_cast<uint32_t>(number_of(object, "pp"));
  point.dp = static_cast<uint32_t>(number_of(object, "dp"));
  point.technique = json_text(object, "technique");
  return point;
}

double bounded_slowness(double slowness) {
  return std::clamp(slowness, 1 / Pace::kMostSlowness, Pace::kMostSlowness);
}

}  // namespace

std::string_view state_word(LiveState state) {
  return std::find_if(kWords.begin(), kWords.end(),
                      [&](const auto& word) { return word.first == state; })
      ->second;
}

std::string point_key(const CurvePoint& point) {
  return fmt::format("{} {} {}", point.gpus, point.batch, point.way);
}

double JobRecord::slowness_of(const CurvePoint& point) const {
  const auto known = slowness_by_point.find(point_key(point));
  return known != slowness_by_point.end() ? known->second : slowness;
}

double JobRecord::note_slowness(const CurvePoint& point, double measured) {
  slowness = measured;
  return std::exchange(slowness_by_point[point_key(point)], measured);
}

std::optional<JobRecord> read_record(const std::string& directory) {
  const auto file =
      open_file(AT_FDCWD, directory + "/" + kName, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat facts = {};
  if (file.has_error() || ::fstat(file.value().get(), &facts) != 0 || !S_ISREG(facts.st_mode) ||
      facts.st_size > static_cast<off_t>(kMostRecord))
    return std::nullopt;
  std::string text(static_cast<size_t>(facts.st_size), '\0');
  if (!read_exactly(file.value().get(), std::as_writable_bytes(std::span(text)), 0))
    return std::nullopt;
  const auto value = parse_json(text, {kMostRecord, 32});
  if (value.has_error() || !value.value().is_object()) return std::nullopt;
  const json::object& object = value.value().get_object();
  if (json_text(object, "format") != kFormat) return std::nullopt;
  JobRecord record;
  const std::string word = json_text(object, "state");
  const auto state = std::find_if(kWords.begin(), kWords.end(),
                                  [&](const auto& one) { return one.second == word; });
  if (state == kWords.end()) return std::nullopt;
  record.state = state->first;
  record.owner = facts.st_uid;
  record.is_own = facts.st_uid == ::geteuid() && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  if (const json::object* has = object_of(object, "has")) record.has = point_of(*has);
  if (const json::value* devices = object.if_contains("devices"); devices && devices->is_array())
    for (const json::value& device : devices->get_array())
      if (device.is_string()) record.devices.emplace_back(device.get_string());
  if (const json::object* layout = object_of(object, "layout")) record.layout = *layout;
  if (const json::object* before = object_of(object, "layout_before"))
    record.layout_before = *before;
  record.worker = {static_cast<pid_t>(number_of(object, "pid")), json_text(object, "started_at"),
                   json_text(object, "mark")};
  record.log = json_text(object, "log");
  if (const json::value* asked = object.if_contains("asked_to_end"))
    record.was_asked_to_end = asked->is_bool() && asked->get_bool();
  if (const json::object* costs = object_of(object, "costs")) {
    const ChangeCosts usual;
    const auto positive = [&](std::string_view key, double otherwise) {
      const double number = real_of(*costs, key, otherwise);
      return number >= 0 && number < 1e15 ? number : otherwise;
    };
    record.costs = ChangeCosts{positive("stop_s", usual.stop_s), positive("start_s", usual.start_s),
                               std::max(positive("link_bytes_per_s", usual.link), 1.0),
                               std::max(positive("memory_bytes_per_s", usual.memory), 1.0)};
  }
  if (const double slowness = real_of(object, "slowness", 1); slowness > 0)
    record.slowness = bounded_slowness(slowness);
  if (const json::object* by_point = object_of(object, "slowness_by_point"))
    for (const auto& field : *by_point)
      if (const double slowness = real_of(*by_point, field.key(), 0); slowness > 0)
        record.slowness_by_point[std::string(field.key())] = bounded_slowness(slowness);
  record.changes = number_of(object, "changes");
  record.failures = number_of(object, "failures");
  record.samples = real_of(object, "samples", 0);
  if (const json::value* removed = object.if_contains("removed"))
    record.was_removed = removed->is_bool() && removed->get_bool();
  if (const json::object* decision = object_of(object, "decision")) record.decision = *decision;
  record.remark = json_text(object, "remark");
  return record;
}

Result<> write_record(const std::string& directory, const JobRecord& record) {
  json::object object{{"format", kFormat}, {"state", state_word(record.state)}};
  object["has"] = record.has ? json::value(point_json(*record.has)) : json::value(nullptr);
  json::array devices;
  for (const std::string& device : record.devices) devices.emplace_back(device);
  object["devices"] = std::move(devices);
  if (!record.remark.empty()) object["remark"] = record.remark;
  if (!record.decision.empty()) object["decision"] = record.decision;
  if (record.slowness != 1) object["slowness"] = record.slowness;
  if (!record.slowness_by_point.empty()) {
    json::object by_point;
    for (const auto& [point, slowness] : record.slowness_by_point) by_point[point] = slowness;
    object["slowness_by_point"] = std::move(by_point);
  }
  object["changes"] = record.changes;
  object["failures"] = record.failures;
  if (record.samples > 0) object["samples"] = record.samples;
  if (record.was_removed) object["removed"] = true;
  if (record.costs)
    object["costs"] = json::object{{"stop_s", record.costs->stop_s},
                                   {"start_s", record.costs->start_s},
                                   {"link_bytes_per_s", record.costs->link},
                                   {"memory_bytes_per_s", record.costs->memory}};
  if (record.worker.pid != 0) {
    object["pid"] = record.worker.pid;
    object["started_at"] = record.worker.started_at;
    if (!record.worker.mark.empty()) object["mark"] = record.worker.mark;
    object["asked_to_end"] = record.was_asked_to_end;
  }
  if (!record.log.empty()) object["log"] = record.log;
  if (record.layout) object["layout"] = *record.layout;
  if (record.layout_before) object["layout_before"] = *record.layout_before;
  return write_file_atomically(AT_FDCWD, directory + "/" + kName, pretty_json(object));
}

}  // namespace ptc::planner
