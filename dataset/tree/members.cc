#include "dataset/tree/extent_file.h"

namespace ptc {

Result<std::vector<std::string>> member_extensions(const SampleSource& source, uint64_t id) {
  if (!source.field_names().empty()) return source.field_names();
  PTC_TRY(auto payloads, payloads_of(source, id));
  std::vector<std::string> names;
  for (Payload& payload : payloads) names.push_back(std::move(payload.name));
  return names;
}

Result<std::vector<Member>> members_of(const SampleSourceRef& source, uint64_t id) {
  PTC_TRY(auto payloads, payloads_of(*source, id));
  std::vector<Member> members;
  for (Payload& payload : payloads) {
    std::string name = payload.name;
    members.push_back(
        {std::move(name), std::make_shared<const ExtentFile>(source, std::move(payload))});
  }
  return members;
}

}  // namespace ptc
