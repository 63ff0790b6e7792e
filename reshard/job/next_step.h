// What a job does in the background, decided from what is known: a pure function, a step at a time.
//
// The newest checkpoint is first, but where it has no room in devices in which older ones lie: then
// these leave them, which they would do after it anyway, and it is tried once more.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reshard/job/known_job.h"
#include "store/base/error.h"

namespace ptc {

/// How far the steps since the last wait have come.
struct Round {
  bool began = false;              // a step was taken
  bool leads = false;              // this node, from lead to give back
  bool another_leads = false;      // it was to lead, and does not
  bool gives_back = false;         // an error that is no loss of one checkpoint: no more is brought
  bool newest_is_brought = false;  // and the layout in force
  /// It had no room where it shall be: what older ones have in devices leaves these first.
  bool newest_lacks_room = false;
  bool room_is_made = false;                   // what has left them is gone there
  std::set<std::string, std::less<>> brought;  // ids of checkpoints that are where they shall be
  bool trimmed = false, looked_at_parts = false;
};

struct JobStep {
  enum class Kind {
    kWait,          // until then, or until woken; the round is over
    kLead,          // become the one that decides what the job's nodes do
    kSettleNewest,  // bring the newest checkpoint into the layout that is wanted, and flip
    kSettleOlder,   // give an older one the copies that are wanted, on nodes in service
    kMakeRoom,      // copies beyond those that are wanted go, for the newest
    kGiveBack,      // lead no more
    kTrim,          // remove checkpoints that are more than `keep`
    kDropParts,     // of those made here for others, the ones whose leader is gone
  };
  Kind kind;
  std::optional<KnownJob::Clock::time_point> until = std::nullopt;  // kWait
  std::optional<CheckpointRecord> older = std::nullopt;             // kSettleOlder
  std::vector<std::pair<std::string, std::string>> too_many = {};   // kTrim: name and id
};

/// Some of a checkpoint beside the newest is in the memory of a device, within reach.
bool is_older_in_devices(const KnownJob& known);

/// `shares_bytes`: Cluster::shares_bytes(); `parts`: some were made here for others, and are not
/// decided on.
JobStep next_step(const KnownJob& known, bool shares_bytes, bool parts, const Round& round,
                  KnownJob::Clock::time_point now);

/// What becomes of an attempt to settle.
enum class Outcome {
  kDone,
  kAbandoned,  // something newer came: what is to be done is looked at anew
  kTryAgain,   // in a while: a node that does not answer is gone soon, and then it is another plan
  kFailed,     // until somebody wants it again
};
/// `error` null: there was none.
Outcome outcome_of(const Error* error, bool shares_bytes);
/// What is known after it. `wanted`: the layout, by name.
void note_outcome(KnownJob& known, Outcome outcome, const Error* error, bool shares_bytes,
                  const std::string& job, const std::string& wanted, KnownJob::Failed of,
                  KnownJob::Clock::time_point now);

}  // namespace ptc
