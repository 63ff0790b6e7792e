#include "tools/ptc/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr auto kBarInterval = milliseconds(100);
constexpr auto kLineInterval = seconds(1);
constexpr auto kRateWindow = seconds(5);
constexpr size_t kMinBarColumns = 8;
constexpr size_t kMaxBarColumns = 40;

double fraction_of(const ProgressView& view) {
  if (view.total == 0) return 0;
  return std::min(1.0, static_cast<double>(view.done) / static_cast<double>(view.total));
}

std::string percent_text(const ProgressView& view) {
  return fmt::format("{}%", static_cast<int>(fraction_of(view) * 100));
}

std::string time_left_text(const ProgressView& view) {
  if (view.total <= view.done || view.bytes_per_second <= 0) return "";
  double left = static_cast<double>(view.total - view.done) / view.bytes_per_second;
  return format_clock(left) + " left";
}

std::string bar_text(double fraction, size_t columns, bool utf8) {
  auto halves = static_cast<size_t>(fraction * static_cast<double>(columns) * 2);
  size_t full = halves / 2;
  std::string bar;
  for (size_t i = 0; i < columns; ++i) {
    if (i < full) bar += utf8 ? "━" : "#";
    else if (i == full && halves % 2 == 1 && utf8) bar += "╸";
    else bar += utf8 ? "─" : ".";
  }
  return bar;
}

}  // namespace

std::string progress_bar(const ProgressView& view, size_t width, bool utf8) {
  std::string tail = view.total == 0 ? format_size(view.done)
                                     : format_size(view.done) + "/" + format_size(view.total);
  if (view.bytes_per_second > 0)
    tail += "  " + format_size(static_cast<uint64_t>(view.bytes_per_second)) + "/s";
  if (std::string left = time_left_text(view); !left.empty()) tail += "  " + left;

  // A long label gives way to the numbers, down to a few letters.
  constexpr size_t kLeastLabel = 8;
  const std::string share = view.total > 0 ? fmt::format("  {:>4}", percent_text(view)) : "";
  const size_t numbers = share.size() + 2 + tail.size();
  std::string head = shortened(printable(view.label),
                               std::max(kLeastLabel, width > numbers ? width - numbers : 0));
  head += share;
  size_t used = text_width(head) + 2 + tail.size();
  if (view.total > 0 && used + kMinBarColumns + 1 <= width) {
    size_t columns = std::min(kMaxBarColumns, width - used - 1);
    return head + " " + bar_text(fraction_of(view), columns, utf8) + "  " + tail;
  }
  return shortened(head + "  " + tail, width);
}

std::string progress_text(const ProgressView& view) {
  std::string line = view.label + ": ";
  if (view.total == 0) line += format_size(view.done);
  else
    line += fmt::format("{}, {} of {}", percent_text(view), format_size(view.done),
                        format_size(view.total));
  if (view.bytes_per_second > 0)
    line += ", " + format_size(static_cast<uint64_t>(view.bytes_per_second)) + "/s";
  if (std::string left = time_left_text(view); !left.empty()) line += ", " + left;
  return line;
}

Progress::Progress(std::string label, uint64_t total)
    : live_(is_live_terminal(STDERR_FILENO)),
      utf8_(utf8_terminal()),
      label_(std::move(label)),
      total_(total) {
  // A log gets its first line after a second: what is done sooner needs none.
  auto first = live_ ? nanoseconds(kBarInterval) : nanoseconds(kLineInterval);
  next_show_ns_ = first.count();
  samples_.emplace_back(start_, 0);
}

void Progress::add(uint64_t bytes) {
  done_ += bytes;
  show_if_due();
}

void Progress::set(uint64_t done, uint64_t total) {
  {
    MutexLock lock(mutex_);
    if (done < done_ || total != total_) {
      samples_.clear();
      samples_.emplace_back(Clock::now(), done);
    }
    done_ = done;
    total_ = total;
  }
  show_if_due();
}

void Progress::set_label(std::string label) {
  MutexLock lock(mutex_);
  label_ = std::move(label);
}

double Progress::seconds() const { return duration<double>(Clock::now() - start_).count(); }

double Progress::rate(Clock::time_point now) {
  samples_.emplace_back(now, done_.load());
  while (samples_.size() > 2 && now - samples_.front().first > kRateWindow) samples_.pop_front();
  double elapsed = duration<double>(now - samples_.front().first).count();
  uint64_t since =
      samples_.back().second - std::min(samples_.front().second, samples_.back().second);
  return elapsed < 0.05 ? 0 : static_cast<double>(since) / elapsed;
}

void Progress::show_if_due() {
  auto now = Clock::now();
  int64_t now_ns = duration_cast<nanoseconds>(now - start_).count();
  if (now_ns < next_show_ns_.load()) return;
  if (!mutex_.try_lock()) return;
  MutexLock lock(mutex_, std::adopt_lock);
  if (finished_ || now_ns < next_show_ns_.load()) return;
  auto interval = live_ ? nanoseconds(kBarInterval) : nanoseconds(kLineInterval);
  next_show_ns_ = now_ns + interval.count();

  ProgressView view{label_, done_.load(), total_, rate(now)};
  std::string text;
  if (live_) {
    // One column stays free: a full last one makes some terminals wrap.
    text = "\r" + progress_bar(view, terminal_width(STDERR_FILENO) - 1, utf8_) + "\033[K";
  } else {
    text = progress_text(view) + "\n";
  }
  shown_ = true;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void Progress::finish() {
  MutexLock lock(mutex_);
  if (!finished_ && shown_ && live_) {
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
  }
  finished_ = true;
}

}  // namespace ptc::cli
