// Requests that must not be done twice, where the kernel may give them out again.
#pragma once

#include <cstdint>
#include <string>

#include "fs/tree/live_state.h"
#include "fs/tree/node.h"
#include "fs/tree/node_table.h"

namespace ptc {

/// One such request, from before it changes anything until it is answered. What its name stood for
/// before is written down. The kernel has the directory locked until the answer: so when the same
/// request comes again, to whatever process, and the name stands for something else, this request
/// did that. Without a state (there is no keeper) it does nothing.
class OnceOnly {
 public:
  /// `number`: served_request(). All outlive it.
  OnceOnly(LiveState* state, NodeTable& table, uint64_t number, Node& directory, std::string name);
  ~OnceOnly();
  OnceOnly(const OnceOnly&) = delete;
  OnceOnly& operator=(const OnceOnly&) = delete;

  /// What was to go, or to be moved, is gone.
  bool is_done() const;
  /// What was to be made has come to be, half or whole, and nobody was told.
  bool was_made() const;
  /// Takes that away, where it is an ordinary file or directory: making it again does all of it.
  void take_back() const;

 private:
  uint64_t now() const;

  LiveState* const state_;
  NodeTable& table_;
  Node& directory_;
  const std::string name_;
  LiveState::Place place_ = 0;
  bool again_ = false;
  uint64_t before_ = 0;  // LiveState::identity(); 0: there was nothing
};

/// The same of a request whose step says how far it came.
class Steps {
 public:
  Steps(LiveState* state, uint64_t number, uint64_t first);
  ~Steps();
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  bool again() const { return again_; }
  /// As of the first time it was begun, or since.
  uint64_t step() const { return step_; }
  void set(uint64_t step);

 private:
  LiveState* const state_;
  LiveState::Place place_ = 0;
  bool again_ = false;
  uint64_t step_;
};

}  // namespace ptc
