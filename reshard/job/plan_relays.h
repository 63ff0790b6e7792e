// How the nodes that carry out a plan find out what of it the others have already.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "reshard/checkpoint/manifest.h"
#include "reshard/exec/fetch_images.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/plan_part.h"
#include "reshard/move/change.h"
#include "store/base/mutex.h"

namespace ptc {

/// What has come of the images that this node makes, for nodes that take it from here: the last
/// plan of each checkpoint. Threads: any.
class Arrivals {
 public:
  void begin(const PlanName& plan);
  void end(const PlanName& plan);  // nothing more comes
  void arrived(const PlanName& plan, uint32_t target, uint64_t window, const ImageId& image);
  /// Answers "arrived": with the image once the window is in it. kBusy: it is not yet, after a
  /// second; kUnavailable: it never will be.
  Result<std::string> answer(const boost::json::object& request, const std::string& id);
  /// The job ends: nobody waits any more.
  void stop();

 private:
  struct OfPlan {
    std::string digest;
    std::map<std::pair<uint32_t, uint64_t>, std::string> windows;  // (target, begin) → image
    bool ended = false;
  };
  Mutex mutex_;
  ConditionVariable changed_;
  std::map<std::string, OfPlan> plans_ PTC_GUARDED_BY(mutex_);  // by checkpoint id
  bool stopped_ PTC_GUARDED_BY(mutex_) = false;
};

/// The name of a plan among those that pass on what comes of it. Who passes on what follows also
/// from the images that are within reach, of which nodes may know at different times: the windows
/// of one that sees others than this node does are other bytes, and it is asked in vain.
PlanName name_among_relays(const PlanName& plan, const StoredState& stored);

/// Of one part, while it is made. A node that is asked answers with the image once the window is
/// there, or after a second that it is not yet; who asks waits for a few seconds, and then takes it
/// from its source. So nobody waits for ever, and nobody for one that waits for him: what is
/// relayed came from a source. All that it is given outlives it.
class PlanRelays final : public Relays {
 public:
  /// `plan`: of name_among_relays().
  PlanRelays(Arrivals& arrivals, const JobPeers& peers, const PlanName& plan,
             const ChangePlan& change);
  ~PlanRelays() override;  // nothing more comes

  uint32_t node_of(uint32_t target) const override;
  Result<ImageRef> wait_for(uint32_t target, uint64_t window, std::stop_token stop) override;
  void arrived(uint32_t target, uint64_t window, const ImageId& image) override;

 private:
  Arrivals& arrivals_;
  const JobPeers& peers_;
  const PlanName plan_;
  const ChangePlan& change_;
};

}  // namespace ptc
