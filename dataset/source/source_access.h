// How what source.json names is reached: as the one who saved it, and only where the mount lets
// data sets be.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/user.h"

namespace ptc {

/// A name in a directory; `type` as readdir(3) has it (DT_REG …), DT_UNKNOWN where it is none of
/// the known.
struct FolderEntry {
  std::string name;
  unsigned char type;
};

/// What may be opened: anything else (devices, pipes, sockets) never is, for that alone could do
/// something.
enum class Wanted { kFile, kFolder, kFileOrFolder };

/// Threads: any; each call becomes that user for as long as it takes. Immutable. Paths are
/// absolute. No path leads through one of the kernel's own links (/proc/self/fd/7,
/// /proc/self/root): this process may follow those to whatever it has open, as whomever it acts.
/// What the kernel only shows as files (procfs, sysfs …) is no data. Errors: kPermissionDenied,
/// also for what lies, or leads, out of the roots, and for what is no data; kInvalidArgument: a
/// link of the kernel's or a circle of links (errno ELOOP), or not what is wanted; kUnavailable:
/// before Linux 5.6; else what the system call says.
class SourceAccess {
 public:
  /// Everything, as this process may.
  SourceAccess() = default;
  /// `roots`: directories below which all must lie, symbolic links followed; none: anywhere.
  SourceAccess(User user, std::vector<std::string> roots);

  /// For many calls in a row. Holds on to this object.
  Result<ActingAs> act() const;

  /// For reading; it never waits.
  Result<UniqueFd> open(const std::string& path, Wanted wanted) const;
  /// Of what the path leads to.
  Result<struct stat> stat(const std::string& path) const;
  bool exists(const std::string& path) const;
  bool is_folder(const std::string& path) const;
  Result<std::string> read_text(const std::string& path, size_t limit) const;
  /// All names but "." and "..", in no order. kCancelled: stop.
  Result<std::vector<FolderEntry>> entries(const std::string& path,
                                           const std::stop_token& stop = {}) const;

  /// nullptr: this process as it is.
  const User* user() const { return anybody_ ? nullptr : &user_; }
  const std::vector<std::string>& roots() const { return roots_; }

 private:
  /// What the path leads to, not opened (O_PATH).
  struct Found {
    UniqueFd fd;
    struct stat facts;
  };
  Result<Found> find(const std::string& path, int flags) const;
  Result<UniqueFd> find_beneath(const std::string& path, int flags) const;

  bool anybody_ = true;
  User user_;
  std::vector<std::string> roots_;  // no '/' at their end
};
using SourceAccessRef = std::shared_ptr<const SourceAccess>;

}  // namespace ptc
