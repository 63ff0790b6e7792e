// One job of a live cluster, as a state machine: from what is wanted of it to processes that run.
//
//   waits ──► changes ──► runs ──► stops ──► waits …           done, given up, by hand
//        GPUs free   in force   wanted otherwise  ended, its state committed
//
// A step never waits but for files of the mount. Everything that outlives this process is written
// into the job's record before it is done.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tools/planner/elastic/placement.h"
#include "tools/planner/price/prices.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/run/mounted_job.h"
#include "tools/planner/run/pace.h"
#include "tools/planner/run/record.h"
#include "tools/planner/run/worker.h"

namespace ptc::planner {

/// What a job needs of all of them. Times are seconds of one clock that only goes on.
class LiveJobs {
 public:
  virtual ~LiveJobs() = default;
  virtual double now() const = 0;
  virtual void say(const std::string& job, const std::string& text) = 0;
  /// Something happened that is a reason to decide anew.
  virtual void decide_soon(const std::string& why) = 0;
  /// Whether nobody else's processes are on these GPUs.
  virtual bool are_free(uint32_t job, const std::vector<OnNode>& places) const = 0;
  virtual std::vector<std::string> devices_of(const std::vector<OnNode>& places) const = 0;
  virtual Prices& prices() = 0;
  /// "ptc autoscale": what to call with --adopt.
  virtual std::string command() const = 0;
  /// What a change of it to the point on those devices would move; nothing where it has no state
  /// yet.
  virtual Movement movement(const class LiveJob& job, const CurvePoint& point,
                            const std::vector<std::string>& devices) = 0;
};

/// Threads: one.
class LiveJob {
 public:
  LiveJob(uint32_t id, JobToTrain spec, std::string mount, std::string base, std::string logs,
          LiveJobs& all);

  /// What an earlier autoscaler left. `places_of` of devices by name: none, if there are no such.
  void find_again(
      const std::function<std::optional<std::vector<OnNode>>(const std::vector<std::string>&)>&
          places_of);
  /// Reads the mount, and says what has changed there.
  void look();
  void step();

  /// What the next steps bring about; none: nothing of it is to run.
  void want(std::optional<CurvePoint> point, std::vector<OnNode> places, json::object decision);
  void forget_wanted();

  void set_spec(JobToTrain spec);
  void set_curve(const Curve& curve);
  /// Its curve without this way, for good or for a while, each time for longer. Where none is left
  /// for good, it is given up.
  void refuse(const CurvePoint& point, const std::string& why, bool for_good = true);
  /// Those that were refused for a while are tried again when that is over.
  void try_refused_again();
  /// The nodes of the cluster have other numbers: `held` and `wanted` are its devices by name.
  void renumber(const std::function<
                    std::optional<std::vector<OnNode>>(const std::vector<std::string>&)>& places_of,
                const std::vector<std::string>& held, const std::vector<std::string>& wanted);
  /// It never had GPUs, and is not to wait.
  void drop(const std::string& why);
  /// Nobody decides for it any more; its processes go on.
  void leave_alone(const std::string& why);
  /// The same, until set_spec().
  void removed(const std::string& why);

  uint32_t id() const { return id_; }
  const JobToTrain& spec() const { return spec_; }
  const std::string& directory() const { return directory_; }
  LiveState state() const { return record_.state; }
  const Curve& curve() const { return curve_; }
  const std::optional<CurvePoint>& wanted() const { return wanted_; }
  const std::optional<CurvePoint>& has() const { return record_.has; }
  const std::vector<OnNode>& holds() const { return holds_; }    // GPUs that its processes have
  const std::vector<OnNode>& places() const { return places_; }  // that it is to have
  const std::vector<std::string>& devices() const { return record_.devices; }  // holds(), by name
  bool has_processes() const { return worker_.has_value(); }
  /// find_again() was called of the directory that is there.
  bool is_known() const { return is_known_; }
  const std::optional<MountedJob>& seen() const { return seen_; }
  double samples_left() const;
  /// What a sample took there ÷ what its curve says; what was measured last where it never ran, and
  /// 1 until anything is known.
  double slowness_of(const CurvePoint& point) const { return record_.slowness_of(point); }
  /// All that were seen, not those in a row alone: it only grows.
  uint64_t failures() const { return failures_; }
  /// Nothing was consumed since its processes were started.
  bool is_starting() const { return worker_ && !start_is_measured_; }
  /// Whether it takes part in decisions.
  bool is_decided_for() const;
  /// Nor was it ever given GPUs, whatever became of that.
  bool never_had_any() const { return record_.changes == 0 && consumed_ == 0 && !had_room_; }
  bool is_over() const { return state() == LiveState::kDone || state() == LiveState::kGivenUp; }

 private:
  enum class Change { kSaveLayout, kSettle, kSaveBatch, kStart };

  void step_waits();
  void step_changes();
  void step_runs();
  void step_stops();
  void save_the_layout();
  void settle();
  void start();
  void ask_to_end();
  void end_the_removed();
  void kill_it(const std::string& why, double since);
  void say_who_survives();
  void give_up(const std::string& why);
  void note_progress();
  void note_pace();
  void failed(const std::string& why);
  void ended(const Worker::Ended& how);
  void release();
  void wait_until_it_can_be_written();
  void forget_the_removed();
  double stops_within() const;  // seconds
  /// False: it could not be written down, which was said.
  bool enter(LiveState state, const std::string& remark = "");
  bool write();
  void keep_costs();
  bool is_as_wanted() const;
  bool is_consumed() const;
  bool layout_is_ours() const;
  void take_up_adoption();
  /// Of whoever has started it.
  std::string log() const {
    return record_.log.empty() ? logs_ + "/" + spec_.name + ".log" : record_.log;
  }

  const uint32_t id_;
  JobToTrain spec_;
  const std::string mount_, directory_, base_, logs_;
  LiveJobs& all_;

  JobRecord record_;
  std::optional<MountedJob> seen_;
  std::string problem_;      // why it is not seen, as it was said last
  std::string not_written_;  // the same of what is written down
  Curve known_, curve_;      // with, and without what was refused
  struct Refused {
    double until = 0;
    int times = 0;
    std::string why;
  };
  std::map<std::string, Refused> refused_;
  std::string no_way_;  // why it is to be given up, once nothing of it runs
  std::optional<Worker> worker_;
  std::vector<OnNode> holds_, places_;
  std::optional<CurvePoint> wanted_;
  Change change_ = Change::kSaveLayout;
  Movement movement_;
  double since_ = 0, retry_at_ = 0, progress_at_ = 0, spawned_at_ = 0, killed_at_ = 0;
  double consumed_since_ = 0;  // all of it; 0: it is not
  uint64_t failures_ = 0, consumed_ = 0, consumed_at_start_ = 0, consumed_at_failure_ = 0;
  Pace pace_;  // since it was started
  bool start_is_measured_ = false, is_gone_ = false, ends_the_removed_ = false;
  bool survives_ = false;            // who was killed is there yet, and that was said
  bool had_room_ = false;            // a point was wanted once
  bool runs_otherwise_ = false;      // than the layout says that was adopted
  std::optional<uint64_t> done_at_;  // it has said so, with so many consumed, which are not all
  bool is_known_ = false;            // what an earlier autoscaler has done with it
};

}  // namespace ptc::planner
