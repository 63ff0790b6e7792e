#include "tests/sim/member.h"

namespace ptc::sim {
namespace {

/// Whoever decides at once looks at the lease, and then at the fence; who asks for that alone will
/// decide later.
thread_local bool looked_at_lease = false;

}  // namespace

std::shared_ptr<const MetaLease> Member::lease() const {
  looked_at_lease = true;
  return Membership::lease();
}

std::optional<MetaTransaction::Compare> Member::fence() const {
  const MetaTransaction::Compare own = *Membership::fence();
  if (!std::exchange(looked_at_lease, false)) note_fence(self(), own.revision);
  return own;
}

MetaTransaction::Compare Member::fence_of(const std::string& node) const {
  if (node == self()) return *fence();
  const MetaTransaction::Compare theirs = Membership::fence_of(node);
  note_fence(node, theirs.revision);
  return theirs;
}

}  // namespace ptc::sim
