// The processes of a job: one command, and whatever that starts: its ranks, mostly.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
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

/// What finds it again.
struct WorkerId {
  pid_t pid = 0;  // 0: nothing was started
  /// The boot of the machine, and the ticks since: no other process has the same number and that.
  std::string started_at = {};
  /// In PTC_WORKER of the command's environment, and so of all that it starts, whatever their
  /// sessions are. "": it is not known; then only those of its session are.
  std::string mark = {};
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
  /// It never becomes that command, and has ended.
  void take_back();
  /// That command, or what it has left behind (which, where it was asked to end, is asked once
  /// more); none: all have ended.
  static std::optional<Worker> find(const WorkerId& id, bool was_asked_to_end = false);

  pid_t pid() const { return id_.pid; }
  const WorkerId& id() const { return id_; }

  /// Asks it to end (SIGTERM): it, and when it ends without them, those that it has started.
  void ask_to_end();
  /// It and all that it has started. Who waits for a device or a file system that does not answer
  /// may be there yet.
  void kill();
  /// Those of them who are; none: that cannot be said just now. Cost: O(processes of the machine).
  std::optional<std::vector<pid_t>> members();
  /// The command has ended so long ago, and whoever is left of it was killed and does not end.
  bool lingers() const;

  struct Ended {
    std::optional<int> status;  // 0 … 255, or 128 + the signal; none: it was found, nobody knows
  };
  /// none: it, or something that it has started, is still there. Once it has ended by itself, what
  /// is left of that is killed; once it was asked to, that has until kill().
  std::optional<Ended> ended();

 private:
  Worker(WorkerId id, bool is_child);

  using Clock = std::chrono::steady_clock;

  static Result<Worker> spawn(const WorkerCommand& command, UniqueFd input);
  /// Whether its number is still its own.
  bool is_there() const;
  bool look_at_leader();
  void signal_all(const std::vector<pid_t>& pids, int signal);

  WorkerId id_;
  uint64_t ticks_ = 0;  // when it was started: nobody of it was before
  bool is_child_;
  bool was_asked_ = false, was_killed_ = false;
  bool is_over_ = false;     // the command; others may be there yet
  bool were_asked_ = false;  // they
  bool is_empty_ = false;    // the last look has found nobody
  bool is_unclear_ = false;  // nobody can say whose some are, who are about to start or to end
  Clock::time_point over_at_, next_look_;
  std::map<pid_t, uint64_t> seen_, others_;  // who is one of it, and who is not, and when he began
  std::optional<int> status_;
  UniqueFd gate_;  // what it waits for can be written there
};

}  // namespace ptc::planner
