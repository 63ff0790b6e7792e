// What a change costs a job: the seconds for which it stands still. Its parts are guesses at first;
// what real changes took corrects them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

namespace ptc::planner {

/// Bytes that a reshard brings somewhere else, of ptcfs's own plan ("pairs" in plan.json): of the
/// node that has the most to do, which is the last one to be done.
struct Movement {
  uint64_t moved = 0;  // that it gets from other nodes, or sends to them
  uint64_t local = 0;  // that it copies within itself
};

/// Adds up what goes from node to node, each named by a number or a string.
template <class Node>
class MovementSum {
 public:
  void add(const Node& source, const Node& target, uint64_t bytes) {
    if (source == target) {
      local_[source] += bytes;
    } else {
      sent_[source] += bytes;
      got_[target] += bytes;
    }
  }
  Movement busiest() const { return {std::max(most(sent_), most(got_)), most(local_)}; }

 private:
  using Sums = std::map<Node, uint64_t>;
  static uint64_t most(const Sums& sums) {
    uint64_t most = 0;
    for (const auto& [node, bytes] : sums) most = std::max(most, bytes);
    return most;
  }
  Sums sent_, got_, local_;
};

/// Seconds, and bytes a second.
struct ChangeCosts {
  double stop_s = 5;    // from SIGTERM until the state is committed and all processes are gone
  double start_s = 15;  // from the start of the processes until they train
  double link = 1e9;    // of a node, either way
  double memory = 4e9;  // within a node
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
