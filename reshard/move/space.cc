#include "reshard/move/space.h"

#include <vector>

#include "store/base/json.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

Result<uint64_t> free_by(const std::string& node, const Result<std::string>& told) {
  PTC_TRY(const std::string answer, told);
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
  std::vector<Cluster::Question> others;
  for (const auto& [node, bytes] : needed)
    if (node != cluster.self()) others.push_back({node, ""});
  const std::vector<Result<std::string>> told = cluster.ask_all(PeerMethod::kSpace, others);
  Result<> answered = ok();
  auto answer = told.begin();
  for (const auto& [node, bytes] : needed) {
    uint64_t free = 0;
    if (node == cluster.self()) {
      PTC_TRY(const auto space, own.space());
      free = space.free_bytes;
    } else if (const Result<uint64_t> theirs = free_by(node, *answer++); theirs.has_value()) {
      free = theirs.value();
    } else {
      if (answered.has_value()) answered = theirs.error();
      continue;
    }
    if (bytes > free)
      return make_error(Code::kNoSpace,
                        "not enough memory on node {}: {} would come there, {} are free; "
                        "remove checkpoints (ptc rm), or give its store more (ptcfs --memory)",
                        node, format_size(bytes), format_size(free));
  }
  return answered;
}

}  // namespace ptc
