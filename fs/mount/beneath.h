// The directory beneath a mount: what shall not be written there while nobody looks.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// A directory that is, or is going to be, mounted over, held open past that mount. While it is
/// closed nothing can be made or removed in it: not even by root, where the file system knows
/// immutable directories; else by nobody who needs its mode bits. An extended attribute says that
/// this was done, and its mode before; what somebody else closed stays so.
class Beneath {
 public:
  /// Before it is mounted over.
  static Result<Beneath> open(const std::string& path);
  /// What another process has opened before it mounted over it.
  static Beneath taken_over(UniqueFd fd) { return Beneath(std::move(fd)); }
  int fd() const { return fd_.get(); }

  /// The first names in it, at most `most`.
  std::vector<std::string> names(size_t most) const;
  enum class Closed { kForAll, kForMost, kNot };
  Closed close();
  /// As it was before close(), of whatever process.
  Result<> give_back();

 private:
  explicit Beneath(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

/// Whether ptcfs is mounted there at each boot: by a line of /etc/fstab, or by the systemd unit
/// that started this process. Others unmount by hand and may remove the directory then.
bool is_lasting_mount_point(const std::string& path);

/// Whether a process is what a systemd unit was made to start: by /proc/<pid>/cgroup and
/// $SYSTEMD_EXEC_PID. What a service's own users or jobs start, cron's or a terminal's, lies in the
/// service's group as well.
bool is_lasting_service(std::string_view cgroups, std::string_view executed_pid, pid_t pid);

}  // namespace ptc
