#include "reshard/job/change.h"

namespace ptc {

Result<ChangePlan> plan_change(const Checkpoint& checkpoint, const StoredState& stored,
                               const LayoutSpec& spec) {
  ChangePlan plan;
  if (state_key(stored.spec) == state_key(spec)) {
    // Every state keeps its images, whatever form they have (a set of shards need not be joined).
    plan.nothing = true;
    for (const ImageLayout& layout : stored.layouts) {
      plan.transfers.totals.total_bytes += layout.bytes;
      plan.transfers.totals.kept_bytes += layout.bytes;
      ++plan.transfers.totals.kept_images;
    }
    return plan;
  }
  PTC_TRY(plan.targets, checkpoint.target_images(spec));
  std::vector<ImageLayout> layouts;
  layouts.reserve(plan.targets.size());
  for (const StateFile& target : plan.targets) layouts.push_back(target.layout);
  PTC_TRY(plan.transfers, plan_transfers(*stored.index, layouts));
  return plan;
}

}  // namespace ptc
