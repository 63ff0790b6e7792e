// What was removed. A job or a checkpoint leaves a node's store because a tombstone names it, never
// because nothing does: an agreement store that lost its data names nothing.
//
//   removed/jobs/<id>           {"name": "llama", "forced": false, "time": …}     put by the
//                               transaction that takes the keys away
//   removed/checkpoints/<id>    {"job": "llama", "name": "base", "time": …}
//
// Each store carries them out and says up to which revision (store_identity.h); then they go.
//
// A job that is removed without force is one in which nobody has a file. Each node was asked, but
// between its answer and the decision somebody may write one on it, and be told that it is there
// for good; a node that is away was not asked at all. So who carries such a removal out looks
// again, by taking the directories away as rmdir(2) does: the file system below either does that or
// lets something be made in them. Where something is, all of the job stays in kept/, and is told
// of. (On the node that decides nothing comes between: JobListener::seal_job.) What an older ptcfs
// wrote does not say, and counts as forced.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/meta/meta_client.h"

namespace ptc {

constexpr std::string_view kTombstones = "removed/";
inline constexpr size_t kMaxStoredBytes = size_t{1} << 32;  // of a file that says where bytes lie

std::string removed_job_key(std::string_view job_id);
bool is_removed_job_key(std::string_view key);
std::string removed_checkpoint_key(std::string_view checkpoint_id);
std::string removed_job_text(std::string_view name, bool forced);
std::string removed_checkpoint_text(std::string_view job, std::string_view name);

struct Tombstones {
  std::map<std::string, std::string, std::less<>> jobs, checkpoints;  // id → name of the job
  std::set<std::string, std::less<>> unforced;                        // ids of those jobs
  std::vector<MetaEntry> entries;
  int64_t revision = 0;  // of the last one

  /// What removed this job did not care what was in it.
  bool forced(std::string_view job_id) const {
    return jobs.contains(job_id) && !unforced.contains(job_id);
  }
};
Result<Tombstones> read_tombstones(MetaClient& meta);
Result<bool> is_removed(MetaClient& meta, const std::string& key);
/// What this tombstone says was carried out here: it goes where no other store has to do the same.
/// (What fails of that the next start does.)
void note_carried_out(MetaClient& meta, const Cluster& cluster, const std::string& tombstone);

/// The id of a job, of the value of jobs/<name>: another job of its name has another.
std::string job_id_of(std::string_view value);

/// Ids of the images that a stored state names; an unreadable file names none.
std::vector<ImageId> images_named_in(const std::string& stored_file);
/// The images of the store that any stored state in checkpoints/<id>/ names, then the directory.
Result<> remove_checkpoint_directory(ImageStore& images, const std::string& directory);
/// The same for all checkpoints of jobs/<name>/, then that. false: it was not forced, and holds
/// files of users; then it stays, with these.
Result<bool> remove_job_directory(ImageStore& images, const std::string& directory, bool forced);

}  // namespace ptc
