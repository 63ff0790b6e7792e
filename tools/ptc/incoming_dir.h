// incoming/<name> of one import. Another one, with --force, may put its own there meanwhile, and on
// another node there may be one of that name, too, which the same commit would take. So what is
// copied goes into this directory alone, by whatever name it is known, and while it is committed it
// has a name that nobody else uses; an empty directory keeps its place. It is locked (flock) by the
// import that made it: what the next one of its name finds under such a name and unlocked is of one
// that was killed, and goes.
#pragma once

#include <sys/types.h>

#include <string>

#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc::cli {

/// Threads: one.
class IncomingDir {
 public:
  /// Makes it; `force`: in the place of what is there, which is removed. kAlreadyExists.
  static Result<IncomingDir> make(std::string path, bool force);

  /// Its name: another one between begin_commit() and end_commit(), and after that where its own
  /// was taken.
  const std::string& path() const { return path_; }
  /// The way to it, whatever it is called.
  std::string inside() const;
  /// Whether nobody has removed or replaced it.
  bool is_at_its_name() const;
  /// The error as users know its paths.
  Error named(Error error) const;

  /// kConflict: it is not at its name any more.
  Result<> begin_commit();
  /// It has been committed, or has its name again.
  void end_commit();
  /// With what is in it, if it is still at its name.
  void remove();

 private:
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    bool operator==(const Identity&) const = default;
  };
  static Identity of(const std::string& path);

  std::string wanted_, own_, path_;
  Identity identity_, placeholder_;
  UniqueFd directory_;
};

}  // namespace ptc::cli
