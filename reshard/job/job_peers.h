// What the nodes of a cluster ask each other about a job:
//
//   file     {"id", "file"} → a file of checkpoints/<id>/ (manifest, headers, stored state)
//   files    {"id", "files": [[name, bytes], …]} '\n' contents: keep them; before a decision names
//            them. Of a commit also "from", "fence": taken_dirs.h
//   part     a WantedState of a checkpoint → PlanPart: make this node's images of the plan
//   drop     {"id", "epoch"}: the plan will not be carried out: its images go
//   arrived  {"id", "plan", "target", "window"} → the image that has it by now: plan_relays.h
//   examine  {"id", "stored", "paced", "images"?} → what this node's images, or these of them,
//            really contain: checkpoint/examine.h
//   mend     {"id", "stored", "anywhere", "damaged"} → which of the damaged images are right now
//   refresh  {"id"}: damaged bytes were mended; answered when nobody here reads the wrong ones any
//            more
//   uses     {"id"} → "yes" while a file of the checkpoint is open here
//   take, hash, adopt, hide, untake: taken_dirs.h
//   commit   {"id"} → "open", "committed" or "given up"; asked of the node that leads
//
// A request is a line of JSON, and bytes behind it where it has some. The job's name and a line's
// end are in front of it.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/base/error.h"

namespace ptc {

/// The other nodes, as a job asks them. No state. Threads: any.
class JobPeers {
 public:
  /// `cluster`, which outlives this, is null in a cluster of one: then nobody is asked.
  JobPeers(std::string job, Cluster* cluster) : job_(std::move(job)), cluster_(cluster) {}

  /// The nodes that are there, without this one.
  std::vector<std::string> others() const;
  /// `time`: that it may take; 0: what is usual for the method. Errors of the other node come back
  /// with its name; kUnavailable: it cannot be reached, or said nothing in that time.
  Result<std::string> ask(const std::string& node, std::string_view method, std::string body,
                          std::stop_token stop = {}, std::chrono::milliseconds time = {}) const;

 private:
  const std::string job_;
  Cluster* const cluster_;
};

}  // namespace ptc
