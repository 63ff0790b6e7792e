#include "reshard/job/job_attributes.h"

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/json.h"

namespace ptc {
namespace {

Result<std::optional<uint32_t>> attribute_in(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) return std::optional<uint32_t>();
  const auto number = whole_number(*value);
  if (!number || *number >= UINT32_MAX)
    return make_error(Code::kCorrupt, "a job's attributes: '{}' is no number", key);
  return std::optional(static_cast<uint32_t>(*number));
}

}  // namespace

std::string JobAttributes::to_text() const {
  json::object all;
  for (const auto& [name, attributes] : by_name_) {
    json::object one;
    if (attributes.uid) one["uid"] = *attributes.uid;
    if (attributes.gid) one["gid"] = *attributes.gid;
    if (attributes.mode) one["mode"] = *attributes.mode;
    if (attributes.quota) one["quota"] = *attributes.quota;
    if (attributes.changes) one["changes"] = *attributes.changes;
    all[name] = std::move(one);
  }
  return json::serialize(all);
}

Result<JobAttributes> JobAttributes::from_text(std::string_view text) {
  PTC_TRY(const json::value all, parse_json(text));
  if (!all.is_object()) return make_error(Code::kCorrupt, "a job's attributes: no JSON object");
  JobAttributes attributes;
  for (const auto& [name, value] : all.get_object()) {
    if (!value.is_object())
      return make_error(Code::kCorrupt, "a job's attributes: no object at '{}'",
                        std::string_view(name));
    FileAttributes one;
    PTC_TRY(one.uid, attribute_in(value.get_object(), "uid"));
    PTC_TRY(one.gid, attribute_in(value.get_object(), "gid"));
    PTC_TRY(one.mode, attribute_in(value.get_object(), "mode"));
    PTC_TRY(one.changes, attribute_in(value.get_object(), "changes"));
    if (one.mode) *one.mode &= 07777;
    const json::value* quota = value.get_object().if_contains("quota");
    if (quota != nullptr && quota->is_string()) one.quota = std::string(quota->get_string());
    attributes.update(std::string(name), one);
  }
  return attributes;
}

}  // namespace ptc
