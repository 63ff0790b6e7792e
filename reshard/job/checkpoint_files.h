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

#include "reshard/cluster/keyed_lock.h"
#include "reshard/job/activity.h"
#include "reshard/job/file_pieces.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/move/plan_report.h"
#include "store/base/error.h"

namespace ptc {

/// No state but what is on disk: what becomes of a checkpoint is decided one decision at a time
/// (decisions.h). What is on other nodes comes here before it is loaded, and while nothing is
/// locked, for it may take long. All that it is given outlives it. Threads: any.
class CheckpointFiles {
 public:
  static constexpr const char* kDraftMark = "draft";  // in the directory of a checkpoint

  CheckpointFiles(const JobPlace& place, const JobPeers& peers, const JobKnowledge& knowledge,
                  Activities& activities)
      : place_(place), peers_(peers), knowledge_(knowledge), activities_(activities) {}

  /// What load() reads.
  static std::vector<NamedFile> files_of(const CheckpointEntry& entry);
  static NamedFile file_of(const CheckpointEntry& entry, std::string name);
  /// Of these what is neither here, as it was agreed on, nor was asked for, in their order.
  std::vector<NamedFile> lacking(std::vector<NamedFile> files, const FetchedFiles& fetched) const;
  /// Asks other nodes for them, where there are any, and keeps here what there is room for. Waits
  /// for a long time, and shows how far it is.
  void fetch(const std::vector<NamedFile>& files, FetchedFiles& fetched) const;

  /// Errors: kCorrupt: a file is not what was written; kNotFound: no node that is there has it;
  /// kUnavailable: one that may have it does not answer, or nobody was asked.
  Result<CheckpointRecord> load(const CheckpointEntry& entry, const FetchedFiles& fetched) const;
  Result<std::shared_ptr<const StoredState>> load_stored(const Checkpoint& checkpoint,
                                                         const CheckpointEntry& entry,
                                                         const FetchedFiles& fetched) const;
  std::optional<PlanTexts> load_plan(const std::string& id, const std::string& stored_file,
                                     const FetchedFiles& fetched) const;
  /// null: it is lost, or on a node that is away.
  Result<ImageRef> open_image(const StoredImage& image, uint64_t bytes) const;

  /// checkpoints/<id>/, marked as a draft until confirm().
  Result<> make_directory_of(const std::string& id) const;
  bool has(const std::string& id, const std::string& file) const;
  /// It was decided on: neither its directory nor its images here are drafts any more.
  void confirm(const CheckpointRecord& record) const;

  /// Answers another node: a piece of a file that is here.
  Result<std::string> piece(const boost::json::object& request, const NamedFile& name) const;
  /// To all nodes: each is told that they are there, and takes them in pieces from this node or
  /// from others that have them by now, so that none sends more than a few times what they are
  /// long. kUnavailable: none of those that live takes them, though `stored`, which they describe,
  /// has images elsewhere; these would be lost with this node.
  /// `decides`: of a checkpoint that is being committed, what its decision will name of this node.
  /// `activity`: of which this is a phase, in bytes that all nodes get.
  Result<> give(const std::string& id, const std::vector<std::string>& files,
                const StoredState& stored, Activity* activity = nullptr,
                const std::optional<MetaTransaction::Compare>& decides = std::nullopt) const;
  /// The other side of that: {"files": [[name, bytes, sum], …], "nodes": that have them}; without
  /// "nodes" they are in `contents`, one behind the other.
  Result<> keep(const std::string& id, const boost::json::object& request,
                std::string_view contents) const;

  /// Of `these` images those on this node go that `those` do not name.
  void remove_images_not_in(const StoredState& these, const StoredState& those) const;
  /// A file that said where its bytes would lie, and its plan, of a decision that did not come:
  /// unless it is known here by now that it did.
  void remove_undecided(const std::string& id, const std::string& stored_file) const;
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
  /// Whether it is here as it was agreed on: one that was changed since is as good as none, and
  /// would be taken for what the others have.
  bool is_right_here(const NamedFile& name) const;
  Result<std::string> read(const NamedFile& name, const FetchedFiles& fetched) const;
  Result<std::string> fetch(const NamedFile& name, const std::vector<std::string>& nodes,
                            const std::optional<FileFacts>& facts, Activity& activity) const;
  Result<> store(const NamedFile& name, std::string_view content) const;

  const JobPlace& place_;
  const JobPeers& peers_;
  const JobKnowledge& knowledge_;
  Activities& activities_;
  mutable KeyedLock fetching_;  // by id and file: two who need the same ask once
};

/// Of a directory; none: there is no such directory.
Result<std::vector<std::string>> names_in(const std::string& directory);

}  // namespace ptc
