// A progress bar with rate and time left on a terminal; plain lines, at most one a second, in a
// log.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "store/base/mutex.h"

namespace ptc::cli {

/// What a bar shows at one moment.
struct ProgressView {
  std::string label;
  uint64_t done = 0;
  uint64_t total = 0;           // 0: not known
  double bytes_per_second = 0;  // 0: not known yet
};

/// One line of at most `width` columns:
///   "importing base  43% ━━━━━━━╸────────── 1.2 GiB/2.8 GiB  512.0 MiB/s  0:03 left"
/// The bar is left out where it would be shorter than eight columns, then the label is cut.
std::string progress_bar(const ProgressView& view, size_t width, bool utf8);
/// The same for a log: "importing base: 43%, 1.2 GiB of 2.8 GiB, 512.0 MiB/s, 0:03 left".
std::string progress_text(const ProgressView& view);

/// Shows the progress of one piece of work on standard error. Threads: any.
class Progress {
 public:
  explicit Progress(std::string label, uint64_t total = 0);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(uint64_t bytes);
  /// For work that is done elsewhere and only watched here. A smaller `done` or another total
  /// begins the measuring of the rate anew.
  void set(uint64_t done, uint64_t total);
  void set_label(std::string label);
  /// Takes the bar away; what follows begins in the first column. Later calls do nothing.
  void finish();

  uint64_t done() const { return done_.load(); }
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  void show_if_due();
  double rate(Clock::time_point now) PTC_REQUIRES(mutex_);  // over the last few seconds

  const bool live_;
  const bool utf8_;
  const Clock::time_point start_ = Clock::now();
  std::atomic<uint64_t> done_{0};
  std::atomic<int64_t> next_show_ns_{0};  // since start_; checked before the mutex is asked for
  Mutex mutex_;
  std::string label_ PTC_GUARDED_BY(mutex_);
  uint64_t total_ PTC_GUARDED_BY(mutex_);
  std::deque<std::pair<Clock::time_point, uint64_t>> samples_
      PTC_GUARDED_BY(mutex_);  // of the last seconds
  bool shown_ PTC_GUARDED_BY(mutex_) = false;
  bool finished_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc::cli
