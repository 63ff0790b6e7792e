// Directories as they are listed: what is where, and the listings that readers are in the middle
// of.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "fs/tree/node.h"
#include "store/base/mutex.h"

namespace ptc {

/// The entries of a directory in the order of their places (DirEntry::place, all filled in). Places
/// hold whoever asks and whenever: a directory is not opened, so nothing is remembered between two
/// parts of a listing but the place where the first ended. Names that come or go meanwhile may show
/// or not; all others show once.
using Listing = std::vector<DirEntry>;

/// Keeps listings between two parts, so that a large directory is not listed for each of them. One
/// that is not here any more is made again. Threads: any.
class Listings {
 public:
  using Ref = std::shared_ptr<const Listing>;

  /// As it is now; kept.
  FsResult<Ref> fresh(Node& directory);
  /// The one that was kept, or a fresh one.
  FsResult<Ref> kept(Node& directory);
  /// Its reader has come to the end.
  void drop(const Node& directory);
  /// Those whose readers have not come back for a while.
  void forget_old();

 private:
  struct Kept {
    std::string key;  // of the node
    Ref listing;
    std::chrono::steady_clock::time_point used = std::chrono::steady_clock::now();
  };
  static constexpr size_t kMaxListings = 64, kMaxEntries = 1 << 20;
  void keep(const Node& directory, Ref listing);

  Mutex mutex_;
  std::list<Kept> kept_ PTC_GUARDED_BY(mutex_);  // the last used first
  size_t entries_ PTC_GUARDED_BY(mutex_) = 0;    // of all of them
};

}  // namespace ptc
