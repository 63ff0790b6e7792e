// What is found damaged is mended from other copies, in the very file where it lies. The wrong
// bytes are no content that anybody was promised, and the kernel reads, and maps, that file for all
// who have it open: a new file would be seen by none of them. Before a byte is written, what the
// other copies hold has the checksums of the commit; afterwards the image is read once more. One
// that does not come out right (its memory may be broken), or whose file is gone, is taken out of
// the stored state, by a decision like any other, which names the nodes that hold all of it besides
// as they were before they were read; then it is missing, as after the loss of a node, and is made
// anew. One that could not be tried (who has it, or the rest, does not answer) stays as it is, for
// most of it may be right and nowhere else by then; it is tried again.
//
// Who has read the wrong bytes may have kept them: the kernel of any node, and the memory in which
// files are gathered (JobListener::contents_mended). So each mending is a decision, too: it raises
// CheckpointEntry::mended, by which nodes that were away see to theirs when they hear of it.
#pragma once

#include <boost/json/object.hpp>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/checkpoint/examine.h"
#include "reshard/cluster/keyed_lock.h"
#include "reshard/job/decisions.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/job/verifier.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Knows which caches here may still hold what was mended. Threads: any; its own lock is held for
/// no longer than it takes to read or write that. All that it is given outlives it.
class Mender {
 public:
  Mender(const JobPlace& place, const JobPeers& peers, JobKnowledge& knowledge,
         const Verifier& verifier, Decisions& decisions, Verifier::SyncAbout sync_about)
      : place_(place),
        peers_(peers),
        knowledge_(knowledge),
        verifier_(verifier),
        decisions_(decisions),
        sync_about_(std::move(sync_about)) {}

  /// What was wrong; of that `replaceable` has been mended, or taken out. Errors: also of what
  /// could not be mended now; the rest has been.
  Result<Findings> repair(const std::string& name, std::stop_token stop = {});
  /// The same, and all nodes know of it: also what is right nowhere, and so not read any more.
  Result<Findings> repair_and_tell(const std::string& name, std::stop_token stop = {});
  /// Job::look_over().
  Result<> look_over(const std::string& name);
  /// Others have right what is damaged of this checkpoint: it is mended soon.
  void note_damage(const std::string& name);
  /// Until what was noted of it has been tried, so that what is right nowhere is not read any more;
  /// at most so long.
  void wait_until_tried(const std::string& name, std::chrono::milliseconds at_most);
  /// Mends what was noted and is due; false: some of it is to be tried again.
  bool mend_noted();
  /// Answers "mend": which of this node's images are right now.
  Result<std::string> answer(const boost::json::object& request, const std::string& id,
                             const std::string& stored_file) const;

  /// Caches here may hold what was mended of these, by name.
  void note_to_refresh(const std::set<std::string>& names);
  /// Sees to them; false: some of it is to be tried again.
  bool refresh();
  /// Answers "refresh".
  Result<> answer_refresh(const std::string& id);
  /// As far as nodes answer; others do when they hear of the decision.
  void refresh_everywhere(const std::string& name);

 private:
  /// Revision of the last look that is known; 0: none.
  int64_t last_look(const std::string& id) const;
  /// `before`: the last look when this one began. Not `whole`: it is looked over again as soon as
  /// if it had not been. kBusy: another, or a decision, says otherwise.
  Result<> note_looked_over(const std::string& name, const CheckpointRecord& record, int64_t before,
                            Findings found, bool whole = true);
  /// Of these checkpoints, by id, those that are no more.
  Result<std::vector<std::string>> removed_of(std::vector<std::string> ids) const;
  /// What became of damaged images, by their numbers; of those in neither list `not_now` says why.
  struct Mended {
    std::vector<uint32_t> right, never;
    std::optional<Error> not_now;
  };
  Mended mend(const CheckpointRecord& record, const StoredState& stored, const Findings& found,
              const std::stop_token& stop) const;
  /// What could not be mended now is read from others until it is. `before` as below.
  void note_wrong_copies(const std::string& name, const CheckpointRecord& record, int64_t before,
                         const Findings& found, const Mended& mended);
  Mended mend_own(const Checkpoint& checkpoint, const StoredState& stored,
                  const std::vector<uint32_t>& damaged_anywhere,
                  const std::vector<DamagedImage>& bad, const std::stop_token& stop) const;
  /// False: it cannot be made right where it lies. An error: it could not be tried.
  Result<bool> mend_image(const Checkpoint& checkpoint, const StoredState& stored,
                          const StoredState& others, const DamagedImage& bad,
                          const std::stop_token& stop) const;
  /// The decision that these images go. False: something has changed meanwhile.
  Result<bool> take_out(const std::string& name, const CheckpointRecord& seen,
                        const std::vector<uint32_t>& images,
                        const std::map<std::string, MetaTransaction::Compare>& fences);
  /// When the daemon ends.
  std::stop_token stop_of_scrub() const;
  Result<> note_mended(const std::string& name, const std::string& id);

  const JobPlace& place_;
  const JobPeers& peers_;
  JobKnowledge& knowledge_;
  const Verifier& verifier_;
  Decisions& decisions_;
  const Verifier::SyncAbout sync_about_;
  Mutex refreshing_;     // caches, one thread at a time; before the lock of decisions
  KeyedLock repairing_;  // by checkpoint: two who ask for the same mend it once
  mutable Mutex mutex_;
  /// When it is to be mended; what is in vain is tried again after twice the time.
  struct Noted {
    std::chrono::steady_clock::time_point not_before;
    std::chrono::seconds pause{1};
  };
  std::map<std::string, Noted> to_mend_ PTC_GUARDED_BY(mutex_);  // by name
  std::set<std::string> trying_ PTC_GUARDED_BY(mutex_);          // of these, right now
  ConditionVariable tried_;
  std::set<std::string> to_refresh_ PTC_GUARDED_BY(mutex_);
  /// By checkpoint id, how many damaged images may have been mended by nodes that did not answer.
  std::map<std::string, size_t> in_doubt_ PTC_GUARDED_BY(mutex_);
  std::map<std::string, std::string> not_said_
      PTC_GUARDED_BY(mutex_);  // that were mended, which is not decided yet; name → id
};

}  // namespace ptc
