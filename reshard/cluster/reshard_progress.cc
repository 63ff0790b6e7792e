#include "reshard/cluster/reshard_progress.h"

#include <algorithm>

#include "store/base/json.h"

namespace ptc {

json::object ReshardProgress::to_json() const {
  return {{"phase", phase},           {"checkpoint", checkpoint},   {"from", from},      {"to", to},
          {"bytes_done", bytes_done}, {"bytes_total", bytes_total}, {"seconds", seconds}};
}

Result<ReshardProgress> ReshardProgress::from_json(const json::object& object) {
  ReshardProgress progress;
  auto text = [&](const char* key) {
    const json::value* value = object.if_contains(key);
    return value != nullptr && value->is_string() ? std::string(value->get_string())
                                                  : std::string();
  };
  progress.phase = text("phase");
  progress.checkpoint = text("checkpoint");
  progress.from = text("from");
  progress.to = text("to");
  const json::value* leads = object.if_contains("leads");
  progress.leads = leads != nullptr && leads->is_bool() && leads->get_bool();
  const json::value* seconds = object.if_contains("seconds");
  if (seconds != nullptr && seconds->is_number()) progress.seconds = seconds->to_number<double>();
  PTC_TRY(auto done, json_uint(object, "bytes_done"));
  PTC_TRY(auto total, json_uint(object, "bytes_total"));
  progress.bytes_done = done.value_or(0);
  progress.bytes_total = total.value_or(0);
  return progress;
}

std::optional<ReshardProgress> add_up(const std::vector<ReshardProgress>& nodes) {
  if (nodes.empty()) return std::nullopt;
  auto leader = std::find_if(nodes.begin(), nodes.end(),
                             [](const ReshardProgress& one) { return one.leads; });
  ReshardProgress whole = leader != nodes.end() ? *leader : nodes.front();
  whole.bytes_done = 0;
  for (const ReshardProgress& one : nodes)
    if (one.checkpoint == whole.checkpoint && one.to == whole.to)
      whole.bytes_done += one.bytes_done;  // else of another moment
  whole.bytes_done = std::min(whole.bytes_done, whole.bytes_total);
  return whole;
}

}  // namespace ptc
