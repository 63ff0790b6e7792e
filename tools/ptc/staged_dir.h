// A directory that appears with all that is in it, or not at all.
#pragma once

#include <filesystem>
#include <string>

#include "store/base/error.h"

namespace ptc::cli {

/// What is to be in `destination` is written to path() first, a directory beside it, or in it where
/// it is there and holds something, or cannot be replaced (a mount point). Directories above are
/// made. Unless publish() succeeded all of that is gone with the object, and `destination` is as it
/// was.
class StagedDirectory {
 public:
  static Result<StagedDirectory> make(const std::string& destination);
  StagedDirectory(StagedDirectory&& other) noexcept;
  StagedDirectory& operator=(StagedDirectory&&) = delete;
  ~StagedDirectory();

  /// Removes what was made, unless it is published.
  void discard();

  const std::string& path() const { return path_; }
  /// Whether its files go into a directory that is there, one by one.
  bool is_inside() const { return inside_; }
  /// Whether all of it is there: what publish() failed at then is that the disk has it.
  bool is_published() const { return path_.empty(); }

  /// All files are durable already; names are, when this returns. The directory appears by one
  /// rename; in one that was there, each file by one, replacing what has its name.
  Result<> publish();

 private:
  StagedDirectory() = default;
  Result<> move_each() const;

  std::filesystem::path destination_;
  std::filesystem::path above_;  // what was there before of the directories above
  std::string path_;             // empty: published, or moved from
  bool inside_ = false;          // the destination
};

}  // namespace ptc::cli
