// The processes of a job: one command, whose children are its ranks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"

namespace ptc::planner {

struct WorkerCommand {
  std::vector<std::string> command;                            // not empty
  std::string directory;                                       // where it starts
  std::string log;                                             // standard output and error go there
  std::vector<std::pair<std::string, std::string>> variables;  // beside this process's own
  std::string input = {};   // a file for its standard input; empty: nothing
  std::string output = {};  // and for its output; empty: the log too
};

/// A command in a session of its own, which goes on when this process ends; another one finds it
/// again by find(). Threads: one.
class Worker {
 public:
  /// kInvalidArgument: there is no such program, or it cannot be started.
  static Result<Worker> start(const WorkerCommand& command);
  /// The same process, which waits for go() before it is that command. Where this process ends
  /// before, so does that: whoever is found again has been written down. `input` is not used.
  static Result<Worker> prepare(const WorkerCommand& command);
  void go();
  /// The one that had this number and began at that time, as started_at() said, or what it has left
  /// of its group (which, where it was asked to end, is asked once more); none: all have ended.
  static std::optional<Worker> find(pid_t pid, const std::string& started_at,
                                    bool was_asked_to_end = false);

  pid_t pid() const { return pid_; }
  /// The boot of the machine, and the ticks since: no other process has the same number and that.
  const std::string& started_at() const { return started_at_; }

  /// Asks it to end (SIGTERM): it, and when it ends without them, those of its group.
  void ask_to_end();
  /// It and all processes of its session that have not left its group.
  void kill();

  struct Ended {
    std::optional<int> status;  // 0 … 255, or 128 + the signal; none: it was found, nobody knows
  };
  /// none: it, or something of its group, is still there. Once it has ended by itself, what is left
  /// of its group is killed; once it was asked to, that has until kill().
  std::optional<Ended> ended();

 private:
  Worker(pid_t pid, std::string started_at, bool is_child)
      : pid_(pid), started_at_(std::move(started_at)), is_child_(is_child) {}

  static Result<Worker> spawn(const WorkerCommand& command, UniqueFd input);
  /// Whether its number is still its own.
  bool is_there() const;
  bool has_group() const;
  bool look_at_leader();

  pid_t pid_;
  std::string started_at_;
  bool is_child_;
  bool was_asked_ = false, was_killed_ = false;
  bool is_over_ = false;  // the command; its group may be there yet
  std::chrono::steady_clock::time_point over_at_;
  std::optional<int> status_;
  UniqueFd gate_;  // what it waits for can be written there
};

}  // namespace ptc::planner
