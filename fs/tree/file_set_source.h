// File sets that can be made again, and so need not be kept for as long as the kernel knows names
// in them.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "reshard/checkpoint/checkpoint.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

class FileSetSource;

/// Knows which sets are held now, so that of all that is computed when somebody looks, what nobody
/// has looked at for half a minute takes no memory, and all together a bounded one, as far as they
/// say what they take (FileSet::memory_bytes). Threads: any.
class RecentSets {
 public:
  void note(std::weak_ptr<FileSetSource> source, uint64_t memory_bytes);
  void forget_old();

 private:
  struct Held {  // a source that holds its set
    std::weak_ptr<FileSetSource> source;
    uint64_t memory_bytes;
  };
  static constexpr size_t kMost = 64, kAlways = 8;  // of these none goes for its memory alone
  static constexpr uint64_t kMostBytes = uint64_t{256} << 20;
  static constexpr std::chrono::seconds kFor{30};
  bool are_too_many() const PTC_REQUIRES(mutex_);
  mutable Mutex mutex_;
  std::deque<Held> held_ PTC_GUARDED_BY(mutex_);
};

/// One set: always of the same files. Owned by std::shared_ptr. Threads: any.
class FileSetSource : public std::enable_shared_from_this<FileSetSource> {
 public:
  using Make = std::function<Result<FileSetRef>()>;
  /// `recent` outlives it.
  FileSetSource(RecentSets& recent, Make make) : recent_(recent), make_(std::move(make)) {}

  Result<FileSetRef> get();

 private:
  friend class RecentSets;
  using Clock = std::chrono::steady_clock;
  Clock::time_point used() const;
  void forget();

  RecentSets& recent_;
  const Make make_;
  mutable Mutex mutex_;
  FileSetRef set_ PTC_GUARDED_BY(mutex_);  // null: to be made when it is asked for
  Clock::time_point used_ PTC_GUARDED_BY(mutex_);
};
using FileSetSourceRef = std::shared_ptr<FileSetSource>;

}  // namespace ptc
