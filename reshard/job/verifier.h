// Whether what is stored is what was committed. Every node reads what lies on it; a part of a
// tensor that is stored twice and differs is right where the tensor's checksum, a sum over its
// parts, comes out with it.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/examine.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "store/base/error.h"

namespace ptc {

/// No state and no lock; changes nothing but counts. All that it is given outlives it. Threads:
/// any.
class Verifier {
 public:
  /// `sync_about`: what is decided of a checkpoint is known when it returns.
  using SyncAbout = std::function<Result<>(const std::string& id)>;
  Verifier(const JobPlace& place, const JobPeers& peers, JobKnowledge& knowledge,
           SyncAbout sync_about)
      : place_(place), peers_(peers), knowledge_(knowledge), sync_about_(std::move(sync_about)) {}

  /// A checkpoint as it is known now. kNotFound; kCorrupt or kUnavailable: it cannot be shown here.
  Result<CheckpointRecord> find(std::string_view name) const;
  /// With just this stored state. kBusy: it is not, or not yet, known here.
  Result<CheckpointRecord> find_stored(const std::string& id, const std::string& stored_file) const;

  /// `pace`: null: as fast as it goes. kBusy: it lies elsewhere by now; kNotFound: it was removed.
  Result<Findings> examine(const CheckpointRecord& record, Pace* pace,
                           std::stop_token stop = {}) const;
  /// Answers "examine".
  Result<std::string> answer(const boost::json::object& request, const std::string& id,
                             const std::string& stored_file) const;
  /// Of each node these images, summed up by `cuts`; none named: all that it holds. After `stop`,
  /// no node begins another batch of them.
  Result<std::vector<ImageContent>> read_images(
      const CheckpointRecord& record, const StoredState& stored,
      const std::map<std::string, std::vector<uint32_t>>& by_node, const CommonCuts& cuts,
      Pace* pace = nullptr, std::stop_token stop = {}) const;
  /// One of this node.
  Result<ImageContent> read_image(const Checkpoint& checkpoint, const StoredState& stored,
                                  uint32_t number, const CommonCuts& cuts, Pace* pace,
                                  std::stop_token stop = {}) const;

 private:
  /// Files that are gone because it was moved or removed are no damage.
  Result<> check_it_is_still_so(const CheckpointRecord& record) const;
  /// `only`: these, of this node's images; none: all.
  Result<std::vector<ImageContent>> read_own_images(const Checkpoint& checkpoint,
                                                    const StoredState& stored,
                                                    const CommonCuts& cuts, Pace* pace,
                                                    const std::vector<uint32_t>& only,
                                                    std::stop_token stop) const;

  const JobPlace& place_;
  const JobPeers& peers_;
  JobKnowledge& knowledge_;
  const SyncAbout sync_about_;
};

}  // namespace ptc
