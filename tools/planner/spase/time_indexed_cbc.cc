#include <Cbc_C_Interface.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <numeric>
#include <string>

#include "tools/planner/spase/time_indexed.h"

namespace ptc::planner {
namespace {

constexpr uint32_t kSlots = 40;
constexpr size_t kMostVariables = 20'000;
constexpr double kTolerance = 1e-6;  // of CBC's, in parts

struct Start {
  uint32_t task, configuration, node, slot;
};

/// All that end by the makespan; none where they are too many.
std::vector<Start> starts_of(const Instance& instance, double makespan) {
  const double slot = makespan / kSlots;
  std::vector<Start> starts;
  for (uint32_t t = 0; t < instance.tasks.size(); ++t) {
    const std::vector<Configuration>& of = instance.tasks[t].configurations;
    for (uint32_t s = 0; s < of.size(); ++s) {
      const auto add = [&](uint32_t node) {
        for (uint32_t at = 0; at < kSlots; ++at)
          if (at * slot + of[s].seconds <= makespan * (1 + 1e-9))
            starts.push_back({t, s, node, at});
      };
      if (of[s].nodes > 1) add(Choice::kAnyNode);
      for (uint32_t n = 0; n < instance.nodes.size() && of[s].nodes == 1; ++n)
        if (of[s].gpus <= instance.nodes[n].gpus) add(n);
      if (starts.size() > kMostVariables) return {};
    }
  }
  return starts;
}

/// A sum of variables.
struct Sum {
  std::vector<int> variables;
  std::vector<double> factors;
  void add(size_t variable, double factor) {
    variables.push_back(static_cast<int>(variable));
    factors.push_back(factor);
  }
};

/// In slots, so that CBC's tolerances are parts of the makespan.
class Model {
 public:
  Model(const Instance& instance, double makespan, std::vector<Start> starts)
      : instance_(instance), slot_(makespan / kSlots), starts_(std::move(starts)) {
    for (size_t x = 0; x < starts_.size(); ++x)
      Cbc_addCol(cbc_, fmt::format("x{}", x).c_str(), 0, 1, 0, /*isInteger=*/1, 0, nullptr,
                 nullptr);
    Cbc_addCol(cbc_, "C", 0, kSlots * (1 + kTolerance), 1, /*isInteger=*/0, 0, nullptr, nullptr);
    tasks();
    nodes();
    Cbc_setObjSense(cbc_, 1);
  }
  ~Model() { Cbc_deleteModel(cbc_); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  TimeIndexed solve(double seconds, double makespan) {
    Cbc_setParameter(cbc_, "log", "0");
    Cbc_setParameter(cbc_, "seconds", fmt::format("{}", seconds).c_str());
    Cbc_solve(cbc_);
    TimeIndexed found;
    if (Cbc_isProvenInfeasible(cbc_) != 0) {
      found.lower_bound = makespan * (1 - kTolerance);
      return found;
    }
    const double bound =
        slot_ * (Cbc_isProvenOptimal(cbc_) != 0 ? Cbc_getObjValue(cbc_)
                                                : Cbc_getBestPossibleObjValue(cbc_));
    if (std::isfinite(bound))
      found.lower_bound = std::clamp(bound, 0.0, makespan) * (1 - kTolerance);
    if (const double* x = Cbc_getColSolution(cbc_);
        x != nullptr && Cbc_numberSavedSolutions(cbc_) > 0)
      found.choice = choice_of(x);
    return found;
  }

 private:
  const Configuration& what(const Start& start) const {
    return instance_.tasks[start.task].configurations[start.configuration];
  }
  size_t makespan() const { return starts_.size(); }
  void row(const Sum& sum, char sense, double right) {
    Cbc_addRow(cbc_, fmt::format("r{}", rows_++).c_str(), static_cast<int>(sum.variables.size()),
               sum.variables.data(), sum.factors.data(), sense, right);
  }

  void tasks() {
    Sum area;
    std::vector<Sum> ends(instance_.tasks.size()), once(instance_.tasks.size());
    for (size_t x = 0; x < starts_.size(); ++x) {
      const Start& start = starts_[x];
      once[start.task].add(x, 1);
      ends[start.task].add(x, start.slot + what(start).seconds / slot_);
      area.add(x, what(start).area() / slot_);
    }
    for (const Sum& sum : once) row(sum, 'E', 1);
    for (Sum& sum : ends) {
      sum.add(makespan(), -1);
      row(sum, 'L', 0);
    }
    area.add(makespan(), -static_cast<double>(instance_.gpus()));
    row(area, 'L', 0);
  }

  /// And of all nodes together, for what runs on several.
  void nodes() {
    const size_t all = instance_.nodes.size();
    std::vector<Sum> at((all + 1) * kSlots);
    bool some_have_several = false;
    for (size_t x = 0; x < starts_.size(); ++x) {
      const Start& start = starts_[x];
      const auto slots = static_cast<uint32_t>(what(start).seconds / slot_ * (1 - 1e-9));
      some_have_several = some_have_several || start.node == Choice::kAnyNode;
      for (uint32_t slot = start.slot; slot < std::min(kSlots, start.slot + slots); ++slot) {
        if (start.node != Choice::kAnyNode) at[start.node * kSlots + slot].add(x, what(start).gpus);
        at[all * kSlots + slot].add(x, what(start).gpus);
      }
    }
    for (size_t place = 0; place < (some_have_several ? all + 1 : all) * kSlots; ++place) {
      const size_t node = place / kSlots;
      if (!at[place].variables.empty())
        row(at[place], 'L', node == all ? instance_.gpus() : instance_.nodes[node].gpus);
    }
  }

  Choice choice_of(const double* x) const {
    Choice choice;
    const size_t tasks = instance_.tasks.size();
    choice.configuration.assign(tasks, 0);
    choice.node.assign(tasks, Choice::kAnyNode);
    std::vector<uint32_t> slots(tasks, kSlots);
    for (size_t i = 0; i < starts_.size(); ++i) {
      const Start& start = starts_[i];
      if (x[i] < 0.5) continue;
      choice.configuration[start.task] = start.configuration;
      choice.node[start.task] = start.node;
      slots[start.task] = start.slot;
    }
    if (std::count(slots.begin(), slots.end(), kSlots) > 0) return {};
    choice.order.resize(tasks);
    std::iota(choice.order.begin(), choice.order.end(), 0);
    std::stable_sort(choice.order.begin(), choice.order.end(),
                     [&](uint32_t a, uint32_t b) { return slots[a] < slots[b]; });
    return choice;
  }

  const Instance& instance_;
  const double slot_;  // seconds
  const std::vector<Start> starts_;
  Cbc_Model* const cbc_ = Cbc_newModel();
  size_t rows_ = 0;
};

/// What goes through the pipe: the bound, and of each task its place in the order, configuration
/// and node.
std::string packed(const TimeIndexed& found) {
  std::string bytes(reinterpret_cast<const char*>(&found.lower_bound), sizeof(double));
  for (const auto* part : {&found.choice.order, &found.choice.configuration, &found.choice.node})
    bytes.append(reinterpret_cast<const char*>(part->data()), part->size() * sizeof(uint32_t));
  return bytes;
}

std::optional<TimeIndexed> unpacked(const std::string& bytes, size_t tasks) {
  TimeIndexed found;
  if (bytes.size() < sizeof(double)) return std::nullopt;
  std::memcpy(&found.lower_bound, bytes.data(), sizeof(double));
  if (bytes.size() != sizeof(double) + 3 * tasks * sizeof(uint32_t)) return found;
  const char* at = bytes.data() + sizeof(double);
  for (auto* part : {&found.choice.order, &found.choice.configuration, &found.choice.node}) {
    part->resize(tasks);
    std::memcpy(part->data(), at, tasks * sizeof(uint32_t));
    at += tasks * sizeof(uint32_t);
  }
  return found;
}

[[noreturn]] void run_in_child(const Instance& instance, double makespan, double seconds,
                               std::vector<Start> starts, int out) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGINT, SIG_IGN);  // who started it ends it
  const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  ::dup2(nowhere, STDOUT_FILENO);
  ::dup2(nowhere, STDERR_FILENO);
  const std::string bytes =
      packed(Model(instance, makespan, std::move(starts)).solve(seconds, makespan));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = ::write(out, bytes.data() + done, bytes.size() - done);
    if (wrote <= 0) break;
    done += static_cast<size_t>(wrote);
  }
  ::_exit(0);
}

}  // namespace

class TimeIndexedSearch::Process {
 public:
  Process(size_t tasks, pid_t pid, int in) : tasks_(tasks), pid_(pid), in_(in) {}
  ~Process() {
    ::close(in_);
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Whether it has written all that it will.
  bool read() {
    for (;;) {
      pollfd ready{in_, POLLIN, 0};
      if (::poll(&ready, 1, 0) != 1) return false;
      char part[4096];
      const ssize_t got = ::read(in_, part, sizeof part);
      if (got <= 0) return true;
      bytes_.append(part, static_cast<size_t>(got));
    }
  }
  std::optional<TimeIndexed> found() const { return unpacked(bytes_, tasks_); }

 private:
  const size_t tasks_;
  const pid_t pid_;
  const int in_;
  std::string bytes_;
};

bool TimeIndexedSearch::is_there() { return true; }

TimeIndexedSearch::TimeIndexedSearch(const Instance& instance, double makespan,
                                     std::chrono::milliseconds time) {
  std::vector<Start> starts = starts_of(instance, makespan);
  int ends[2];
  if (starts.empty() || ::pipe2(ends, O_CLOEXEC) != 0) return;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    run_in_child(instance, makespan, std::chrono::duration<double>(time).count(), std::move(starts),
                 ends[1]);
  }
  ::close(ends[1]);
  if (child > 0) process_ = std::make_shared<Process>(instance.tasks.size(), child, ends[0]);
  else ::close(ends[0]);
}

TimeIndexedSearch::~TimeIndexedSearch() = default;

bool TimeIndexedSearch::goes_on() const { return process_ != nullptr; }

std::optional<TimeIndexed> TimeIndexedSearch::found() {
  if (process_ == nullptr || !process_->read()) return std::nullopt;
  const auto found = process_->found();
  process_.reset();
  return found;
}

}  // namespace ptc::planner
