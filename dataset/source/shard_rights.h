// Who may read what is made of shards: whom each of them lets read it.
#pragma once

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>

#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Of all files added, the narrowest. Beside its owner, who is somebody else for each reader of
/// shards, a file lets its group read it, and all others. Where two files that are not for all have
/// different groups, a member of one is any other to the other file: then it is nobody's.
class ShardRights {
 public:
  ShardRights() = default;
  /// Of a file (or who may enter a directory, if its bits of that are given as those of reading).
  /// Where a list of access control goes with it, what the mode says of the group is the most that
  /// anybody in the list may: the group then has what all others have.
  ShardRights(gid_t group, mode_t mode, bool listed);
  void add(const ShardRights& other);

  /// 0400, and 0040 and 0004 as the files have them.
  mode_t mode() const;
  /// What 0040 is said of; nullopt: the files have different groups, or all may read them.
  std::optional<gid_t> group() const;

  /// Persisted.
  struct Facts {
    bool any = false;  // one that is not for all
    bool one_group = true;
    gid_t group = 0;
    mode_t mode = 0044;  // the bits that all have
  };
  explicit ShardRights(const Facts& facts) : facts_(facts) {}
  const Facts& facts() const { return facts_; }

 private:
  Facts facts_;
};

/// Of files as they lie there: their own rights, and those of all directories above them, of which
/// each is looked at once. Threads: any.
class PathRights {
 public:
  Result<ShardRights> of(int fd);

 private:
  ShardRights of_directory(const std::string& path) PTC_REQUIRES(mutex_);

  Mutex mutex_;
  std::map<std::string, ShardRights> directories_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
