// What describes a job's checkpoints on this node: the directories checkpoints/<id>/, and the
// images that the files in them name.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/move/plan_report.h"
#include "store/base/error.h"

namespace ptc {

/// No state but what is on disk, and no lock: what becomes of a checkpoint is decided one decision
/// at a time (decisions.h). All that it is given outlives it. Threads: any.
class CheckpointFiles {
 public:
  static constexpr const char* kDraftMark = "draft";  // in the directory of a checkpoint

  CheckpointFiles(const JobPlace& place, const JobPeers& peers, const JobKnowledge& knowledge)
      : place_(place), peers_(peers), knowledge_(knowledge) {}

  /// Errors: kCorrupt: a file is not what was written; kNotFound: no node that is there has it;
  /// kUnavailable: one that may have it does not answer.
  Result<CheckpointRecord> load(const std::string& id, int64_t generation,
                                const std::string& stored_file) const;
  Result<std::shared_ptr<const StoredState>> load_stored(const Checkpoint& checkpoint,
                                                         const std::string& id,
                                                         const std::string& stored_file) const;
  std::optional<PlanTexts> load_plan(const std::string& id, const std::string& stored_file) const;
  /// null: it is lost, or on a node that is away.
  Result<ImageRef> open_image(const StoredImage& image, uint64_t bytes) const;

  /// checkpoints/<id>/, marked as a draft until confirm().
  Result<> make_directory_of(const std::string& id) const;
  bool has(const std::string& id, const std::string& file) const;
  /// It was decided on: neither its directory nor its images here are drafts any more.
  void confirm(const CheckpointRecord& record) const;

  /// A file of this node, or of another that has it; then it is here, too, if there is room.
  Result<std::string> read(const std::string& id, const std::string& file, size_t limit) const;
  Result<std::string> read_own(const std::string& id, const std::string& file) const;
  /// To all nodes. kUnavailable: none of those that live takes them, though `stored`, which they
  /// describe, has images elsewhere; these would be lost with this node.
  /// `decides`: of a checkpoint that is being committed, what its decision will name of this node.
  Result<> give(const std::string& id, const std::vector<std::string>& files,
                const StoredState& stored,
                const std::optional<MetaTransaction::Compare>& decides = std::nullopt) const;
  /// The other side of that: what "files" names, one behind the other in `contents`.
  Result<> keep(const std::string& id, const boost::json::object& request,
                std::string_view contents) const;

  /// Of `these` images those on this node go that `those` do not name.
  void remove_images_not_in(const StoredState& these, const StoredState& those) const;
  /// Files that said where its bytes lay before `stored_file`.
  Result<> remove_stale(const std::string& id, const std::string& stored_file) const;
  /// Of a checkpoint that was not known before: files and images here that a later decision
  /// replaced. At start also drafts that never came to one.
  Result<> remove_earlier_states(const CheckpointRecord& record, bool drafts_too) const;
  /// All of a checkpoint that is no more: what is open keeps its images.
  void remove(const CheckpointRecord& record) const;
  /// The same of one that could not be read.
  Result<> remove_unreadable(const std::string& id) const;

 private:
  const JobPlace& place_;
  const JobPeers& peers_;
  const JobKnowledge& knowledge_;
};

/// Of a directory; none: there is no such directory.
Result<std::vector<std::string>> names_in(const std::string& directory);

}  // namespace ptc
