// The network of a simulated cluster: which way is cut, how long a message takes, what is lost.
// Nodes are numbered from 0; one more place is the agreement store. Touched by the thread that
// runs, without a lock.
#pragma once

#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/sim/scheduler.h"

namespace ptc::sim {

/// One life of a node, from its start to its end.
struct Life {
  bool dead = false;
  unsigned users = 0;  // threads that use its store
};

class Network {
 public:
  Network(unsigned nodes, uint64_t seed)
      : slow_(nodes + 1, false), frozen_(nodes + 1, false), random_(seed) {}

  unsigned store() const { return static_cast<unsigned>(slow_.size()) - 1; }

  void cut(unsigned from, unsigned to) { cuts_.insert({from, to}); }
  void mend(unsigned from, unsigned to) { cuts_.erase({from, to}); }
  bool is_cut(unsigned from, unsigned to) const { return cuts_.contains({from, to}); }
  const std::set<std::pair<unsigned, unsigned>>& cuts() const { return cuts_; }

  /// Messages of and to the place take a second or so.
  void set_slow(unsigned place, bool slow) { slow_[place] = slow; }
  /// Its process is stopped, as by SIGSTOP.
  void set_frozen(unsigned place, bool frozen);
  bool is_frozen(unsigned place) const { return frozen_[place]; }
  /// Of 1000 connections so many break while they are used.
  void set_breaks(unsigned of_1000) { breaks_ = of_1000; }
  bool breaks() { return breaks_ > 0 && random_() % 1000 < breaks_; }

  /// Takes the time that a message takes. Whether it arrives is to be asked after that.
  void travel(unsigned from, unsigned to);
  /// There and back in one turn, where neither way can be cut or slow meanwhile as far as is known
  /// now; false: it has taken no time.
  bool travel_both_ways(unsigned from, unsigned to);
  uint64_t random() { return random_(); }

 private:
  Time one_way(unsigned from, unsigned to);

  std::set<std::pair<unsigned, unsigned>> cuts_;  // from, to
  std::vector<bool> slow_, frozen_;
  unsigned breaks_ = 0;
  std::mt19937_64 random_;
};

}  // namespace ptc::sim
