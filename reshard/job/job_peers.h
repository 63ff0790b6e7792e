// What the nodes of a cluster ask each other about a job:
//
//   file     {"id", "file", "offset", "most", "sum"} → a piece of a file of checkpoints/<id>/
//            (manifest, headers, stored state, plan): file_pieces.h
//   files    {"id", "files": [[name, bytes, sum], …], "nodes"?} '\n' contents: keep them; before
//            a decision names them. Those of more than a few bytes it takes in pieces from "nodes",
//            which have them, and there are no contents. Of a commit also "from", "fence":
//            taken_dirs.h
//   part     a WantedState of a checkpoint → PlanPart: make this node's images of the plan
//   drop     {"id", "epoch", "stored"?}: the plan will not be carried out: its images go, and the
//            file that would have said where they lie
//   arrived  {"id", "plan", "target", "window"} → the image that has it by now: plan_relays.h
//   examine  {"id", "stored", "paced", "images"?} → what this node's images, or these of them,
//            really contain: checkpoint/examine.h
//   mend     {"id", "stored", "anywhere", "damaged"} → which of the damaged images are right now
//   refresh  {"id"}: damaged bytes were mended; answered when nobody here reads the wrong ones any
//            more
//   uses     {"id"} → "yes" while a file of the checkpoint is open here
//   take, read, hash, adopt, hide, untake, rights: taken_dirs.h
//   commit   {"id"} → "open", "committed" or "given up"; asked of the node that leads
//
// A request is a line of JSON, and bytes behind it where it has some. In front of it is a line that
// says which job (WhichJob). cluster/peer_table.h has what else is said of each.
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
  /// `cluster` outlives it.
  JobPeers(WhichJob job, Cluster& cluster) : job_(std::move(job)), cluster_(cluster) {}

  const WhichJob& job() const { return job_; }
  /// The nodes that are there, without this one.
  std::vector<std::string> others() const;
  /// As the method's row says (ask_by()). Errors come back with the node's name.
  Result<std::string> ask(const std::string& node, PeerMethod method, std::string_view body,
                          std::stop_token stop = {}) const;

  /// Several at the same time, each the same, or each its own: by their numbers. `at_most`: waits
  /// no longer; 0: as the row says. `then`: what each is asked next.
  std::vector<Result<std::string>> ask_all(const std::vector<std::string>& nodes, PeerMethod method,
                                           std::string_view body, std::stop_token stop = {}) const;
  std::vector<Result<std::string>> ask_all(const std::vector<std::string>& nodes, PeerMethod method,
                                           const std::vector<std::string>& bodies,
                                           std::stop_token stop = {},
                                           std::chrono::milliseconds at_most = {},
                                           AfterAnswer then = {}) const;

 private:
  std::vector<Result<std::string>> ask_all(PeerMethod method,
                                           const std::vector<Cluster::Question>& questions,
                                           std::stop_token stop, std::chrono::milliseconds at_most,
                                           AfterAnswer then) const;

  const WhichJob job_;
  Cluster& cluster_;
};

}  // namespace ptc
