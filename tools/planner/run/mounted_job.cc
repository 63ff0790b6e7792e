#include "tools/planner/run/mounted_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>
#include <string_view>

#include "store/base/file.h"
#include "tools/planner/run/json_fields.h"

namespace ptc::planner {
namespace {

/// Techniques that come along of which each rank has the whole optimizer state of its part.
const std::set<std::string_view> kReplicated{"ddp", "tensor", "gpipe", "accumulation"};
constexpr size_t kMostBytes = 256 << 20;  // status.json has a line for each checkpoint and node

Result<json::object> read_object(const std::string& path) {
  PTC_TRY(const std::string text, read_text_file(AT_FDCWD, path, kMostBytes));
  Result<json::value> value = parse_json(text, {kMostBytes, 64});
  if (value.has_error()) return std::move(value).error().with_context(path);
  if (!value.value().is_object()) return invalid_argument("{} is no object", path);
  return std::move(value.value().get_object());
}

/// What the daemon says of a file that it refused.
std::string reason_of(const std::string& path, const char* key, int error) {
  if (const auto status = read_object(path); status.has_value())
    if (const json::value* why = status.value().if_contains(key)) {
      if (why->is_string()) return std::string(why->get_string());
      if (why->is_object()) {
        const std::string message = json_text(why->get_object(), "what");
        if (!message.empty()) return message;
      }
    }
  return std::strerror(error);
}

/// As an editor saves: the close is what is answered.
Result<> save(const std::string& path, const json::object& content, const std::string& status,
              const char* key) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_WRONLY | O_TRUNC));
  const std::string text = pretty_json(content);
  const auto written = write_exactly(fd.get(), std::as_bytes(std::span(text)), 0);
  const int closed = ::close(fd.release());
  const int error = errno;
  if (written.has_error()) return make_error(Code::kUnavailable, "{}", written.error().message());
  if (closed == 0) return ok();
  const bool refused = error == EINVAL || error == ENOSPC;
  return make_error(refused ? Code::kInvalidArgument : Code::kUnavailable, "{}",
                    reason_of(status, key, error));
}

}  // namespace

Result<MountedJob> look_at_job(const std::string& directory) {
  MountedJob job;
  PTC_TRY(const json::object status, read_object(directory + "/status.json"));
  PTC_TRY(job.layout, read_object(directory + "/layout.json"));
  job.state = json_text(status, "state");
  job.in_force = json_text(status, "layout");
  job.checkpoint = json_text(status, "checkpoint");
  job.revision = number_of(status, "revision");
  job.is_settled = job.state == "idle" &&
                   number_of(status, "revision") == number_of(status, "in_force_revision");
  if (const json::value* error = status.if_contains("last_error"); error != nullptr)
    job.last_error = error->is_string()   ? std::string(error->get_string())
                     : error->is_object() ? json_text(error->get_object(), "what")
                                          : "";
  constexpr size_t kMostDigits = 64;
  const auto consumed = read_text_file(AT_FDCWD, directory + "/dataset/consumed", kMostDigits);
  if (consumed.has_value()) {
    const std::string& text = consumed.value();
    std::from_chars(text.data(), text.data() + text.size(), job.consumed);
  }
  return job;
}

Result<json::object> layout_of_point(json::object layout, const CurvePoint& point,
                                     const std::vector<std::string>& devices) {
  for (const char* key : {"cp", "vpp"})
    if (number_of(layout, key) > 1)
      return invalid_argument("layout.json has \"{}\": {}, which profiles do not tell of", key,
                              number_of(layout, key));
  if (const uint64_t ep = number_of(layout, "ep"); ep > 1 && (point.dp * point.tp) % ep != 0)
    return invalid_argument("layout.json has \"ep\": {}, which {} has no room for", ep, point.way);
  if (number_of(layout, "pp") != point.pp) layout.erase("stages");
  layout["tp"] = point.tp;
  layout["pp"] = point.pp;
  layout["dp"] = point.dp;
  // An old key of whoever had the job before; what profiles tell of says which ranks have what.
  layout.erase("dp_shard");
  layout.erase("shard_over");
  if (point.technique == "fsdp") layout["optimizer"] = "fsdp";
  else if (point.technique == "zero1" || point.technique == "zero") layout["optimizer"] = "zero1";
  else if (kReplicated.contains(point.technique)) layout["optimizer"] = "replicated";
  json::array places;
  for (const std::string& device : devices) places.emplace_back(device);
  layout["devices"] = std::move(places);
  return layout;
}

Result<Movement> movement_to(const AskMount& ask, const std::string& name, const MountedJob& job,
                             const CurvePoint& point, const std::vector<std::string>& devices) {
  if (job.checkpoint.empty()) return Movement{};
  PTC_TRY(auto layout, layout_of_point(job.layout, point, devices));
  if (devices.empty()) layout.erase("devices");
  const json::object request{{"do", "plan"}, {"job", name}, {"layout", layout}};
  PTC_TRY(const json::object plan, ask(request));
  MovementSum<std::string> sum;
  if (const json::value* pairs = plan.if_contains("pairs"); pairs != nullptr && pairs->is_array())
    for (const json::value& pair : pairs->get_array())
      if (pair.is_object())
        sum.add(json_text(pair.get_object(), "source"), json_text(pair.get_object(), "target"),
                number_of(pair.get_object(), "bytes"));
  return sum.busiest();
}

Result<> save_layout(const std::string& directory, const json::object& layout) {
  return save(directory + "/layout.json", layout, directory + "/status.json", "layout_error");
}

uint64_t batch_of(const std::string& directory) {
  const auto order = read_object(directory + "/dataset/order.json");
  return order.has_value() ? number_of(order.value(), "batch") : 0;
}

Result<> save_batch(const std::string& directory, uint64_t batch) {
  const std::string dataset = directory + "/dataset", path = dataset + "/order.json";
  if (::access(path.c_str(), F_OK) != 0) return ok();
  PTC_TRY(json::object order, read_object(path));
  if (number_of(order, "batch") == batch) return ok();
  order["batch"] = batch;
  return save(path, order, dataset + "/status.json", "error");
}

Result<std::vector<std::string>> nodes_up(const std::string& mount) {
  auto all = read_object(mount + "/.ptc/nodes.json");
  if (all.has_error()) return make_error(Code::kUnavailable, "{}", all.error().message());
  std::vector<std::string> names;
  const json::value* nodes = all.value().if_contains("nodes");
  if (nodes == nullptr || !nodes->is_array()) return names;
  for (const json::value& node : nodes->get_array())
    if (node.is_object() && json_text(node.get_object(), "state") == "up" &&
        !node.get_object().contains("drain"))
      names.push_back(json_text(node.get_object(), "name"));
  return names;
}

}  // namespace ptc::planner
