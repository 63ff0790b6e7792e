#include "tools/planner/run/live.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "store/base/file.h"
#include "tools/planner/elastic/placement.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/run/live_job.h"
#include "tools/planner/spase/gantt.h"

namespace ptc::planner {
namespace {

constexpr auto kStep = std::chrono::milliseconds(50);
constexpr double kLooks = 0.5;  // seconds between looks at the mount
constexpr double kPatienceWithNodes = 2;
constexpr double kTogether = 0.2;               // what happens within this is one reason to decide
constexpr double kAsks = 2, kAsksAStep = 0.05;  // for what changes would move
constexpr double kAskAgain = 1;                 // of a mount that does not answer
constexpr auto kLockPatience = std::chrono::milliseconds(0);

/// Which version of a file it is: a rename over it has another inode.
std::string version_of(const std::string& path) {
  struct stat facts = {};
  if (::stat(path.c_str(), &facts) != 0) return "";
  return fmt::format("{} {} {} {}.{}", facts.st_dev, facts.st_ino, facts.st_size,
                     facts.st_mtim.tv_sec, facts.st_mtim.tv_nsec);
}

json::value short_point(const std::optional<CurvePoint>& point) {
  if (!point) return nullptr;
  return json::object{{"gpus", point->gpus}, {"batch", point->batch}, {"way", point->way}};
}

std::string gpus_and_batch(const std::optional<CurvePoint>& point) {
  if (!point) return "no GPU";
  return fmt::format("{}, batch {} ({})", counted(point->gpus, "GPU"), point->batch, point->way);
}

class LiveCluster : public LiveJobs {
 public:
  LiveCluster(LiveSettings settings, LiveUses uses, Decider& decider)
      : settings_(std::move(settings)), uses_(std::move(uses)), decider_(decider), placement_({}) {}

  Result<> begin() {
    PTC_TRY(lock());
    settings_.logs = std::filesystem::absolute(settings_.logs).string();
    const std::string version = version_of(settings_.file);
    PTC_TRY(auto checked, read_checked());
    take_up(std::move(checked));
    note_version(version);
    for (LiveJob* job : in_order()) look_at(*job);
    find_those_not_listed();
    PTC_TRY(check_nobody_loses_its_gpus(from_.file.nodes));
    PTC_TRY(make_directory(AT_FDCWD, settings_.logs, 0755));  // nothing is wrong: now it is written
    say_how_it_begins();
    reasons_.clear();
    decide_soon(fmt::format("the {} begins", decider_.name()));
    return ok();
  }

  /// Of a file that is never written: a lock is all that it has. It goes with the daemon.
  Result<> lock() {
    PTC_TRY(lock_, open_file(AT_FDCWD, settings_.mount + "/.ptc/version", O_RDONLY));
    PTC_TRY(const bool locked, lock_file(lock_.get(), kLockPatience));
    if (locked) return ok();
    return make_error(Code::kBusy,
                      "another autoscaler is at work in {}: \"ptc autoscale\" or \"ptc spase run\"",
                      settings_.mount);
  }

  /// Another daemon may have mounted in the same place.
  bool is_of_this_daemon(int fd) const {
    struct stat locked = {}, there = {};
    return ::fstat(fd, &locked) == 0 &&
           ::stat((settings_.mount + "/.ptc/version").c_str(), &there) == 0 &&
           locked.st_dev == there.st_dev && locked.st_ino == there.st_ino;
  }

  /// An error: somebody else is at work in the mount by now.
  Result<> run() {
    double looked = -kLooks, decided = now();
    while (!uses_.is_stopped()) {
      if (now() - looked >= kLooks) {
        looked = now();
        read_file_again();
        PTC_TRY(look_at_nodes());
        if (lock_.valid()) {
          for (LiveJob* job : in_order()) look_at(*job);
          for (const std::string& why : decider_.reasons(in_order())) decide_soon(why);
        }
      }
      if (!lock_.valid()) {  // the mount does not answer, and another may have begun in it
        std::this_thread::sleep_for(kStep);
        continue;
      }
      for (LiveJob* job : in_order()) job->step();
      ask_what_is_left();
      const bool is_time = now() - decided >= settings_.every_s;
      if (is_time || (!reasons_.empty() && now() - reason_at_ >= kTogether)) {
        if (reasons_.empty())
          reasons_.push_back(fmt::format("{:.0f} s have passed", settings_.every_s));
        decided = now();
        decide_now();
        reasons_.clear();
        for (LiveJob* job : in_order()) job->step();
      }
      if (settings_.until_done && is_all_over()) return ok();
      std::this_thread::sleep_for(kStep);
    }
    return ok();
  }

  std::vector<std::string> given_up() const {
    std::vector<std::string> names;
    for (const auto& [name, job] : jobs_)
      if (job->state() == LiveState::kGivenUp) names.push_back(name);
    return names;
  }

  void say_how_it_begins() const {
    size_t done = 0;
    for (const auto& [name, job] : jobs_) done += job->state() == LiveState::kDone;
    std::string text = fmt::format("{}, {} done", counted(jobs_.size(), "job"), done);
    if (is_all_over())
      text += settings_.until_done
                  ? "; there is nothing to do"
                  : fmt::format("; it waits until {} changes, or a job is adopted", settings_.file);
    uses_.say(text);
  }

  void say_how_it_ends() const {
    size_t running = 0;
    for (const auto& [name, job] : jobs_)
      running += job->state() == LiveState::kRuns || job->state() == LiveState::kStops;
    if (running > 0)
      uses_.say(fmt::format("{} on; the next {} finds {} again",
                            counted(running, "job") + (running == 1 ? " goes" : " go"),
                            decider_.name(), running == 1 ? "it" : "them"));
  }

  // LiveJobs
  double now() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void say(const std::string& job, const std::string& text) override {
    uses_.say(fmt::format("{}: {}", job, text));
  }

  void decide_soon(const std::string& why) override {
    if (reasons_.empty()) reason_at_ = now();
    reasons_.push_back(why);
  }

  bool are_free(uint32_t job, const std::vector<OnNode>& places) const override {
    for (const OnNode& on : places)
      if (!placement_.works(on.node)) return false;
    for (const auto& [name, other] : jobs_) {
      if (other->id() == job) continue;
      for (const OnNode& theirs : other->holds())
        for (const OnNode& mine : places)
          if (theirs.node == mine.node &&
              std::find_first_of(theirs.gpus.begin(), theirs.gpus.end(), mine.gpus.begin(),
                                 mine.gpus.end()) != theirs.gpus.end())
            return false;
    }
    return true;
  }

  std::vector<std::string> devices_of(const std::vector<OnNode>& places) const override {
    std::vector<std::string> devices;
    for (const OnNode& on : places)
      for (const uint32_t gpu : on.gpus)
        devices.push_back(fmt::format("{}:{}", from_.file.nodes[on.node].name, gpu));
    return devices;
  }

  Prices& prices() override { return prices_; }
  std::string command() const override { return decider_.command(); }

  Movement movement(const LiveJob& job, const CurvePoint& point,
                    const std::vector<std::string>& devices) override {
    // It corrects what is known of links: nobody waits long for it.
    if (!job.seen() || settings_.prices || is_unanswered()) return {};
    const auto found = movement_to(uses_.ask, job.spec().name, *job.seen(), point, devices);
    note_whether_it_answers(found);
    return found.has_value() ? found.value() : Movement{};
  }

 private:
  /// The dry run of ptcfs itself, of devices that are not chosen yet. It depends on the shapes and
  /// on both layouts alone. Where there is no time to ask, it is the most of those that are known
  /// of the job.
  Result<Movement> known_movement(const LiveJob& job, const CurvePoint& point) {
    if (!job.seen() || job.seen()->checkpoint.empty()) return Movement{};
    Movements& of_job = movements_[job.spec().name];
    if (of_job.from != job.seen()->in_force) of_job = {job.seen()->in_force, {}};
    const std::string key = fmt::format("{} {}", point.way, point.gpus);
    if (const auto found = of_job.to.find(key); found != of_job.to.end()) return found->second;
    const bool has_time = now() < asks_until_ || !has_asked_;
    if (is_unanswered() || (!of_job.to.empty() && !has_time)) {
      asks_are_left_ = true;
      const auto by_bytes = [](const auto& a, const auto& b) {
        return std::tie(a.second.moved, a.second.local) < std::tie(b.second.moved, b.second.local);
      };
      const auto most = std::max_element(of_job.to.begin(), of_job.to.end(), by_bytes);
      return most != of_job.to.end() ? most->second : Movement{};
    }
    has_asked_ = true;
    auto movement = movement_to(uses_.ask, job.spec().name, *job.seen(), point);
    note_whether_it_answers(movement);
    if (movement.has_value()) of_job.to[key] = movement.value();
    return movement;
  }

  bool is_unanswered() const { return now() - unanswered_at_ < kAskAgain; }
  void note_whether_it_answers(const Result<Movement>& movement) {
    if (movement.has_error() && (movement.error().code() == Code::kUnavailable ||
                                 movement.error().code() == Code::kInternal))
      unanswered_at_ = now();
  }

  /// For what the last decision had no time. What cannot be planned is refused then, too.
  void ask_what_is_left() {
    if (!asks_are_left_ || is_unanswered()) return;
    asks_are_left_ = has_asked_ = false;
    asks_until_ = now() + kAsksAStep;
    for (LiveJob* job : in_order())
      if (job->is_decided_for()) refuse_what_cannot_be_planned(*job);
    asks_until_ = std::numeric_limits<double>::infinity();
    if (!asks_are_left_) decide_soon("it is known by now what changes would move");
  }

  struct Checked {
    JobsAndProfiles from;
    std::vector<Curve> curves;  // by job
  };

  Result<Checked> read_checked() {
    Checked checked;
    PTC_TRY(checked.from, read_jobs_file(settings_.file, PastDeadlines::kKept));
    JobsAndProfiles& from = checked.from;
    from.file.choose_device(settings_.device);
    PTC_TRY(const auto rows, rows_of_jobs(from));
    for (const JobToTrain& job : from.file.jobs) {
      if (!job.run)
        return from.file.error(job, "", "'run' is missing: how it is started, [\"./train.sh\"]");
      if (job.name.find('/') != std::string::npos || job.name.starts_with('.'))
        return from.file.error(job, "name", "that cannot be the name of a job in a mount");
      // One that was begun in time goes on.
      if (!job.deadline_is_past.empty() && !read_record(settings_.mount + "/" + job.name))
        return invalid_argument("{}: {}", settings_.file, job.deadline_is_past);
    }
    PTC_TRY(checked.curves, decider_.curves(from, rows));
    return checked;
  }

  /// A file that is right becomes what holds.
  void take_up(Checked checked) {
    JobsAndProfiles& from = checked.from;
    for (const std::string& remark : from.remarks) uses_.say(remark);
    const bool same_nodes_as_before =
        std::equal(from.file.nodes.begin(), from.file.nodes.end(), from_.file.nodes.begin(),
                   from_.file.nodes.end(), [](const NodeOfCluster& a, const NodeOfCluster& b) {
                     return a.name == b.name && a.gpus == b.gpus;
                   });
    struct Devices {
      std::vector<std::string> placed, held, wanted;
    };
    std::map<std::string, Devices> devices;  // by job, before numbers change
    for (const auto& [name, job] : jobs_)
      devices[name] = {devices_of(placement_.of(job->id())), devices_of(job->holds()),
                       devices_of(job->places())};
    from_ = std::move(from);
    if (!same_nodes_as_before) placement_ = Placement(from_.file.nodes);
    order_.clear();
    std::string base = std::filesystem::absolute(settings_.file).parent_path().string();
    for (uint32_t i = 0; i < from_.file.jobs.size(); ++i) {
      const JobToTrain& spec = from_.file.jobs[i];
      auto& job = jobs_[spec.name];
      if (job == nullptr)
        job = std::make_unique<LiveJob>(next_id_++, spec, settings_.mount, base, settings_.logs,
                                        *this);
      else job->set_spec(spec);
      job->set_curve(checked.curves[i]);
      order_.push_back(job.get());
    }
    for (const auto& [name, job] : jobs_)
      if (std::find(order_.begin(), order_.end(), job.get()) == order_.end()) {
        order_.push_back(job.get());
        job->removed("it is not in " + settings_.file + " any more: it is left alone");
      }
    if (!same_nodes_as_before) {
      wanted_places_.clear();
      for (const auto& [name, job] : jobs_) {
        const auto found = [this](const auto& names) { return places_of(names); };
        job->renumber(found, devices[name].held, devices[name].wanted);
        if (job->wanted()) wanted_places_[job->id()] = job->places();
        if (const auto places = places_of(devices[name].placed); places && !places->empty())
          placement_.take(job->id(), *places);
      }
    }
    decide_soon(std::filesystem::path(settings_.file).filename().string() + " has changed");
  }

  /// Processes are on GPUs that a file does not have any more.
  Result<> check_nobody_loses_its_gpus(const std::vector<NodeOfCluster>& nodes) const {
    for (const auto& [name, job] : jobs_) {
      if (!job->has_processes()) continue;
      for (const std::string& device : job->devices())
        if (!places_in(nodes, {device}))
          return invalid_argument(
              "{}: job {} runs on {}, which the cluster there does not have: the job, or the "
              "command of its process, must end first",
              settings_.file, name, device);
    }
    return ok();
  }

  /// Once it is seen, what an earlier autoscaler has done with it is known, too.
  void look_at(LiveJob& job) {
    job.look();
    if (!job.seen() || job.is_known()) return;
    job.find_again([this](const auto& devices) { return places_of(devices); });
    if (!job.holds().empty()) placement_.take(job.id(), job.holds());
    if (job.wanted()) wanted_places_[job.id()] = job.places();
  }

  /// Jobs that an earlier file had, and whose processes are on GPUs yet.
  void find_those_not_listed() {
    std::error_code error;
    std::vector<std::string> names;
    const std::filesystem::directory_iterator end;
    for (std::filesystem::directory_iterator at(settings_.mount, error); !error && at != end;
         at.increment(error))
      if (std::string name = at->path().filename().string();
          name != ".ptc" && !jobs_.contains(name))
        names.push_back(std::move(name));
    for (const std::string& name : names) {
      const auto record = read_record(settings_.mount + "/" + name);
      // Of GPUs that this cluster does not have nothing is to be kept free.
      if (!record || !record->is_own || !places_of(record->devices) ||
          !Worker::find(record->worker))
        continue;
      JobToTrain spec;
      spec.name = name;
      auto job = std::make_unique<LiveJob>(next_id_++, std::move(spec), settings_.mount, "",
                                           settings_.logs, *this);
      look_at(*job);
      if (!job->has_processes()) continue;
      job->removed("it is not in " + settings_.file + ": it is left alone");
      order_.push_back(job.get());
      jobs_.emplace(name, std::move(job));
    }
  }

  /// Of jobs.json and its profiles; "": that is not there.
  std::string version_of_all() const {
    std::string all = version_of(settings_.file);
    if (all.empty()) return "";
    for (const std::string& file : from_.read) all += "; " + version_of(file);
    return all;
  }

  /// `read`: of jobs.json, when it was read.
  void note_version(const std::string& read) {
    version_ = version_of(settings_.file) == read ? version_of_all() : "";
  }

  void read_file_again() {
    constexpr double kTryAgain = 5;
    const std::string version = version_of_all(), of_file = version_of(settings_.file);
    // What was wrong of it may be another file, which nobody knows of yet.
    const bool may_be_right = wrong_at_ && now() - *wrong_at_ >= kTryAgain;
    if (version.empty() || (version == version_ && !may_be_right)) return;
    version_ = version;
    wrong_at_.reset();
    std::vector<LiveJob*> before = order_;
    auto checked = read_checked();
    if (checked.has_value())
      if (auto held = check_nobody_loses_its_gpus(checked.value().from.file.nodes);
          held.has_error())
        checked = std::move(held).error();
    if (checked.has_error()) {
      wrong_at_ = now();
      say_once("file", std::string(checked.error().message()) + "; what it said before holds");
      return;
    }
    if (!std::exchange(said_["file"], "").empty())
      uses_.say(settings_.file + " is right again, and holds");
    take_up(std::move(checked).value());
    note_version(of_file);
    for (LiveJob* job : in_order())
      if (std::find(before.begin(), before.end(), job) == before.end()) look_at(*job);
  }

  Result<> look_at_nodes() {
    const auto up = nodes_up(settings_.mount);
    if (up.has_error()) {
      say_once("mount", std::string(up.error().message()));
      lock_.reset();
      return ok();
    }
    say_once("mount", "");
    if (!lock_.valid() || !is_of_this_daemon(lock_.get())) {
      PTC_TRY(lock());
    }
    const std::set<std::string> names(up.value().begin(), up.value().end());
    for (uint32_t node = 0; node < from_.file.nodes.size(); ++node) {
      const std::string& name = from_.file.nodes[node].name;
      const bool is_up = names.contains(name);
      if (is_up) up_at_[name] = now();
      if (is_up == placement_.works(node)) continue;
      const auto last_up = up_at_.find(name);  // it may return at once
      if (!is_up && last_up != up_at_.end() && now() - last_up->second < kPatienceWithNodes)
        continue;
      if (is_up) {
        placement_.repair(node);
        uses_.say(name + " is there again");
      } else {
        uses_.say(fmt::format("{} is not up in {}: its GPUs do not count ({} up)", name,
                              settings_.mount, fmt::join(names, ", ")));
        for (const uint32_t id : placement_.fail(node))
          for (LiveJob* job : in_order())
            if (job->id() == id) job->forget_wanted();
      }
      decide_soon(name + (is_up ? " is there again" : " is away"));
    }
    return ok();
  }

  std::optional<std::vector<OnNode>> places_of(const std::vector<std::string>& devices) const {
    return places_in(from_.file.nodes, devices);
  }

  static std::optional<std::vector<OnNode>> places_in(const std::vector<NodeOfCluster>& nodes,
                                                      const std::vector<std::string>& devices) {
    std::map<uint32_t, std::set<uint32_t>> by_node;
    for (const std::string& device : devices) {
      const size_t colon = device.rfind(':');
      if (colon == std::string::npos) return std::nullopt;
      const std::string_view name = std::string_view(device).substr(0, colon);
      const auto node = std::find_if(nodes.begin(), nodes.end(),
                                     [&](const NodeOfCluster& one) { return one.name == name; });
      if (node == nodes.end()) return std::nullopt;
      uint32_t gpu = 0;
      for (const char digit : std::string_view(device).substr(colon + 1)) {
        if (digit < '0' || digit > '9' || gpu > node->gpus) return std::nullopt;
        gpu = gpu * 10 + static_cast<uint32_t>(digit - '0');
      }
      if (gpu >= node->gpus) return std::nullopt;
      by_node[static_cast<uint32_t>(node - nodes.begin())].insert(gpu);
    }
    std::vector<OnNode> places;
    for (const auto& [node, gpus] : by_node) places.push_back({node, {gpus.begin(), gpus.end()}});
    return places;
  }

  void decide_now() {
    std::vector<LiveJob*> jobs;
    asks_until_ = now() + kAsks;
    has_asked_ = false;
    for (LiveJob* job : in_order()) {
      job->try_refused_again();
      if (job->is_decided_for()) {
        refuse_what_cannot_be_planned(*job);
        if (!job->is_decided_for()) {
          placement_.release(job->id());
          continue;
        }
        jobs.push_back(job);
      } else if (!job->holds().empty()) {  // left alone, or the mount does not answer
        keep_what_it_has(*job);
      } else {
        placement_.release(job->id());
      }
    }
    std::vector<DecidedJob> decided;
    for (LiveJob* job : jobs) decided.push_back(as_decided(*job));
    asks_until_ = std::numeric_limits<double>::infinity();
    const std::string why = fmt::format("{}", fmt::join(reasons_, "; "));
    ClusterNow cluster{from_.file.nodes, placement_, usable_to(jobs), why, held_by_others(jobs)};
    const std::vector<Wanted> wanted = decider_.decide(decided, cluster);
    for (size_t i = 0; i < jobs.size(); ++i) tell(*jobs[i], wanted[i], decided[i].view, why);
  }

  /// What others have none of, on nodes that work.
  UsableGpus usable_to(const std::vector<LiveJob*>& jobs) const {
    UsableGpus usable;
    for (uint32_t node = 0; node < from_.file.nodes.size(); ++node) {
      usable.emplace_back(placement_.works(node) ? from_.file.nodes[node].gpus : 0);
      std::iota(usable.back().begin(), usable.back().end(), 0);
    }
    for (const auto& [name, job] : jobs_) {
      if (std::find(jobs.begin(), jobs.end(), job.get()) != jobs.end()) continue;
      for (const OnNode& on : placement_.of(job->id()))
        std::erase_if(usable[on.node], [&](uint32_t gpu) {
          return std::find(on.gpus.begin(), on.gpus.end(), gpu) != on.gpus.end();
        });
    }
    return usable;
  }

  std::vector<std::string> held_by_others(const std::vector<LiveJob*>& jobs) const {
    std::vector<std::string> held;
    for (const auto& [name, job] : jobs_) {
      if (std::find(jobs.begin(), jobs.end(), job.get()) != jobs.end()) continue;
      const size_t gpus = devices_of(placement_.of(job->id())).size();
      if (gpus > 0)
        held.push_back(
            fmt::format("{}, which is {} with {}", name,
                        job->state() == LiveState::kByHand ? "left alone" : "not seen in the mount",
                        counted(gpus, "GPU")));
    }
    return held;
  }

  void refuse_what_cannot_be_planned(LiveJob& job) {
    const std::vector<CurvePoint> points = job.curve().points;
    for (const CurvePoint& point : points) {
      const auto known = known_movement(job, point);
      if (known.has_error() && known.error().code() == Code::kInvalidArgument)
        job.refuse(point, std::string(known.error().message()));
    }
  }

  /// What its processes have, and what whoever saved its layout.json has given it beside.
  void keep_what_it_has(LiveJob& job) {
    std::vector<std::string> devices = devices_of(job.holds());
    const json::value* named = job.seen() ? job.seen()->layout.if_contains("devices") : nullptr;
    if (named != nullptr && named->is_array())
      for (const json::value& one : named->get_array())
        if (one.is_string()) devices.emplace_back(one.get_string());
    const auto both = places_of(devices);
    if (!both || !placement_.take(job.id(), *both)) placement_.take(job.id(), job.holds());
  }

  DecidedJob as_decided(const LiveJob& job) {
    DecidedJob decided{&job, {}};
    ElasticJob& view = decided.view;
    view.curve = &job.curve();
    view.samples_left = job.samples_left();
    const bool runs = job.state() == LiveState::kRuns || job.state() == LiveState::kStops;
    view.runs = runs || job.wanted().has_value();
    for (uint32_t i = 0; i < job.curve().points.size(); ++i) {
      if (job.wanted() && placement_.has(job.id()) && job.curve().points[i].is_as(*job.wanted()))
        view.now = i;
      view.price_s.push_back(price_of(job, job.curve().points[i], runs, view.runs));
    }
    if (job.is_starting() || (job.wanted() && !job.has_processes()))
      decided.trains_in_s =
          settings_.prices ? settings_.prices->start_s : prices_.of_job(job.spec().name).start_s;
    return decided;
  }

  double price_of(const LiveJob& job, const CurvePoint& point, bool runs, bool is_change) {
    if (settings_.prices) return is_change ? settings_.prices->change_s : settings_.prices->start_s;
    const auto known = known_movement(job, point);
    return prices_.of(job.spec().name, known.has_value() ? known.value() : Movement{}, runs);
  }

  static double lateness(const LiveJob& job, const CurvePoint& point, double price) {
    if (!job.spec().deadline) return 0;
    return price + job.samples_left() / point.samples_per_s * job.slowness_of(point) -
           seconds_until(*job.spec().deadline);
  }

  void tell(LiveJob& job, const Wanted& wanted, const ElasticJob& view, const std::string& why) {
    const std::vector<OnNode>& places = placement_.of(job.id());
    std::optional<CurvePoint> point;
    if (wanted.point) point = job.curve().points[*wanted.point];
    const auto& before = job.wanted();
    if (!point && !before && settings_.drops && job.never_had_any() &&
        job.state() == LiveState::kWaits)
      return job.drop("there was no room for it when it came");
    if (!point && !before) {
      if (std::exchange(waits_[job.id()], wanted.waits) == wanted.waits) return;
      job.want(std::nullopt, {}, {{"why", why}, {"waits", wanted.waits}});
      if (!wanted.waits.empty()) say(job.spec().name, "it waits for " + wanted.waits);
      return;
    }
    waits_.erase(job.id());
    if (point && before && before->is_as(*point) && wanted_places_[job.id()] == places) return;
    json::object decision{{"why", why}, {"from", short_point(before)}, {"to", short_point(point)}};
    if (!wanted.waits.empty()) decision["waits"] = wanted.waits;
    std::string text = fmt::format("{} -> {}", gpus_and_batch(before), gpus_and_batch(point));
    if (point && before && before->samples_per_s > 0) {
      const double gain = point->samples_per_s / before->samples_per_s;
      decision["gain"] = gain;
      text += fmt::format(", {:.2f} x as fast", gain);
    }
    if (point) {
      const double price = view.price_s[*wanted.point];
      decision["price_s"] = price;
      text += ", which costs " + time_text(price);
      const double late = lateness(job, *point, price);
      if (late > 0) {
        decision["late_s"] = late;
        text += fmt::format(", and ends {} after its deadline", time_text(late));
      }
    }
    say(job.spec().name, fmt::format("{}, because {}", text, why));
    wanted_places_[job.id()] = places;
    job.want(point, places, std::move(decision));
  }

  bool is_all_over() const {
    return std::all_of(jobs_.begin(), jobs_.end(), [](const auto& entry) {
      const LiveJob& job = *entry.second;
      return job.is_over() || (job.state() == LiveState::kByHand && job.holds().empty());
    });
  }

  void say_once(const std::string& about, const std::string& text) {
    if (std::exchange(said_[about], text) != text && !text.empty()) uses_.say(text);
  }

  const std::vector<LiveJob*>& in_order() const { return order_; }

  LiveSettings settings_;
  const LiveUses uses_;
  Decider& decider_;
  UniqueFd lock_;
  std::string version_;             // of the file
  std::optional<double> wrong_at_;  // when it was read last, if that failed
  JobsAndProfiles from_;
  Placement placement_;
  Prices prices_;
  struct Movements {
    std::string from;                    // the layout in force
    std::map<std::string, Movement> to;  // by way and GPUs
  };
  std::map<std::string, Movements> movements_;  // by job
  double asks_until_ = std::numeric_limits<double>::infinity();
  bool asks_are_left_ = false;         // whom there was no time to ask for
  bool has_asked_ = false;             // in this turn: one question is always allowed
  double unanswered_at_ = -kAskAgain;  // the last one
  std::map<std::string, std::unique_ptr<LiveJob>> jobs_;
  std::vector<LiveJob*> order_;  // as the file has them
  std::map<uint32_t, std::vector<OnNode>> wanted_places_;
  std::map<uint32_t, std::string> waits_;  // by job, for what, as it was written down
  std::map<std::string, std::string> said_;
  std::map<std::string, double> up_at_;  // by node
  uint32_t next_id_ = 0;
  std::vector<std::string> reasons_;
  double reason_at_ = 0;
};

}  // namespace

Result<std::vector<std::string>> run_live(LiveSettings settings, LiveUses uses, Decider& decider) {
  LiveCluster cluster(std::move(settings), std::move(uses), decider);
  PTC_TRY(cluster.begin());
  PTC_TRY(cluster.run());
  cluster.say_how_it_ends();
  return cluster.given_up();
}

Result<bool> adopt(const std::string& mount, const std::string& job) {
  const std::string directory = mount + "/" + job;
  PTC_TRY(const MountedJob seen, look_at_job(directory));
  const auto record = read_record(directory);
  if (!record) return false;
  if (record->was_removed)
    return invalid_argument(
        "job {} is left alone because the jobs' file has it no more: it is decided for again once "
        "that has it",
        job);
  const bool is_ours = !record->layout || seen.layout == *record->layout ||
                       (record->layout_before && seen.layout == *record->layout_before);
  if (is_ours && record->state != LiveState::kByHand && record->state != LiveState::kDone &&
      record->state != LiveState::kGivenUp)
    return false;
  const auto fd = open_file(AT_FDCWD, directory + "/autoscale.adopt",
                            O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644);
  if (fd.has_error() && fd.error().code() != Code::kAlreadyExists) return fd.error();
  return true;
}

}  // namespace ptc::planner
