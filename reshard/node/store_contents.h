// What lies in a store's directory: jobs/<job>/ and images/. What is found there is settled by what
// is agreed: it is a job's, or was removed, or was never decided on and goes; or nothing explains
// it, and it is kept and told of.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/job.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/image/image_store.h"

namespace ptc {

/// Threads: JobTable::changes is held; of job_dir() and kept(): any.
class StoreContents {
 public:
  /// The store has its identity.
  StoreContents(std::string directory, ImageStore& images);

  const std::string& store_id() const { return store_id_; }
  std::string job_dir(std::string_view name) const {
    return fmt::format("{}/jobs/{}", directory_, name);
  }
  /// What stays though nothing names it, until somebody removes it: paths below the directory.
  std::vector<std::string> kept() const;
  /// It stays, and is told of.
  void keep(const std::string& what, const std::string& why);

  /// What lies in jobs/ and is no job of now: removed, or not even made; else it stays. `names`: of
  /// all jobs, and their ids.
  Result<> settle_directories(const std::map<std::string, std::string>& names,
                              const Tombstones& tombstones);
  /// A job that was there when all were listed, and is not any more. Nobody who knows no more of it
  /// looks at its directory again.
  Result<> settle_removed_meanwhile(const std::string& name, const std::string& id,
                                    MetaClient& meta);
  /// For a job that there is; one of its name that was there before may have left something.
  Result<> open_job_directory(const std::string& name, const std::string& id,
                              const Tombstones& tombstones, bool is_new = false);
  /// Carries out that the job with this id was removed. Not `forced`: if files of users are in it,
  /// it goes to kept/ instead.
  Result<> remove_job_directory(const std::string& name, const std::string& id, bool forced);

  /// A directory of a job that was removed.
  struct Removal {
    std::string name, id;
    bool forced;
    std::string told = {};  // why it is there still
  };
  /// The same, unless the directory is another job's. On an error it stays for carry_out_left().
  Result<> carry_out(Removal removal);
  /// Tries all again that failed. The error of one that fails still.
  Result<> carry_out_left();
  bool has_left() const { return !left_.empty(); }

  /// Drafts that a former life of this node left: nobody can decide on them any more. Others that
  /// nothing names stay. Once it is known what all jobs need; until then it is to be called again.
  void settle_found_images(const std::vector<JobRef>& jobs, bool at_start);

 private:
  Result<> put_aside(const std::string& name, const std::string& id, const std::string& why);
  Result<> make_job_directory(const std::string& name, const std::string& id);

  const std::string directory_, store_id_;
  ImageStore& images_;
  std::vector<ImageId> found_drafts_;  // in the store when it was opened
  bool images_looked_over_ = false;
  std::vector<Removal> left_;
  mutable Mutex mutex_;
  std::vector<std::string> kept_ PTC_GUARDED_BY(mutex_);
};

/// An ordinary file of the user's own, or what is in incoming/, that a job's directory holds.
Result<std::optional<std::string>> user_file_in(const std::string& job_dir);
/// All of them: the first by name, as people can read them, and how many more there are.
struct UserFiles {
  std::vector<std::string> names;
  uint64_t more = 0;

  std::string to_text() const;
  /// Also of a node with an older ptcfs, which names one and says no more.
  static UserFiles from_text(const std::string& text);
};
Result<UserFiles> user_files_in(const std::string& job_dir, size_t most_names);

}  // namespace ptc
