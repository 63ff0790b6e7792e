// Names taken away in this mount only, so that `rm -r` works on what cannot change.
#pragma once

#include <time.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <unordered_map>

#include "fs/tree/live_state.h"
#include "store/base/mutex.h"

namespace ptc {

/// A set of relative paths under one checkpoint or job. `rm -r` unlinks names one by one before it
/// removes the directory that really goes; each name is hidden meanwhile. Unless the removal is
/// completed, all hidden names are back kRestoreAfter after the last of them was hidden: nothing is
/// lost by half a removal.
/// Threads: any.
class Whiteouts {
 public:
  Whiteouts() = default;
  ~Whiteouts();
  Whiteouts(const Whiteouts&) = delete;
  Whiteouts& operator=(const Whiteouts&) = delete;

  /// They are written down there, as those of `key`, and an earlier process's are hidden, too.
  /// Before the first is hidden. It outlives this. Null: nothing is written down.
  void keep_in(LiveState* state, std::string_view key);
  static constexpr std::chrono::seconds kRestoreAfter{60};

  void hide(std::string path);
  /// Hidden until show(): for a name the user moved away, which only he puts back.
  void hide_until_shown(std::string path);
  void show(const std::string& path);
  bool hidden(const std::string& path) const;
  /// Whether anything is hidden.
  bool any() const;
  /// For how long nothing comes back by itself: kForever where nothing is hidden that could.
  std::chrono::duration<double> none_comes_back_for() const;
  static constexpr std::chrono::hours kForever{24};
  /// When names came back by themselves, at last; the epoch if never.
  timespec restored() const;

 private:
  void expire() const PTC_REQUIRES(mutex_);
  mutable Mutex mutex_;
  mutable std::atomic<bool> some_{false};  // whether paths_ holds any; written with the lock held
  struct Hidden {
    bool expires = false;
    LiveState::Place kept = 0;
  };
  Hidden& add(std::string path, bool expires) PTC_REQUIRES(mutex_);
  void give_back(const Hidden& hidden) const;
  LiveState* state_ = nullptr;
  uint64_t owner_ = 0;
  mutable std::unordered_map<std::string, Hidden> paths_ PTC_GUARDED_BY(mutex_);
  mutable std::chrono::steady_clock::time_point last_hidden_ PTC_GUARDED_BY(mutex_);
  mutable timespec restored_ PTC_GUARDED_BY(mutex_) = {};
};

}  // namespace ptc
