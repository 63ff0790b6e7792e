// One node's part in a plan: the images that shall be on it, made of what lies here and elsewhere;
// and all parts put together.
//
// Every node computes the same plan, from the same files: so a request names the state of affairs
// and what is wanted, and an answer only the images made, by their numbers in the plan.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/activity.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/plan_part.h"
#include "reshard/job/plan_relays.h"
#include "reshard/job/taken_dirs.h"
#include "reshard/job/verifier.h"
#include "reshard/move/change.h"
#include "store/base/error.h"

namespace ptc {

using Fences = std::vector<MetaTransaction::Compare>;

/// No state of its own, and no lock: what it made for others is on the shelf. All that it is given
/// outlives it. Threads: any.
class PartMaker {
 public:
  struct Uses {
    const JobPlace& place;
    const JobPeers& peers;
    JobKnowledge& knowledge;
    const CheckpointFiles& files;
    const Verifier& verifier;
    PartShelf& shelf;
    Arrivals& arrivals;
    TakenDirs& taken;
    Activities& activities;
    Verifier::SyncAbout sync_about;
  };
  explicit PartMaker(Uses uses) : uses_(std::move(uses)) {}

  /// All nodes that get new images make them, at the same time. `stored`: what the change was
  /// planned of; the checkpoint may have got another since, when another node leads. `fences`: of
  /// those nodes. `epoch`: of who leads; of a commit: 0, and `decides` is what its decision names
  /// of this node. On an error nothing of it stays anywhere.
  Result<NodeParts> make_all(const CheckpointRecord& record, const StoredState& stored,
                             const WantedState& wanted, const ChangePlan& change,
                             Activity& activity, Fences& fences, int64_t epoch,
                             const std::optional<MetaTransaction::Compare>& decides = {}) const;
  /// What was made has the checksums that were committed. Of copies of some files only what
  /// completes a tensor can be compared: the rest of it is read where it lies, if `known`, that is
  /// the other nodes know the checkpoint. kCancelled: after `stop`, which may be long before all is
  /// read.
  Result<> compare(const CheckpointRecord& record, const StoredState& stored,
                   const ChangePlan& change, const NodeParts& parts, bool known,
                   const std::stop_token& stop) const;
  /// Where the bytes lie once it is decided on.
  Result<std::vector<StoredImage>> compose(const Checkpoint& checkpoint, const StoredState& stored,
                                           const ChangePlan& change, const NodeParts& parts) const;
  /// There will be no decision: what was made goes, here and on the other nodes. `epoch`: of the
  /// leader that asked for it.
  void give_up(const CheckpointRecord& record, const NodeParts& parts, int64_t epoch) const;
  /// `stored_file`: what would have said so, if it was written (Decisions::NewStored).
  void give_up(const CheckpointRecord& record, const StoredState& made, int64_t epoch,
               const std::string& stored_file = "") const;

  /// Answers "part".
  Result<PlanPart> make_for(std::string_view request) const;

 private:
  Result<PlanPart> make(const PlanName& plan, const Checkpoint& checkpoint,
                        const StoredState& stored, const ChangePlan& change,
                        Activity& activity) const;
  const Uses uses_;
};

}  // namespace ptc
