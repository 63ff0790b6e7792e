// What one node gives to a commit, whoever leads it: a directory of incoming/, and the images that
// its files become.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "reshard/intake/commit.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/hash_questions.h"
#include "reshard/intake/seal.h"
#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/image/image_store.h"

namespace ptc {

/// An empty directory in the place of one that was hidden, with its owner and mode, so that the
/// name is still found. Whoever puts something into it, or removes it, has it. As long as it may be
/// there, so is its trace, by which a start knows it for what it is. Threads: any.
class ShownName {
 public:
  /// Made at `path`; it may be moved then.
  static Result<std::shared_ptr<ShownName>> make(const std::string& path, const struct stat& like);
  bool is_at(const std::string& path) const;
  bool is_empty() const;
  /// If it is there, and empty. In any case its trace goes.
  void remove_from(const std::string& path);
  /// An empty directory, alone in another: both go with it, at once if it has gone.
  void traced_by(std::string trace);

 private:
  explicit ShownName(UniqueFd directory) : directory_(std::move(directory)) {}
  void remove_trace() PTC_REQUIRES(mutex_);
  const UniqueFd directory_;  // no other gets its number
  Mutex mutex_;
  std::string trace_ PTC_GUARDED_BY(mutex_);
  bool gone_ PTC_GUARDED_BY(mutex_) = false;
};

/// First the directory is sealed where it is, and can be read as before; its files are linked as
/// images. Right before the decision it is hidden, in committing/<id>/, so that after a crash it is
/// known what it belonged to. All of it is taken back by the destructor, unless the commit was
/// decided, or nobody knows. Threads: any.
class CommitShare {
 public:
  struct Place {
    std::string job_dir;  // jobs/<job>
    ImageStore* images;
    HashCache* hashes;
    std::string incoming_dir() const { return job_dir + "/files/incoming"; }
  };

  /// null: there is no incoming/<incoming> here. kBusy: somebody writes it. Asked whether it gives
  /// way, the share does if `may_give_way` says so and it is not hidden, and is withdrawn by that.
  static Result<std::shared_ptr<CommitShare>> take(Place place, std::string id,
                                                   std::string incoming, const MakeSeal& seal,
                                                   GivesWay may_give_way);
  ~CommitShare();
  CommitShare(const CommitShare&) = delete;
  CommitShare& operator=(const CommitShare&) = delete;

  const std::string& incoming() const { return incoming_; }
  int directory() const { return directory_.get(); }
  ListedFiles& listed() { return listed_; }
  FilesToHash& to_hash() { return to_hash_; }
  /// Other than directories, layout.json and what the data set has consumed.
  bool has_files() const;
  /// Links files, by their paths in the directory, as images, in that order. kBusy: one has changed
  /// since take().
  Result<std::vector<ImageRef>> adopt(const std::vector<std::string>& paths);
  /// After it the files are neither reached by a path nor written by anybody: kBusy if one was.
  /// kConflict: withdrawn. kShown: shown() is in its place from that very moment on, and stays when
  /// this was committed.
  enum class Name { kGone, kShown };
  Result<> hide(Name name = Name::kGone);
  /// null: it has not hidden it, or the file system cannot exchange names.
  std::shared_ptr<ShownName> shown() const;
  std::string source_dir() const { return place_.incoming_dir() + "/" + incoming_; }

  /// Anybody may write the directory again, which is in its place when this returns, and nothing
  /// more can be done with this, whoever still has it.
  void withdraw();
  /// false: it is hidden, for the decision, and stays so. Either this or hide() is first.
  bool withdraw_unless_hidden();
  /// The decision has come: the directory goes, and its files are the checkpoint's. Where its name
  /// is shown it stays, empty, as the trace of that.
  void committed();
  /// Nobody knows, and this process ends: the next start sees to it.
  void leave();

 private:
  struct Adopted {
    std::string path;
    ImageRef image;
  };
  CommitShare(Place place, std::string id, std::string incoming)
      : place_(std::move(place)), id_(std::move(id)), incoming_(std::move(incoming)) {}
  std::string hidden_dir() const { return place_.job_dir + "/committing/" + id_; }
  Result<> check_unchanged(const std::string& path) const PTC_REQUIRES(mutex_);
  Result<> check_there() const PTC_REQUIRES(mutex_);
  /// What it returns ends without the mutex.
  std::unique_ptr<Seal> withdraw_now() PTC_REQUIRES(mutex_);
  void renew(const std::string& path) PTC_REQUIRES(mutex_);
  void remove_images() PTC_REQUIRES(mutex_);
  void put_back() PTC_REQUIRES(mutex_);

  const Place place_;
  const std::string id_, incoming_;
  UniqueFd directory_;
  ListedFiles listed_;
  FilesToHash to_hash_;
  mutable Mutex mutex_;
  std::map<std::string, FileVersion> versions_
      PTC_GUARDED_BY(mutex_);  // of its files, by path, as they were sealed
  std::unique_ptr<Seal> seal_ PTC_GUARDED_BY(mutex_);
  std::vector<Adopted> adopted_ PTC_GUARDED_BY(mutex_);
  std::shared_ptr<ShownName> shown_ PTC_GUARDED_BY(mutex_);
  bool has_files_ PTC_GUARDED_BY(mutex_) = true;
  bool hidden_ PTC_GUARDED_BY(mutex_) = false;
  bool withdrawn_ PTC_GUARDED_BY(mutex_) = false;
  bool settled_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc
