// A simulated node's membership: the product's own (reshard/node/membership.h), over the simulated
// agreement store and network; and what planted breaks know of it, which is that a thread asked for
// a fence.
#pragma once

#include <memory>

#include "reshard/node/membership.h"
#include "tests/sim/planted.h"

namespace ptc::sim {

class Member final : public Membership {
 public:
  using Membership::Membership;
  ~Member() override { leave(); }

  std::shared_ptr<const MetaLease> lease() const override;
  std::optional<MetaTransaction::Compare> fence() const override;
  MetaTransaction::Compare fence_of(const std::string& node) const override;
};

}  // namespace ptc::sim
