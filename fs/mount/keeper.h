// The process that keeps a mount while the daemon that serves it comes and goes.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc {

/// The parent of the daemon: opens /dev/fuse, which the connection lives by, and the memory of what
/// the kernel was told (LiveState); starts the daemon with both, and again as soon as it has died.
/// It knows nothing of FUSE, and of the file system only where it is mounted.
struct KeeperOptions {
  std::string mount_point;             // resolved
  std::vector<std::string> arguments;  // of the daemon; the first is its name
  std::string directory;               // that these are meant in
  bool foreground = false;
  /// Called once: the mount can be used (0), or it cannot, and the exit status says why.
  std::function<void(int status)> started = [](int) {};
};
/// Returns the exit status when the mount is gone.
int keep_mount(const KeeperOptions& options);

/// The daemon's side. Closed by its end, of whatever kind, and the keeper has its own.
struct KeptBy {
  UniqueFd device, state, beneath;  // the last is invalid until one was sent
  UniqueFd keeper;                  // a socket
  std::string mount_point;
  bool foreground = false;
  std::string cause;    // why the one before has ended; empty: it is the first
  bool killed = false;  // it was killed by somebody, or for its memory
  bool made_room = false;
  int64_t ended_ns = 0;  // when, by the monotonic clock

  /// It serves. `beneath`: the directory beneath the mount, for those that come later; -1: none.
  void serves(int beneath) const;
};
/// Of a process that a keeper has started: else nothing. Once.
std::optional<KeptBy> kept_by();

/// The exit status of a daemon that has made room for the next one.
inline constexpr int kMadeRoom = 75;
/// The signal that asks for it.
int make_room_signal();

/// Asks the keeper of a mount to let `program` serve it, with these arguments; none: the former
/// ones. Returns, when it serves, for how long nobody did.
Result<std::chrono::microseconds> ask_for_upgrade(const std::string& mount_point,
                                                  const std::string& program,
                                                  const std::vector<std::string>& arguments);

}  // namespace ptc
