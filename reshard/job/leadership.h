// Who decides what a job's nodes do: one node at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"

namespace ptc {

/// That this node leads, from its lead() on until this goes. In a cluster that is a key under the
/// node's lease, leaders/<job>; nothing rests on there being one, for each decision of a leader
/// names it, as all that it was based on. It names no fence itself: nothing is put under a lease
/// that has ended, and one that a former life of this node left can decide nothing, for what it
/// would decide names its fence. Threads: one; both ends wait for the agreement store.
class Leadership {
 public:
  /// null: another node leads, or this one cannot. `place` outlives it.
  static std::unique_ptr<Leadership> take(const JobPlace& place);
  Leadership(const Leadership&) = delete;
  Leadership& operator=(const Leadership&) = delete;
  ~Leadership();  // gives it back, unless a later leader has it

  /// It has found, or brought about, that all is where it shall be: said when it is given back, in
  /// the same transaction, under this node's lease (looked/<job>). `view`: KnownJob::view().
  void has_looked(std::string view) { view_ = std::move(view); }
  /// Whether a leader has said that of what this node knows. Each change makes every node look for
  /// what is to do; so one of them does, however many they are, and the others only read that.
  static bool has_anybody_looked(const JobPlace& place, const std::string& view);

  /// Grows with each leader, in the whole cluster: one that was stopped, and is no leader any more,
  /// gets nothing done where a later one has been heard of. 0: nobody else decides, so it is not
  /// agreed on.
  int64_t epoch() const { return epoch_; }
  /// A later leader has the nodes throw away what an earlier one had them make.
  void name_in(JobDecision& decision) const;

 private:
  Leadership(const JobPlace& place, int64_t epoch) : place_(place), epoch_(epoch) {}
  Result<int64_t> give_back() const;

  const JobPlace& place_;
  const int64_t epoch_;
  std::optional<std::string> view_;
};

}  // namespace ptc
