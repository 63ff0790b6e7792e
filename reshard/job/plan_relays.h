// How the nodes that carry out a plan find out what of it the others have already.
#pragma once

#include "reshard/exec/fetch_images.h"
#include "reshard/job/job_impl.h"

namespace ptc {

/// Of one part, while it is made. A node that is asked answers with the image once the window is
/// there, or after a second that it is not yet; who asks waits for a few seconds, and then takes it
/// from its source. So nobody waits for ever, and nobody for one that waits for him: what is
/// relayed came from a source.
class Job::Impl::PlanRelays final : public Relays {
 public:
  PlanRelays(Job::Impl& job, const PlanName& plan, const ChangePlan& change);
  ~PlanRelays() override;  // nothing more comes

  uint32_t node_of(uint32_t target) const override;
  Result<ImageRef> wait_for(uint32_t target, uint64_t window, std::stop_token stop) override;
  void arrived(uint32_t target, uint64_t window, const ImageId& image) override;

 private:
  Job::Impl& job_;
  const PlanName plan_;
  const ChangePlan& change_;
};

}  // namespace ptc
