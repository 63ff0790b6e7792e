#include "tools/planner/library/trials.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "store/base/file.h"
#include "store/base/utf8.h"
#include "tools/planner/profile/analyser.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/run/json_fields.h"
#include "tools/planner/run/worker.h"

namespace ptc::planner {
namespace {

using Clock = std::chrono::steady_clock;

constexpr off_t kMostOfAnAnswer = 64 << 10;
constexpr size_t kMostOfAReason = 300;
constexpr uint64_t kMostPeak = uint64_t{1} << 50;  // bytes
constexpr off_t kMostPrinted = 64 << 20;           // of each of its files
constexpr auto kLook = std::chrono::milliseconds(20);
constexpr auto kDies = std::chrono::seconds(10);  // who is killed, within

/// The end of a file, however long it is.
std::string end_of(const std::string& path) {
  const auto file = open_file(AT_FDCWD, path, O_RDONLY);
  struct stat facts = {};
  if (file.has_error() || ::fstat(file.value().get(), &facts) != 0) return "";
  const off_t from = std::max<off_t>(0, facts.st_size - kMostOfAnAnswer);
  std::string text(static_cast<size_t>(facts.st_size - from), '\0');
  if (!read_exactly(file.value().get(), std::as_writable_bytes(std::span(text)),
                    static_cast<uint64_t>(from)))
    return "";
  return text;
}

std::string last_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' '))
    text.pop_back();
  const size_t before = text.rfind('\n');
  return before == std::string::npos ? text : text.substr(before + 1);
}

/// "": the row is filled. Else why there is none.
std::string read_answer(const std::string& text, const Trial& trial, ProfileRow& row) {
  const std::string line = last_line(text);
  const auto value = parse_json(line, {static_cast<size_t>(kMostOfAnAnswer), 8});
  if (value.has_error() || !value.value().is_object())
    return line.empty() ? "it printed nothing" : "it printed no JSON object: " + ptc::quoted(line);
  const json::object& answer = value.value().get_object();
  if (const json::value* none = answer.if_contains("none"))
    return none->is_string() && !none->get_string().empty() ? std::string(none->get_string())
                                                            : "it does not say why";
  const auto size = [&](const char* key, uint64_t otherwise) -> uint64_t {
    const json::value* found = answer.if_contains(key);
    if (found == nullptr) return otherwise;
    return whole_number(*found).value_or(0);
  };
  const uint64_t tp = size("tp", 1), pp = size("pp", 1), dp = size("dp", 1);
  const auto fits = [](uint64_t number) { return number >= 1 && number <= kMostGpus; };
  if (!fits(tp) || !fits(pp) || !fits(dp) || tp * pp * dp != trial.gpus)
    return fmt::format("it says tp{}-pp{}-dp{} of {}", tp, pp, dp, counted(trial.gpus, "GPU"));
  const double seconds = real_of(answer, "iteration_s", 0);
  if (!(seconds >= kLeastIteration && seconds <= kMostIteration))
    return "its iteration_s is no time";
  const uint64_t steps = size("accumulation", 1);
  if (steps < 1 || steps > kMostAccumulation) return "its accumulation is no number of steps";
  row.tp = static_cast<uint32_t>(tp);
  row.pp = static_cast<uint32_t>(pp);
  row.dp = static_cast<uint32_t>(dp);
  row.accumulation = static_cast<uint32_t>(steps);
  row.peak_bytes = size("peak_bytes", 0);
  if (row.peak_bytes > kMostPeak) return "its peak_bytes is no size";
  row.iteration_s = seconds;
  return "";
}

struct UnderWay {
  const Trial* trial = nullptr;
  std::vector<uint32_t> gpus;
  Worker worker;
  Clock::time_point until;
  std::string answer;
  std::string killed_for = {};
  Clock::time_point killed_at = {};
};

class Runner {
 public:
  Runner(const TrialSettings& settings, const OnTrial& on_trial)
      : settings_(settings), on_trial_(on_trial) {
    for (uint32_t gpu = 0; gpu < settings.gpus; ++gpu) free_.insert(gpu);
  }
  ~Runner() {
    for (UnderWay& one : under_way_) one.worker.kill();
    const auto until = Clock::now() + kDies;
    for (UnderWay& one : under_way_)
      while (!one.worker.ended() && Clock::now() < until) std::this_thread::sleep_for(kLook);
  }

  Result<> run(const std::vector<Trial>& trials, const std::function<bool()>& is_stopped) {
    std::list<const Trial*> left;
    for (const Trial& trial : trials) left.push_back(&trial);
    while ((!left.empty() || !under_way_.empty()) && !is_stopped()) {
      for (auto one = left.begin(); one != left.end();) {
        if ((*one)->gpus > free_.size() || (settings_.one_at_a_time && !under_way_.empty())) {
          ++one;
          continue;
        }
        PTC_TRY(start(**one));
        one = left.erase(one);
      }
      PTC_TRY(look());
      if (under_way_.empty() && !left.empty() && free_.size() < settings_.gpus &&
          std::all_of(left.begin(), left.end(),
                      [&](const Trial* one) { return one->gpus > free_.size(); }))
        return make_error(Code::kUnavailable,
                          "{} left, and {} of {} GPUs are taken by trials that cannot be killed",
                          counted(left.size(), "trial") + (left.size() == 1 ? " is" : " are"),
                          settings_.gpus - free_.size(), settings_.gpus);
      std::this_thread::sleep_for(kLook);
    }
    return ok();
  }

 private:
  Result<> start(const Trial& trial) {
    std::vector<uint32_t> gpus;
    while (gpus.size() < trial.gpus) gpus.push_back(free_.extract(free_.begin()).value());
    const std::string at = fmt::format("{}/{}", settings_.scratch, number_++);
    json::array devices;
    for (const uint32_t gpu : gpus) devices.emplace_back(gpu);
    const json::object asked{{"model", trial.model},
                             {"batch", trial.batch},
                             {"gpus", trial.gpus},
                             {"devices", std::move(devices)},
                             {"trial", trial.what}};
    PTC_TRY(write_file_atomically(AT_FDCWD, at + ".in", json::serialize(asked) + "\n"));
    WorkerCommand command;
    command.command = {settings_.library + "/" + trial.technique, "search"};
    command.directory = settings_.directory;
    command.input = at + ".in";
    command.output = at + ".out";
    command.log = at + ".log";
    command.variables = {{"CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(gpus, ","))}};
    auto worker = Worker::start(command);
    if (worker.has_error()) {
      free_.insert(gpus.begin(), gpus.end());
      return tell(trial, std::string(worker.error().message()), "");
    }
    const auto within = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(settings_.within_s));
    under_way_.push_back(
        {&trial, std::move(gpus), std::move(worker).value(), Clock::now() + within, at});
    return ok();
  }

  /// Why it is to be killed; "": it may go on.
  std::string too_much(const UnderWay& one) const {
    if (Clock::now() >= one.until)
      return fmt::format("it took more than {:g} s", settings_.within_s);
    for (const char* ending : {".out", ".log"})
      if (struct stat facts = {};
          ::stat((one.answer + ending).c_str(), &facts) == 0 && facts.st_size > kMostPrinted)
        return fmt::format("it printed more than {} MiB", kMostPrinted >> 20);
    return "";
  }

  Result<> look() {
    for (auto one = under_way_.begin(); one != under_way_.end();) {
      const auto how = one->worker.ended();
      if (!how && one->killed_for.empty()) {
        one->killed_for = too_much(*one);
        if (!one->killed_for.empty()) {
          one->killed_at = Clock::now();
          one->worker.kill();
        }
      }
      const bool stays = !how && !one->killed_for.empty() && Clock::now() - one->killed_at > kDies;
      if (!how && !stays) {
        ++one;
        continue;
      }
      std::string none = one->killed_for;
      if (stays) none += fmt::format(", and cannot be killed ({})", pids_of(one->worker));
      else free_.insert(one->gpus.begin(), one->gpus.end());
      const int status = how ? how->status.value_or(0) : 0;
      if (none.empty() && status != 0) {
        none = status > 128 ? fmt::format("it was ended by signal {}", status - 128)
                            : fmt::format("it ended with exit status {}", status);
        const std::string said = last_line(end_of(one->answer + ".log"));
        if (!said.empty()) none += ": " + ptc::quoted(said);
      }
      const UnderWay ended = std::move(*one);
      one = under_way_.erase(one);
      PTC_TRY(tell(*ended.trial, none, none.empty() ? end_of(ended.answer + ".out") : ""));
      for (const char* ending : {".in", ".out", ".log"}) ::unlink((ended.answer + ending).c_str());
    }
    return ok();
  }

  static std::string pids_of(Worker& worker) {
    const std::vector<pid_t> there = worker.members().value_or(std::vector<pid_t>());
    return fmt::format("{} {}", there.size() == 1 ? "process" : "processes",
                       fmt::join(there, ", "));
  }

  Result<> tell(const Trial& trial, std::string none, const std::string& answer) {
    ProfileRow row;
    row.model = trial.model;
    row.technique = trial.technique;
    row.batch = trial.batch;
    row.gpus = row.gpus_per_node = row.dp = trial.gpus;
    if (none.empty()) none = read_answer(answer, trial, row);
    none = printable(none, kMostOfAReason);
    row.origin = none.empty() ? "measured" : "none: " + none;
    return on_trial_(trial, row, none);
  }

  const TrialSettings& settings_;
  const OnTrial& on_trial_;
  std::set<uint32_t> free_;
  std::list<UnderWay> under_way_;
  uint64_t number_ = 0;
};

}  // namespace

Result<std::vector<std::string>> techniques_in(const std::string& library) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(library, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with('.') && entry.is_regular_file(error) &&
        ::access(entry.path().c_str(), X_OK) == 0)
      names.push_back(name);
  }
  if (error) return invalid_argument("{}: {}", library, error.message());
  if (names.empty()) return invalid_argument("{} has no program in it", library);
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::vector<Trial>> trials_of(const JobsFile& file,
                                     const std::vector<std::string>& techniques, uint32_t most_gpus,
                                     const std::vector<ProfileRow>& known) {
  struct Model {
    const JobToTrain* first = nullptr;
    std::set<uint64_t> batches;
  };
  std::vector<std::string> order;
  std::map<std::string, Model> models;
  for (const JobToTrain& job : file.jobs) {
    if (job.most_batch > kMostBatch)
      return file.error(job, "", "'batch' is missing: which are to be tried, [16, 256]");
    Model& model = models[job.model];
    if (model.first == nullptr) {
      model.first = &job;
      order.push_back(job.model);
    }
    if (model.first->trial != job.trial)
      return file.error(job, "trial",
                        fmt::format("it and {} have one model, {}, and say different things to try",
                                    ptc::quoted(model.first->name), ptc::quoted(job.model)));
    for (const uint64_t batch : batch_ladder(job.least_batch, job.most_batch))
      model.batches.insert(batch);
  }
  std::set<std::tuple<std::string, std::string, uint64_t, uint32_t>> done;
  for (const ProfileRow& row : known)
    if (!row.is_computed()) done.insert({row.model, row.technique, row.batch, row.gpus});
  std::vector<uint32_t> counts;
  for (uint32_t gpus = 1; gpus < most_gpus; gpus *= 2) counts.push_back(gpus);
  counts.push_back(most_gpus);
  std::vector<Trial> trials;
  for (const std::string& name : order)
    for (const std::string& technique : techniques)
      for (const uint32_t gpus : counts)
        for (const uint64_t batch : models[name].batches)
          if (!done.contains({name, technique, batch, gpus}))
            trials.push_back({name, technique, batch, gpus, models[name].first->trial});
  return trials;
}

Result<> run_trials(const std::vector<Trial>& trials, const TrialSettings& settings,
                    const OnTrial& on_trial, const std::function<bool()>& is_stopped) {
  return Runner(settings, on_trial).run(trials, is_stopped);
}

}  // namespace ptc::planner
