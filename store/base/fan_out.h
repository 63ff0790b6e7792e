// The same work for several others at the same time, such as a question to each node, by a bounded
// number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "store/base/error.h"

namespace ptc {

inline constexpr size_t kAskedAtOnce = 64;
/// Of what takes long, and where none waits for another.
inline constexpr size_t kAtWorkAtOnce = 256;
/// Where they wait for each other, as the parts of a plan do, one that has not begun would hold up
/// all others.
inline constexpr size_t kAllAtOnce = SIZE_MAX;

/// Runs body(0) … body(count − 1), each once, on up to `most_threads` threads, from the constructor
/// on. Where there are no threads to be had there are fewer; what then has not begun when finish()
/// is called is done by its caller. Threads: constructed, finished and destroyed by one. `body`
/// throws nothing.
class FanOut {
 public:
  FanOut(size_t count, std::function<void(size_t)> body, size_t most_threads = kAskedAtOnce);
  ~FanOut() { finish(); }
  FanOut(const FanOut&) = delete;
  FanOut& operator=(const FanOut&) = delete;

  /// Returns when all are done.
  void finish();

 private:
  void work();

  const size_t count_;
  const std::function<void(size_t)> body_;
  std::atomic<size_t> next_ = 0;
  std::vector<std::jthread> threads_;  // last: they use the rest
};

/// Why there is no answer of one that could not even be asked, as of a node that cannot be reached.
Error not_asked(const char* why);

/// Results of ask(0) … ask(count − 1), by their numbers; an exception, as where there is no memory,
/// is kUnavailable.
template <class T>
class Answers {
 public:
  Answers(size_t count, std::function<Result<T>(size_t)> ask, size_t most_threads = kAskedAtOnce)
      : results_(count),
        ask_(std::move(ask)),
        all_(
            count, [this](size_t i) { answer(i); }, most_threads) {}

  /// Once.
  std::vector<Result<T>> wait() {
    all_.finish();
    std::vector<Result<T>> results;
    results.reserve(results_.size());
    for (std::optional<Result<T>>& one : results_)
      results.push_back(one ? *std::move(one) : Result<T>(not_asked("no memory")));
    return results;
  }

 private:
  void answer(size_t i) noexcept {
    try {
      try {
        results_[i] = ask_(i);
      } catch (const std::exception& error) {
        results_[i] = not_asked(error.what());
      }
    } catch (const std::exception&) {  // as it is
    }
  }

  std::vector<std::optional<Result<T>>> results_;
  const std::function<Result<T>(size_t)> ask_;
  FanOut all_;  // last: it uses the rest
};

}  // namespace ptc
