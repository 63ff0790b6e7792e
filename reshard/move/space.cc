#include "reshard/move/space.h"

#include "store/base/json.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

Result<uint64_t> free_on(const std::string& node, Cluster& cluster, ImageStore& own) {
  if (node == cluster.self()) {
    PTC_TRY(auto space, own.space());
    return space.free_bytes;
  }
  PTC_TRY(auto answer, cluster.ask(node, PeerMethod::kSpace, ""));
  PTC_TRY(auto space, parse_json(answer));
  if (!space.is_object())
    return make_error(Code::kCorrupt, "node {} does not say what is free", node);
  PTC_TRY(auto free, json_uint(space.as_object(), "free", INT64_MAX));
  return free.value_or(0);
}

}  // namespace

void add_bytes(const ChangePlan& change, const StoredState& stored,
               std::map<std::string, uint64_t>& bytes) {
  for (size_t i = 0; i < change.targets.size(); ++i)
    if (!change.transfers.images[i].kept)
      bytes[change.nodes[change.targets[i].layout.node]] += change.targets[i].layout.bytes;
  for (const ChangePlan::OtherCopy& copy : change.copies)
    bytes[change.nodes[copy.node]] += stored.layouts()[copy.source_image].bytes;
}

Result<> check_space(Cluster& cluster, ImageStore& own,
                     const std::map<std::string, uint64_t>& needed) {
  for (const auto& [node, bytes] : needed) {
    PTC_TRY(uint64_t free, free_on(node, cluster, own));
    if (bytes > free)
      return make_error(Code::kNoSpace,
                        "not enough memory on node {}: {} would come there, {} are free; "
                        "remove checkpoints (ptc rm), or give its store more (ptcfs --memory)",
                        node, format_size(bytes), format_size(free));
  }
  return ok();
}

}  // namespace ptc
