#include "tools/planner/run/live_job.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <utility>

namespace ptc::planner {
namespace {

constexpr uint64_t kMostFailures = 5;  // in a row, nothing consumed between
constexpr int kMostRefusals = 5;
constexpr double kMostBackoff = 60, kSoon = 1, kAgainKilled = 5, kNotWritten = 5;
constexpr double kNoted = 0.1;  // of its slowness: it is written down when it differs by so much
constexpr const char* kAdopt = "autoscale.adopt";

std::string status_text(const Worker::Ended& how) {
  if (!how.status) return "it has ended";
  return *how.status > 128 ? fmt::format("it was ended by signal {}", *how.status - 128)
                           : fmt::format("it ended with exit status {}", *how.status);
}

/// As it comes back from the file: numbers are of the same kind then.
json::object as_read(const json::object& object) {
  return json::parse(json::serialize(object)).get_object();
}

}  // namespace

LiveJob::LiveJob(uint32_t id, JobToTrain spec, std::string mount, std::string base,
                 std::string logs, LiveJobs& all)
    : id_(id),
      spec_(std::move(spec)),
      mount_(std::move(mount)),
      directory_(mount_ + "/" + spec_.name),
      base_(std::move(base)),
      logs_(std::move(logs)),
      all_(all) {}

double LiveJob::stops_within() const {
  return (spec_.run ? *spec_.run : JobToTrain::Run()).stops_within_s;
}

bool LiveJob::write() {
  if (is_gone_ || ends_the_removed_) return false;
  const Result<> written = write_record(directory_, record_);
  const std::string why = written.has_error() ? std::string(written.error().message()) : "";
  if (std::exchange(not_written_, why) != why && !why.empty())
    all_.say(spec_.name, "what was done with it could not be written down: " + why);
  return why.empty();
}

bool LiveJob::enter(LiveState state, const std::string& remark) {
  record_.state = state;
  record_.samples = state == LiveState::kDone ? spec_.samples : 0;
  record_.remark = remark;
  since_ = all_.now();
  return write();
}

void LiveJob::set_spec(JobToTrain spec) {
  const bool asks_for_more = spec.samples > spec_.samples || spec.run != spec_.run;
  spec_ = std::move(spec);
  if (std::exchange(record_.was_removed, false) && state() == LiveState::kByHand) {
    wanted_ = record_.has;
    places_ = holds_;
    enter(worker_ ? LiveState::kRuns : LiveState::kWaits);
    all_.decide_soon(spec_.name + " is there again");
  }
  if (is_over() && asks_for_more) {
    record_.failures = 0;
    refused_.clear();
    enter(LiveState::kWaits);
    all_.decide_soon(spec_.name + " is to go on");
  }
}

void LiveJob::set_curve(const Curve& curve) {
  known_ = curve;
  try_refused_again();
}

void LiveJob::try_refused_again() {
  curve_ = known_;
  std::erase_if(curve_.points, [&](const CurvePoint& point) {
    const auto refused = refused_.find(point_key(point));
    return refused != refused_.end() && refused->second.until > all_.now();
  });
}

void LiveJob::refuse(const CurvePoint& point, const std::string& why, bool for_good) {
  constexpr double kForNow = 60;  // seconds, the first time; space comes back, and nodes do
  Refused& refused = refused_[point_key(point)];
  const bool is_new = std::exchange(refused.why, why) != why;
  refused.until = for_good ? std::numeric_limits<double>::infinity()
                           : all_.now() + kForNow * std::pow(2.0, refused.times);
  refused.times = std::min(refused.times + 1, kMostRefusals);
  try_refused_again();
  if (is_new)
    all_.say(spec_.name,
             fmt::format("{} cannot be had{}: {}", point.way, for_good ? "" : " for now", why));
  if (!curve_.empty()) return;
  forget_wanted();
  const bool all_for_good =
      std::all_of(known_.points.begin(), known_.points.end(), [&](const CurvePoint& one) {
        const auto known = refused_.find(point_key(one));
        return known != refused_.end() &&
               (std::isinf(known->second.until) || known->second.times >= kMostRefusals);
      });
  if (!all_for_good) return;
  no_way_ = "none of the ways that its profiles have can be carried out; the last: " + why;
  if (!worker_) give_up(no_way_);  // else once it has saved
}

void LiveJob::give_up(const std::string& why) {
  no_way_.clear();
  forget_wanted();
  enter(LiveState::kGivenUp, why);
  all_.say(spec_.name, why);
  all_.decide_soon(spec_.name + " is given up");
}

double LiveJob::samples_left() const {
  return std::max(spec_.samples - static_cast<double>(consumed_), 1.0);
}

bool LiveJob::is_consumed() const { return static_cast<double>(consumed_) >= spec_.samples; }

bool LiveJob::is_decided_for() const {
  return seen_ && !is_over() && state() != LiveState::kByHand && !curve_.empty();
}

bool LiveJob::is_as_wanted() const {
  return !runs_otherwise_ && wanted_ && record_.has && wanted_->is_as(*record_.has) &&
         holds_ == places_;
}

bool LiveJob::layout_is_ours() const {
  return !record_.layout || seen_->layout == *record_.layout ||
         (record_.layout_before && seen_->layout == *record_.layout_before);
}

void LiveJob::look() {
  auto seen = look_at_job(directory_);
  if (seen.has_error()) {
    // The mount itself answers, or nothing is known. Of a job that is there layout.json alone may
    // be away: its user is at it.
    struct stat facts = {};
    is_gone_ = ::lstat(directory_.c_str(), &facts) != 0 && errno == ENOENT &&
               ::access((mount_ + "/.ptc/version").c_str(), F_OK) == 0;
    const std::string why = is_gone_ ? fmt::format("there is no job {}; mkdir makes it", directory_)
                                     : std::string(seen.error().message());
    if (std::exchange(problem_, why) != why) all_.say(spec_.name, why);
    seen_.reset();
    if (is_gone_ && !worker_) forget_the_removed();
    return;
  }
  const bool is_new = !seen_;
  is_gone_ = false;
  const std::string problem_before = std::exchange(problem_, "");
  seen_ = std::move(seen).value();
  consumed_ = seen_->consumed;
  if (is_new) {
    if (!problem_before.empty()) all_.say(spec_.name, "it is there");
    progress_at_ = all_.now();  // nobody could see any meanwhile
    all_.decide_soon(spec_.name + " is there");
  }
  if (is_known_) take_up_adoption();
}

/// Another of its name is begun anew.
void LiveJob::forget_the_removed() {
  forget_wanted();
  release();
  const bool is_listed = !record_.was_removed;
  record_ = {};
  if (!is_listed) {
    record_.state = LiveState::kByHand;
    record_.was_removed = true;
  }
  refused_.clear();
  no_way_.clear();
  consumed_ = consumed_at_failure_ = 0;
  done_at_.reset();
  had_room_ = false;
  ends_the_removed_ = is_known_ = false;
  set_curve(Curve(known_));
}

void LiveJob::find_again(
    const std::function<std::optional<std::vector<OnNode>>(const std::vector<std::string>&)>&
        places_of) {
  is_known_ = true;
  auto record = read_record(directory_);
  if (!record) return;
  if (!record->is_own) {
    all_.say(spec_.name, "its autoscale.json is somebody else's, and is not heeded");
    if (!Worker::find(record->worker)) return;
    // Nor is it started beside that. What it says of GPUs is true of root's alone.
    if (const auto places = places_of(record->devices); places && record->owner == 0)
      holds_ = *places;
    record_.state = LiveState::kByHand;
    all_.say(spec_.name, fmt::format("process {} of it runs, which another user has started: it is "
                                     "left alone until \"{} --adopt {}\"",
                                     record->worker.pid, all_.command(), spec_.name));
    return;
  }
  record_ = std::move(*record);
  had_room_ = record_.has.has_value();
  if (record_.costs) all_.prices().restore(spec_.name, *record_.costs);
  worker_ = Worker::find(record_.worker, record_.was_asked_to_end);
  const double now = all_.now();
  since_ = progress_at_ = spawned_at_ = now;
  start_is_measured_ = true;
  consumed_at_start_ = consumed_;
  // Killed between its note and the file: the old text still stands there.
  if (seen_ && record_.layout && record_.layout_before && seen_->layout == *record_.layout_before)
    record_.layout = record_.layout_before;
  if (worker_) {
    if (const auto places = places_of(record_.devices)) holds_ = *places;
    wanted_ = record_.has;
    places_ = holds_;
    if (state() == LiveState::kByHand && !std::exchange(record_.was_removed, false)) return;
    if (record_.state == LiveState::kStops) return;
    record_.state = LiveState::kRuns;
    all_.say(spec_.name, fmt::format("it runs already (process {})", worker_->pid()));
    return;
  }
  record_.worker = {};
  const bool is_listed_again = state() == LiveState::kByHand && record_.was_removed;
  const bool asks_for_more =
      state() == LiveState::kDone && record_.samples > 0 && spec_.samples > record_.samples;
  record_.was_removed = false;
  if ((state() == LiveState::kDone && !asks_for_more) ||
      (state() == LiveState::kByHand && !is_listed_again))
    return;
  record_.failures = 0;
  record_.state = LiveState::kWaits;
  record_.has.reset();
  record_.devices.clear();
}

void LiveJob::take_up_adoption() {
  const std::string path = directory_ + "/" + kAdopt;
  struct stat facts = {};
  if (::lstat(path.c_str(), &facts) != 0 || !S_ISREG(facts.st_mode)) return;
  // Who is not listed is decided for once he is.
  if ((state() != LiveState::kByHand && !is_over() && layout_is_ours()) || record_.was_removed) {
    ::unlink(path.c_str());
    return;
  }
  runs_otherwise_ = worker_ && !layout_is_ours();
  record_.layout = seen_->layout;
  record_.layout_before.reset();
  record_.failures = 0;
  refused_.clear();
  set_curve(Curve(known_));
  enter(worker_ ? LiveState::kRuns : LiveState::kWaits);
  if (!worker_) release();
  write();
  ::unlink(path.c_str());
  all_.say(spec_.name, "it is decided for again");
  all_.decide_soon(spec_.name + " was adopted");
}

void LiveJob::drop(const std::string& why) { give_up("it is dropped: " + why); }

void LiveJob::leave_alone(const std::string& why) {
  forget_wanted();
  if (!worker_) release();
  enter(LiveState::kByHand, why);
  all_.say(spec_.name, why);
  all_.decide_soon(spec_.name + " is left alone");
}

void LiveJob::removed(const std::string& why) {
  if (is_over() || state() == LiveState::kByHand) return;
  record_.was_removed = true;
  leave_alone(why);
}

void LiveJob::want(std::optional<CurvePoint> point, std::vector<OnNode> places,
                   json::object decision) {
  wanted_ = std::move(point);
  had_room_ |= wanted_.has_value();
  places_ = std::move(places);
  record_.decision = std::move(decision);
  write();
}

void LiveJob::forget_wanted() {
  wanted_.reset();
  places_.clear();
}

void LiveJob::release() {
  runs_otherwise_ = false;
  holds_.clear();
  record_.has.reset();
  record_.devices.clear();
  record_.worker = {};
  record_.was_asked_to_end = false;
}

void LiveJob::step() {
  if (state() == LiveState::kByHand) {
    if (worker_ && worker_->ended()) {
      worker_.reset();
      release();
      write();
      all_.decide_soon("the processes of " + spec_.name + " have ended");
    } else if (worker_ && worker_->lingers()) {
      say_who_survives();
    }
    return;
  }
  if ((is_gone_ || ends_the_removed_) && worker_) return end_the_removed();
  if (!seen_ && !worker_) return;
  if (seen_ && !is_over() && !layout_is_ours()) {
    leave_alone(fmt::format(
        "somebody else has saved its layout.json: it is left alone until \"{} --adopt {}\"",
        all_.command(), spec_.name));
    return;
  }
  switch (state()) {
    case LiveState::kWaits:
      return step_waits();
    case LiveState::kChanges:
      return step_changes();
    case LiveState::kRuns:
      return step_runs();
    case LiveState::kStops:
      return step_stops();
    default:
      return;
  }
}

/// Its directory was removed: so its processes are to end, and nothing is written any more.
void LiveJob::end_the_removed() {
  if (!std::exchange(ends_the_removed_, true)) {
    all_.say(spec_.name, "the job was removed: its processes are ended");
    forget_wanted();
    record_.was_asked_to_end = true;
    since_ = all_.now();
    worker_->ask_to_end();
  }
  if (all_.now() - since_ > stops_within()) kill_it("", since_);
  if (!worker_->ended()) return;
  worker_.reset();
  forget_the_removed();
  seen_.reset();  // where another of its name is there, it is looked for anew
  all_.decide_soon(spec_.name + " was removed");
}

/// `since`: what it is killed for. Where it was for that already, it is said once who is there yet.
void LiveJob::kill_it(const std::string& why, double since) {
  if (all_.now() - killed_at_ <= kAgainKilled) return;
  const bool is_first = killed_at_ <= since;
  if (is_first && !why.empty()) all_.say(spec_.name, why);
  if (is_first) survives_ = false;
  killed_at_ = all_.now();
  worker_->kill();
  if (!is_first) say_who_survives();
}

void LiveJob::say_who_survives() {
  if (std::exchange(survives_, true)) return;
  const auto there = worker_->members();
  if (!there || there->empty()) return;
  all_.say(spec_.name,
           fmt::format("of its processes {} were killed, and are there yet: they wait for a device "
                       "or a file system that does not answer; its GPUs are not free",
                       fmt::join(*there, ", ")));
}

void LiveJob::renumber(
    const std::function<std::optional<std::vector<OnNode>>(const std::vector<std::string>&)>&
        places_of,
    const std::vector<std::string>& held, const std::vector<std::string>& wanted) {
  holds_ = places_of(held).value_or(std::vector<OnNode>());
  const auto places = places_of(wanted);
  if (places) places_ = *places;
  else forget_wanted();
}

void LiveJob::step_waits() {
  if (!seen_) return;
  if (curve_.empty() && no_way_.empty()) {  // all was refused, some of it for a while
    try_refused_again();
    if (!curve_.empty()) all_.decide_soon(spec_.name + " can try again what was refused");
  }
  if (!no_way_.empty()) {
    give_up(std::string(no_way_));
    return;
  }
  if (is_consumed() && record_.failures == 0) {
    forget_wanted();
    enter(LiveState::kDone);
    all_.say(spec_.name, fmt::format("all its {} samples are consumed", consumed_));
    all_.decide_soon(spec_.name + " has ended");
    return;
  }
  if (!wanted_ || all_.now() < retry_at_ || !all_.are_free(id_, places_)) return;
  holds_ = places_;
  record_.has = wanted_;
  record_.devices = all_.devices_of(holds_);
  movement_ = all_.movement(*this, *wanted_, record_.devices);
  change_ = Change::kSaveLayout;
  if (enter(LiveState::kChanges)) step_changes();
  else wait_until_it_can_be_written();
}

void LiveJob::wait_until_it_can_be_written() {
  release();
  retry_at_ = all_.now() + kNotWritten;
  enter(LiveState::kWaits, "it is not started: what is done with it cannot be written down");
}

void LiveJob::step_changes() {
  if (!seen_ || all_.now() < retry_at_) return;
  if (!is_as_wanted()) {  // decided otherwise meanwhile
    release();
    enter(LiveState::kWaits);
    return;
  }
  switch (change_) {
    case Change::kSaveLayout:
      return save_the_layout();
    case Change::kSettle:
      return settle();
    case Change::kSaveBatch:
      if (auto saved = save_batch(directory_, record_.has->batch); saved.has_error()) {
        if (saved.error().code() != Code::kInvalidArgument) {
          retry_at_ = all_.now() + kSoon;
          if (record_.remark.empty())
            all_.say(spec_.name, "its batch waits: " + std::string(saved.error().message()));
          record_.remark = saved.error().message();
          write();
          return;
        }
        const CurvePoint point = *record_.has;
        release();
        enter(LiveState::kWaits);
        forget_wanted();
        refuse(point, fmt::format("order.json refuses a batch of {}: {}", point.batch,
                                  saved.error().message()));
        all_.decide_soon("a batch of " + spec_.name + " was refused");
        return;
      }
      change_ = Change::kStart;
      [[fallthrough]];
    case Change::kStart:
      return start();
  }
}

void LiveJob::save_the_layout() {
  look();  // somebody may have saved another one since
  if (!seen_ || state() != LiveState::kChanges || !layout_is_ours()) return;
  const CurvePoint point = *record_.has;
  const uint64_t before = seen_->revision;
  auto layout = layout_of_point(seen_->layout, point, record_.devices);
  Result<> saved = ok();
  if (layout.has_error()) {
    saved = std::move(layout).error();
  } else {
    const json::object wanted = as_read(layout.value());
    record_.layout_before = seen_->layout;
    record_.layout = wanted;
    write();
    saved = save_layout(directory_, wanted);
    // Its ranks may be too many for the batch that it had.
    if (saved.has_error() && saved.error().code() == Code::kInvalidArgument)
      if (const uint64_t batch = batch_of(directory_); batch != 0 && batch != point.batch)
        if (save_batch(directory_, point.batch)) saved = save_layout(directory_, wanted);
  }
  if (saved.has_value()) {
    record_.layout_before.reset();
    change_ = Change::kSettle;
    since_ = all_.now();
    look();
    if (seen_ && seen_->revision > before + 1) {
      release();
      leave_alone(fmt::format(
          "somebody else has saved its layout.json at the same moment, which was replaced: it is "
          "left alone until \"{} --adopt {}\"",
          all_.command(), spec_.name));
    }
    return;
  }
  if (saved.error().code() != Code::kInvalidArgument) {  // it may yet come to be saved
    retry_at_ = all_.now() + kSoon;
    if (record_.remark.empty())
      all_.say(spec_.name, "its layout waits: " + std::string(saved.error().message()));
    record_.remark = saved.error().message();
    write();
    return;
  }
  record_.layout = seen_->layout;
  record_.layout_before.reset();
  release();
  forget_wanted();
  enter(LiveState::kWaits);
  refuse(point, std::string(saved.error().message()), false);
  all_.decide_soon("a layout of " + spec_.name + " was refused");
}

void LiveJob::settle() {
  if (!seen_) return;
  if (seen_->state == "failed") {
    const CurvePoint point = *record_.has;
    release();
    forget_wanted();
    enter(LiveState::kWaits);
    refuse(point, "its state could not be brought there: " + seen_->last_error, false);
    all_.decide_soon("a reshard of " + spec_.name + " failed");
    return;
  }
  if (!seen_->is_settled) return;
  refused_.erase(point_key(*record_.has));
  all_.prices().brought(movement_, all_.now() - since_);
  keep_costs();
  change_ = Change::kSaveBatch;
  step_changes();
}

void LiveJob::start() {
  const CurvePoint& point = *record_.has;
  WorkerCommand command;
  command.command = spec_.run->command;
  command.directory = spec_.run->directory.empty()
                          ? base_
                          : (std::filesystem::path(base_) / spec_.run->directory).string();
  record_.log = logs_ + "/" + spec_.name + ".log";
  command.log = log();
  std::string gpus;
  bool one_node = holds_.size() == 1;
  if (one_node) gpus = fmt::format("{}", fmt::join(holds_.front().gpus, ","));
  command.variables = {{"PTC_JOB", directory_},
                       {"PTC_BATCH", std::to_string(point.batch)},
                       {"PTC_TECHNIQUE", point.technique},
                       {"PTC_TP", std::to_string(point.tp)},
                       {"PTC_PP", std::to_string(point.pp)},
                       {"PTC_DP", std::to_string(point.dp)},
                       {"PTC_DEVICES", fmt::format("{}", fmt::join(record_.devices, ","))},
                       {"WORLD_SIZE", std::to_string(point.gpus)}};
  if (one_node) command.variables.emplace_back("CUDA_VISIBLE_DEVICES", gpus);
  auto started = Worker::prepare(command);
  if (started.has_error() && started.error().code() != Code::kInvalidArgument)
    return failed(std::string(started.error().message()));
  if (started.has_error()) {
    release();
    forget_wanted();
    enter(LiveState::kGivenUp, std::string(started.error().message()));
    all_.say(spec_.name, record_.remark);
    all_.decide_soon(spec_.name + " cannot be started");
    return;
  }
  worker_ = std::move(started).value();
  survives_ = false;
  record_.worker = worker_->id();
  record_.was_asked_to_end = false;
  ++record_.changes;
  spawned_at_ = progress_at_ = all_.now();
  consumed_at_start_ = consumed_;
  start_is_measured_ = false;
  pace_ = {};
  if (!enter(LiveState::kRuns)) {  // nobody would find it again
    worker_->take_back();
    worker_.reset();
    --record_.changes;
    wait_until_it_can_be_written();
    return;
  }
  worker_->go();
  all_.say(spec_.name, fmt::format("it runs on {} with batch {} (process {})",
                                   fmt::join(record_.devices, " "), point.batch, worker_->pid()));
}

/// What the start took: until now, but for what was trained meanwhile.
void LiveJob::note_progress() {
  if (consumed_ == consumed_at_start_ || !record_.has) return;
  note_pace();
  if (consumed_ > consumed_at_start_) progress_at_ = all_.now();
  if (!start_is_measured_ && consumed_ > consumed_at_start_ && record_.has->samples_per_s > 0) {
    const double trained =
        static_cast<double>(consumed_ - consumed_at_start_) / record_.has->samples_per_s;
    all_.prices().started(spec_.name, all_.now() - spawned_at_ - trained);
    start_is_measured_ = true;
    keep_costs();
    write();
  }
  consumed_at_start_ = consumed_;
}

void LiveJob::note_pace() {
  const auto slowness = pace_.note(all_.now(), consumed_, record_.has->samples_per_s);
  if (!slowness) return;
  const double before = record_.note_slowness(*record_.has, *slowness);
  if (std::abs(*slowness - before) > kNoted * before) write();
}

void LiveJob::keep_costs() { record_.costs = all_.prices().of_job(spec_.name); }

void LiveJob::step_runs() {
  note_progress();
  if (const auto how = worker_->ended()) {
    worker_.reset();
    ended(*how);
    return;
  }
  if (worker_->lingers()) return say_who_survives();
  if (seen_ && spec_.run->progress_within_s && !is_consumed() &&
      all_.now() - progress_at_ > *spec_.run->progress_within_s) {
    kill_it(
        fmt::format("nothing was consumed for {:.0f} s: it is killed", all_.now() - progress_at_),
        progress_at_);
    return;
  }
  if (!is_consumed()) consumed_since_ = 0;
  else if (consumed_since_ == 0) consumed_since_ = all_.now();
  const bool hangs = consumed_since_ != 0 && all_.now() - consumed_since_ > stops_within();
  if (hangs)
    all_.say(spec_.name, "all its samples are consumed, and it does not end: it is asked to");
  if (hangs || !is_as_wanted()) ask_to_end();
}

void LiveJob::ask_to_end() {
  enter(LiveState::kStops);
  worker_->ask_to_end();
  record_.was_asked_to_end = true;
  write();
}

void LiveJob::step_stops() {
  if (worker_ && !record_.was_asked_to_end) {  // an earlier autoscaler was killed just then
    worker_->ask_to_end();
    record_.was_asked_to_end = true;
    write();
  }
  const auto how = worker_ ? worker_->ended() : std::optional<Worker::Ended>(Worker::Ended{});
  if (!how) {
    if (all_.now() - since_ > stops_within())
      kill_it(fmt::format("it was asked to end {:.0f} s ago: it is killed, and goes on from its "
                          "last checkpoint",
                          all_.now() - since_),
              since_);
    return;
  }
  worker_.reset();
  if (killed_at_ <= since_) all_.prices().stopped(spec_.name, all_.now() - since_);
  keep_costs();
  release();
  look();
  if (how->status == 0 && is_consumed()) {  // it has come to its end just then
    ended(*how);
    return;
  }
  // Killed, it has not saved its last: what it has consumed is not all of it kept.
  if (how->status == 128 + SIGKILL || killed_at_ > since_)
    record_.failures = std::max<uint64_t>(record_.failures, 1);
  enter(LiveState::kWaits);
  step_waits();
}

void LiveJob::ended(const Worker::Ended& how) {
  look();
  // Where all is consumed, and it failed, it was saving yet. Where it says that it is done before
  // all is consumed, it says so once more when it starts again.
  const bool says_so = how.status == 0;
  const bool again = says_so && done_at_ && consumed_ <= *done_at_;
  done_at_ = says_so ? std::optional(consumed_) : std::nullopt;
  if (again || ((says_so || !how.status) && is_consumed())) {
    release();
    forget_wanted();
    const std::string what = fmt::format("{} of {:.0f} samples consumed", consumed_, spec_.samples);
    enter(LiveState::kDone, is_consumed() ? "" : "it says so, " + what);
    all_.say(spec_.name, "it has ended, " + what);
    all_.decide_soon(spec_.name + " has ended");
    return;
  }
  failed(status_text(how));
}

void LiveJob::failed(const std::string& why) {
  ++failures_;
  record_.failures = consumed_ > consumed_at_failure_ ? 1 : record_.failures + 1;
  consumed_at_failure_ = consumed_;
  release();
  if (record_.failures >= kMostFailures) {
    forget_wanted();
    enter(LiveState::kGivenUp,
          fmt::format("{}, {} times without progress; see {}", why, record_.failures, log()));
    all_.say(spec_.name, record_.remark);
    all_.decide_soon(spec_.name + " is given up");
    return;
  }
  const double backoff =
      std::min(kMostBackoff, std::pow(2.0, static_cast<double>(record_.failures) - 1));
  retry_at_ = all_.now() + backoff;
  enter(LiveState::kWaits, why);
  all_.say(spec_.name,
           fmt::format("{}; it starts again in {:.0f} s (see {})", why, backoff, log()));
}

}  // namespace ptc::planner
