// What a change costs a job: the seconds for which it stands still. Its parts are guesses at first;
// what real changes took corrects them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace ptc::planner {

/// Bytes that a reshard brings somewhere else: of ptcfs's own plan ("bytes" in plan.json).
struct Movement {
  uint64_t moved = 0;  // between nodes
  uint64_t local = 0;  // copied within a node
};

/// Seconds, and bytes a second.
struct ChangeCosts {
  double stop_s = 5;    // from SIGTERM until the state is committed and all processes are gone
  double start_s = 15;  // from the start of the processes until they train
  double link = 1e9;    // between nodes, of all links together
  double memory = 4e9;  // within nodes
};

/// Corrected by a third of what each measurement differs, so that one odd change spoils nothing.
/// Threads: one.
class Prices {
 public:
  explicit Prices(const ChangeCosts& first = {}) : first_(first) {}

  /// Of a job that runs: it stops, its state is brought into the new layout, it starts. One that
  /// waits has no stop.
  double of(const std::string& job, const Movement& movement, bool runs) const;

  void stopped(const std::string& job, double seconds);
  void started(const std::string& job, double seconds);
  /// Rates are of the cluster. Movements that are too short to tell a rate are passed over.
  void brought(const Movement& movement, double seconds);

  /// What is known of a job, as of all so far where nothing is.
  const ChangeCosts& of_job(const std::string& job) const;
  /// What an earlier run had measured.
  void restore(const std::string& job, const ChangeCosts& costs);

 private:
  ChangeCosts& known(const std::string& job);

  ChangeCosts first_;  // and the rates
  std::map<std::string, ChangeCosts> jobs_;
};

}  // namespace ptc::planner
