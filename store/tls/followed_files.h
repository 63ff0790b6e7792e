// What is made of small files, made anew when one of them changes: keys, certificates and secrets
// are exchanged while the daemon runs.
#pragma once

#include <spdlog/spdlog.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Another text when one of the files is another: inode, size, time. Files that are not there
/// count, too.
std::string stamp_of_files(const std::vector<std::string>& paths);

/// Threads: any.
template <typename T>
class FollowedFiles {
 public:
  using Made = std::shared_ptr<const T>;
  using Make = std::function<Result<Made>()>;

  /// Errors: those of `make`. `what`: how the log calls them, as in "certificates".
  static Result<std::shared_ptr<const FollowedFiles>> open(std::vector<std::string> paths,
                                                           std::string what, Make make) {
    auto followed = std::make_shared<FollowedFiles>();
    MutexLock lock(followed->mutex_);
    followed->stamp_ = stamp_of_files(paths);
    PTC_TRY(followed->value_, make());
    followed->paths_ = std::move(paths);
    followed->what_ = std::move(what);
    followed->make_ = std::move(make);
    return std::shared_ptr<const FollowedFiles>(std::move(followed));
  }

  /// Of the files as they are now; of the last good ones while these cannot be used, which is
  /// logged once.
  Made value() const {
    const std::string stamp = stamp_of_files(paths_);
    MutexLock lock(mutex_);
    if (stamp != stamp_) {
      stamp_ = stamp;
      if (auto made = make_()) value_ = std::move(made).value();
      else spdlog::error("the changed {} are not used: {}", what_, made.error().message());
    }
    return value_;
  }

 private:
  std::vector<std::string> paths_;
  std::string what_;
  Make make_;
  mutable Mutex mutex_;
  mutable std::string stamp_ PTC_GUARDED_BY(mutex_);  // of the files that were looked at last
  mutable Made value_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
