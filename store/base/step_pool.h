// A few threads for very many loops: each loop is a function that takes one step and says when the
// next is due.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

namespace ptc {

/// Runs steps of loops, each loop's one after the other, those that are due first as they came due.
/// There is a thread for each step that runs, up to a limit, and one that waits for the next to
/// come due; a loop that waits costs none, and where all wait to be woken there is none. Threads:
/// any. Outlives its loops' stop().
class StepPool {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// Returns when it is to be called again, unless woken before; nullopt: only when woken. Throws
  /// nothing.
  using Step = std::function<std::optional<Time>(const std::stop_token&)>;

  /// At most so many steps at once. `name`: of each thread, as `top` shows it.
  explicit StepPool(unsigned most_threads, std::string name = "ptcfs-steps");
  ~StepPool();
  StepPool(const StepPool&) = delete;
  StepPool& operator=(const StepPool&) = delete;

  unsigned threads() const;  // now

 private:
  friend class Loop;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

/// One loop. Threads: any.
class Loop {
 public:
  Loop() = default;
  ~Loop() { stop(); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// From now on `step` is called; at once for the first time. Once.
  void start(StepPool& pool, StepPool::Step step);
  /// A step is taken soon; one that is being taken now is followed by another. Before start() and
  /// after stop(): nothing.
  void wake();
  /// Asks a step that is being taken to stop, and waits for its end; none is taken any more. Not
  /// from within a step.
  void stop();

 private:
  friend class StepPool;
  struct State;
  std::shared_ptr<State> state_;  // set before it is woken by others
};

}  // namespace ptc
