#include "reshard/job/job_attributes.h"

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <set>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr uint32_t kRead = 0444, kPass = 0111;

/// Texts that a job has, also where nothing was decided of them.
constexpr std::string_view kTexts[] = {"layout.json", "rules.json", "dataset/source.json",
                                       "dataset/order.json", "dataset/consumed"};

Result<std::optional<uint32_t>> attribute_in(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr) return std::optional<uint32_t>();
  const auto number = whole_number(*value);
  if (!number || *number >= UINT32_MAX)
    return make_error(Code::kCorrupt, "a job's attributes: '{}' is no number", key);
  return std::optional(static_cast<uint32_t>(*number));
}

}  // namespace

std::vector<std::string> JobAttributes::opened_since(const JobAttributes& before) const {
  std::set<std::string_view> names(std::begin(kTexts), std::end(kTexts));
  for (const auto* all : {&before.by_name_, &by_name_})
    for (const auto& [name, attributes] : *all)
      if (is_text(name)) names.insert(name);
  std::vector<std::string> opened;
  for (const std::string_view name : names)
    if (opens(name, before)) opened.emplace_back(name);
  return opened;
}

bool JobAttributes::opens(std::string_view text, const JobAttributes& before) const {
  bool all_could = true, more_bits = false, other_owner = false, other_group = false;
  const auto look_at = [&](std::string_view name, uint32_t bits, uint32_t mode) {
    FileAttributes then = before.of(name), now = of(name);
    const uint32_t mode_then = then.mode.value_or(mode), mode_now = now.mode.value_or(mode);
    all_could &= (mode_then & bits & 0077) == (bits & 0077);
    more_bits |= (mode_now & ~mode_then & bits) != 0;
    if (bits == kRead) {  // a text is the job's, unless it is said to be another's
      const FileAttributes job_then = before.of(""), job_now = of("");
      if (!then.uid) then.uid = job_then.uid;
      if (!then.gid) then.gid = job_then.gid;
      if (!now.uid) now.uid = job_now.uid;
      if (!now.gid) now.gid = job_now.gid;
    }
    other_owner |= then.uid != now.uid;
    other_group |= then.gid != now.gid;
  };
  // Of a directory of which nothing was decided nobody knows here whom it lets pass.
  look_at("", kPass, 0);
  if (const size_t end = text.find('/'); end != std::string_view::npos)
    look_at(text.substr(0, end), kPass, 0);
  look_at(text, kRead, kTextMode);
  const bool for_more_than_owners = (of(text).mode.value_or(kTextMode) & 0077 & kRead) != 0;
  return more_bits || (!all_could && (other_owner || (other_group && for_more_than_owners)));
}

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
