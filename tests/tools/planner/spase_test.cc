// Schedules through a checker of its own, and the solver beside all there is.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "store/base/utf8.h"
#include "tests/tools/planner/spase_checker.h"
#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/gantt.h"
#include "tools/planner/spase/instance.h"
#include "tools/planner/spase/literal_model.h"
#include "tools/planner/spase/schedule.h"
#include "tools/planner/spase/solver.h"
#include "tools/planner/spase/time_indexed.h"

namespace ptc::planner {
namespace {

using testing::HasSubstr;

/// The shortest there is: all configurations, orders and nodes. `found`: which it is.
double shortest(const Instance& instance, Choice* found = nullptr) {
  ListScheduler scheduler(instance);
  Choice choice = simple_choices(instance).front();
  double best = 1e300;
  const auto each_node = [&](const auto& self, size_t task) -> void {
    if (task == instance.tasks.size()) {
      const double makespan = scheduler.makespan(choice);
      if (makespan < best && found != nullptr) *found = choice;
      best = std::min(best, makespan);
      return;
    }
    const Configuration& what = instance.tasks[task].configurations[choice.configuration[task]];
    if (what.nodes > 1) {
      choice.node[task] = Choice::kAnyNode;
      return self(self, task + 1);
    }
    for (uint32_t node = 0; node < instance.nodes.size(); ++node) {
      if (instance.nodes[node].gpus < what.gpus) continue;
      choice.node[task] = node;
      self(self, task + 1);
    }
  };
  const auto each_configuration = [&](const auto& self, size_t task) -> void {
    if (task < instance.tasks.size()) {
      for (uint32_t i = 0; i < instance.tasks[task].configurations.size(); ++i) {
        choice.configuration[task] = i;
        self(self, task + 1);
      }
      return;
    }
    std::sort(choice.order.begin(), choice.order.end());
    do {
      each_node(each_node, 0);
    } while (std::next_permutation(choice.order.begin(), choice.order.end()));
  };
  each_configuration(each_configuration, 0);
  return best;
}

/// Rows of a file in LP format, as far as literal_model() writes them.
class LpFile {
 public:
  explicit LpFile(const std::string& text) {
    std::istringstream lines(text);
    std::string line, section, words;
    while (std::getline(lines, line)) {
      if (line.starts_with("\\")) continue;
      longest_ = std::max(longest_, line.size());
      if (line.find(' ') != 0) {
        section = line;
      } else if (section == "Binaries") {
        binaries_.insert(line.substr(1));
      } else if (section == "Subject To") {
        words += line;
        if (line.find("= ") != std::string::npos) add(std::exchange(words, ""));
      }
    }
    is_whole_ = section == "End" && words.empty();
  }

  /// The rows that do not hold, each as it stands.
  std::vector<std::string> broken(const std::map<std::string, double>& of) const {
    std::vector<std::string> found;
    for (const Row& row : rows_) {
      double left = 0, size = std::abs(row.right);
      for (const auto& [variable, factor] : row.terms) {
        const auto value = of.find(variable);
        if (value == of.end()) return {"nothing is said of " + variable};
        left += factor * value->second;
        size = std::max(size, std::abs(factor * value->second));
      }
      const double beyond = left - row.right, most = 1e-9 * size;
      if ((row.sense != ">=" && beyond > most) || (row.sense != "<=" && beyond < -most))
        found.push_back(row.text);
    }
    for (const std::string& one : binaries_)
      if (!of.contains(one) || (of.at(one) != 0 && of.at(one) != 1)) found.push_back(one);
    return found;
  }
  size_t rows() const { return rows_.size(); }
  size_t longest_line() const { return longest_; }
  bool is_whole() const { return is_whole_; }

 private:
  struct Row {
    std::string text, sense;
    std::map<std::string, double> terms;
    double right = 0;
  };
  void add(const std::string& text) {
    Row row{text, "", {}, 0};
    std::istringstream words(text);
    std::string name, sign, variable;
    double factor = 0;
    words >> name;
    while (words >> sign && (sign == "+" || sign == "-") && words >> factor >> variable)
      row.terms[variable] += sign == "-" ? -factor : factor;
    row.sense = sign;
    words >> row.right;
    rows_.push_back(std::move(row));
  }

  std::vector<Row> rows_;
  std::set<std::string> binaries_;
  size_t longest_ = 0;
  bool is_whole_ = false;
};

/// What the variables of the literal model are in a schedule.
std::map<std::string, double> values_of(const Instance& instance, const Schedule& schedule) {
  std::map<std::string, double> of{{"C", schedule.makespan}};
  std::vector<double> starts(instance.tasks.size());
  for (const Run& run : schedule.runs) {
    starts[run.task] = run.start;
    for (size_t s = 0; s < instance.tasks[run.task].configurations.size(); ++s)
      of[fmt::format("B_{}_{}", run.task, s)] = s == run.configuration;
    for (size_t n = 0; n < instance.nodes.size(); ++n) {
      of[fmt::format("O_{}_{}", run.task, n)] = n == run.on.front().node;
      for (uint32_t g = 0; g < instance.nodes[n].gpus; ++g) {
        const std::vector<uint32_t>& has = run.on.front().gpus;
        of[fmt::format("I_{}_{}_{}", run.task, n, g)] = run.start;
        of[fmt::format("P_{}_{}_{}", run.task, n, g)] =
            n == run.on.front().node && std::find(has.begin(), has.end(), g) != has.end();
      }
    }
  }
  for (size_t a = 0; a < starts.size(); ++a)
    for (size_t b = a + 1; b < starts.size(); ++b)
      of[fmt::format("A_{}_{}", a, b)] = starts[a] > starts[b];
  return of;
}

TEST(SpaseModel, TheShortestScheduleSatisfiesEveryRow) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 12; ++turn) {
    Instance instance = drawn.instance(2 + drawn.below(3), 1 + drawn.below(2), 4, 3);
    for (Task& task : instance.tasks) {
      std::erase_if(task.configurations, [](const Configuration& one) { return one.nodes > 1; });
      if (task.configurations.empty()) task.configurations.push_back({1, 1, 7, 8, "ddp"});
    }
    const auto text = literal_model(instance);
    ASSERT_TRUE(text.has_value()) << text.error().message();
    const LpFile file(text.value());
    ASSERT_TRUE(file.is_whole());
    ASSERT_LE(file.longest_line(), 255u);
    Choice choice;
    const double best = shortest(instance, &choice);
    const Schedule schedule = ListScheduler(instance).schedule(choice);
    ASSERT_EQ(schedule.makespan, best);
    const auto values = values_of(instance, schedule);
    ASSERT_THAT(file.broken(values), testing::IsEmpty()) << text.value();
    // It is no model of anything: what is no schedule breaks a row.
    auto shorter = values;
    shorter["C"] *= 0.99;
    EXPECT_THAT(file.broken(shorter), testing::Not(testing::IsEmpty()));
    auto without = values;
    without["O_0_0"] = 1 - without["O_0_0"];
    EXPECT_THAT(file.broken(without), testing::Not(testing::IsEmpty()));
    for (const planner::Run& a : schedule.runs)
      for (const planner::Run& b : schedule.runs) {
        if (a.start == 0 || a.end <= b.start || a.on.front().node != b.on.front().node) continue;
        std::vector<uint32_t> both;
        std::set_intersection(a.on.front().gpus.begin(), a.on.front().gpus.end(),
                              b.on.front().gpus.begin(), b.on.front().gpus.end(),
                              std::back_inserter(both));
        if (both.empty() || a.task == b.task) continue;
        auto at_once = values;  // a begins when b does, on a GPU that b has
        for (auto& [name, value] : at_once)
          if (name.starts_with(fmt::format("I_{}_", a.task))) value = b.start;
        EXPECT_THAT(file.broken(at_once), testing::Not(testing::IsEmpty()));
      }
  }
}

TEST(SpaseModel, WhatItHasNoneOfIsSaid) {
  Instance instance;
  instance.nodes = {{"w0", 8}, {"w1", 8}};
  instance.tasks = {{"wide", {{16, 2, 40, 8, "a"}}, {}}};
  EXPECT_THAT(literal_model(instance).error().message(),
              HasSubstr("task 'wide': it runs on several nodes"));
  instance.tasks.assign(500, {"t", {{1, 1, 40, 8, "a"}, {8, 1, 10, 8, "a"}}, {}});
  EXPECT_THAT(literal_model(instance).error().message(), HasSubstr("1000000 is the most"));
}

TEST(TimeIndexed, IsNeverAboveTheShortest) {
  if (!TimeIndexedSearch::is_there()) GTEST_SKIP() << "it was built without CBC";
  Drawn drawn{std::mt19937_64(planner_seed())};
  int closer = 0;
  for (int turn = 0; turn < 12; ++turn) {
    const Instance instance = drawn.instance(2 + drawn.below(3), 1 + drawn.below(2), 4, 3);
    Choice choice;
    const double best = shortest(instance, &choice);
    for (const double known : {best, 1.3 * best}) {
      TimeIndexedSearch search(instance, known, std::chrono::seconds(60));
      std::optional<TimeIndexed> found;
      while (search.goes_on() && !found) {
        found = search.found();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ASSERT_TRUE(found);
      EXPECT_LE(found->lower_bound, best * (1 + 1e-9));
      EXPECT_GE(found->lower_bound, lower_bound_of(instance) * (1 - 1e-5) - best / 20);
      closer += found->lower_bound > lower_bound_of(instance) * (1 + 1e-5);
      if (found->choice.order.empty()) continue;
      ListScheduler scheduler(instance);
      EXPECT_EQ(wrong_with(instance, scheduler.schedule(found->choice)), "");
    }
  }
  EXPECT_GT(closer, 0);
}

TEST(Spase, EverySchedulePassesTheChecker) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 300; ++turn) {
    const Instance instance = drawn.instance(1 + drawn.below(20), 1 + drawn.below(5), 8, 4);
    ListScheduler scheduler(instance);
    const Choice choice = drawn.choice(instance);
    const Schedule schedule = scheduler.schedule(choice);
    ASSERT_EQ(wrong_with(instance, schedule), "");
    ASSERT_EQ(scheduler.makespan(choice), schedule.makespan);
    ASSERT_GE(schedule.makespan, lower_bound_of(instance) * (1 - 1e-9));
    for (const Baseline& other : baselines(instance, 1)) {
      if (other.name == "optimus, dynamic") continue;  // tasks change their configurations there
      ASSERT_GE(other.makespan, lower_bound_of(instance) * (1 - 1e-9)) << other.name;
    }
  }
}

TEST(Spase, FindsTheShortestOfSmallOnes) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 12; ++turn) {
    const Instance instance = drawn.instance(2 + drawn.below(3), 1 + drawn.below(2), 4, 3);
    SolverOptions options;
    options.steps = 60'000;
    const Solution solution = solve(instance, options);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    const double best = shortest(instance);
    ASSERT_LE(solution.lower_bound, best * (1 + 1e-9));
    ASSERT_LE(solution.schedule.makespan, best * (1 + 1e-9));
    ASSERT_GE(solution.schedule.makespan, best * (1 - 1e-9));
  }
}

TEST(Spase, IsNeverWorseThanWhatItBeginsWith) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 20; ++turn) {
    const Instance instance = drawn.instance(1 + drawn.below(60), 1 + drawn.below(9), 8, 5);
    SolverOptions options;
    options.steps = 3000;
    const Solution solution = solve(instance, options);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    ListScheduler scheduler(instance);
    for (const Choice& choice : simple_choices(instance))
      ASSERT_LE(solution.schedule.makespan, scheduler.makespan(choice));
  }
}

TEST(Spase, IsNeverWorseThanABaselineHoweverLittleTimeThereIs) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 40; ++turn) {
    Instance instance = drawn.instance(1 + drawn.below(60), 1 + drawn.below(9), 8, 5);
    for (Task& task : instance.tasks)  // what its user would take is no better
      if (drawn.below(2) == 0)
        task.usual = {task.configurations[drawn.below(task.configurations.size())]};
    const std::vector<Baseline> others = baselines(instance, 1);
    std::vector<const Schedule*> known;
    for (const Baseline& other : others) {
      if (!other.schedule) continue;
      ASSERT_EQ(wrong_with(instance, *other.schedule), "") << other.name;
      ASSERT_LE(other.schedule->makespan, other.makespan * (1 + 1e-9)) << other.name;
      known.push_back(&*other.schedule);
    }
    ASSERT_EQ(known.size() + 1, others.size());
    std::atomic<bool> stop{true};
    SolverOptions options;
    options.stop = &stop;
    const Solution solution = solve(instance, options, known);
    ASSERT_LE(solution.steps, 3u);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    for (const Baseline& other : others) {
      if (!other.schedule) continue;
      ASSERT_LE(solution.schedule.makespan, other.makespan * (1 + 1e-9)) << other.name;
    }
  }
}

/// 2000 jobs of many profiles: rows are looked at once, and not once for each job.
TEST(SpaseInstance, IsMadeOfManyRowsInLittleTime) {
  JobsAndProfiles from;
  from.file.nodes = {{"w0", 8}, {"w1", 8}};
  for (int i = 0; i < 2000; ++i)
    from.file.jobs.push_back({"j" + std::to_string(i), "m" + std::to_string(i % 20), 1e6});
  for (uint32_t i = 0; i < 200'000; ++i) {
    ProfileRow row;
    row.model = "m" + std::to_string(i % 20);
    row.batch = 8u << (i / 20 % 8);
    row.dp = row.gpus = 1 + i / 160 % 8;
    row.iteration_s = 1 + i % 97;
    from.rows.push_back(row);
  }
  const auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(make_instance(from).has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
}

TEST(Spase, TheSameSeedAndStepsAreTheSameAnswer) {
  Drawn drawn{std::mt19937_64(7)};
  const Instance instance = drawn.instance(15, 3, 8, 5);
  SolverOptions options;
  options.steps = 20'000;
  const auto text = [&] {
    const Solution solution = solve(instance, options);
    return pretty_json(schedule_json(instance, solution.schedule, solution.lower_bound));
  };
  const std::string first = text();
  EXPECT_EQ(text(), first);
}

TEST(Spase, OneTaskGetsWhatItIsFastestWith) {
  Instance instance;
  instance.nodes = {{"w0", 8}, {"w1", 8}};
  instance.tasks = {{"big", {{4, 1, 100, 8, "a"}, {8, 1, 60, 8, "b"}, {16, 2, 40, 8, "c"}}, {}}};
  const Solution solution = solve(instance, {});
  EXPECT_EQ(solution.schedule.makespan, 40);
  EXPECT_TRUE(solution.optimal());
  EXPECT_EQ(solution.schedule.runs.front().on.size(), 2u);
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_THAT(svg, HasSubstr("big: 16 GPUs, c, 0 s to 40 s"));
}

std::string instance_complaint(std::string_view jobs, std::string_view profiles) {
  JobsAndProfiles from;
  from.file = parse_jobs_file(jobs, "jobs.json").value();
  from.rows = parse_profiles(profiles, "p.csv").value();
  const auto instance = make_instance(from);
  return instance.has_error() ? instance.error().message() : "taken";
}

TEST(SpaseInstance, SaysWhyAJobFitsNowhere) {
  const auto job = [](std::string_view of) {
    return fmt::format(
        R"({{"cluster": {{"nodes": [4, 4]}}, "profiles": "p.csv", "jobs": [{{"name": "a", "samples": 8, {}}}]}})",
        of);
  };
  const std::string rows =
      "model,batch,gpus,max_gpus_per_node,iteration_s\ngpt2,8,16,8,1\ngpt2,8,8,4,1\nbert,8,1,1,"
      "oom\nwide,8,6,6,1\n";
  EXPECT_EQ(
      instance_complaint(job(R"("model": "net")"),
                         "model,batch,gpus,iteration_s,origin\nnet,8,1,oom,none: it took more than "
                         "60 s\nnet,8,2,oom,none: it took more than 60 s\nnet,8,4,oom,none: no\n"),
      "job 'a': 'net' had no time in any trial: it took more than 60 s (and 1 other reason); "
      "\"ptc profile run --again --within S\" gives it longer");
  EXPECT_EQ(instance_complaint(job(R"("model": "gpt2")"), rows), "taken");  // both nodes
  EXPECT_EQ(
      instance_complaint(job(R"("model": "gpt")"), rows),
      "job 'a': no profile has a model 'gpt' (did you mean 'gpt2'?); there are 'bert', 'gpt2', "
      "'wide'");
  EXPECT_EQ(instance_complaint(job(R"("model": "gpt2", "batch": 16)"), rows),
            "job 'a': no profile of 'gpt2' has a batch of 16; there is 8");
  EXPECT_EQ(instance_complaint(job(R"("model": "bert")"), rows),
            "job 'a': 'bert' was out of memory in all that its profiles tried");
  EXPECT_THAT(
      instance_complaint(job(R"("model": "wide")"), rows),
      HasSubstr("it fits nowhere: 'wide' needs 6 GPUs at least, and the largest node has 4"));
}

TEST(SpaseInstance, WhatWasMeasuredOverNodesIsNotTakenForOne) {
  const std::string said = instance_complaint(
      R"({"cluster": {"nodes": [1024]}, "profiles": "p.csv",
          "jobs": [{"name": "a", "model": "moe", "samples": 8}]})",
      "model,batch,gpus,max_gpus_per_node,iteration_s\nmoe,8,16,8,1\nmoe,8,32,8,1\n");
  EXPECT_EQ(said,
            "job 'a': it fits nowhere: 'moe' was measured with 16 GPUs of which at most 8 were on "
            "one node, and that is not taken for one node (the largest has 1024): how fast it is "
            "there is not known");
}

TEST(SpaseInstance, TakesOneKindOfGpu) {
  const auto jobs = [](std::string_view device) {
    return fmt::format(
        R"({{"cluster": {{"nodes": [4]{}}}, "profiles": "p.csv",
             "jobs": [{{"name": "a", "model": "m", "samples": 80}}]}})",
        device);
  };
  const std::string rows = "model,batch,gpus,device,iteration_s\nm,8,1,A100,1\nm,8,2,H100,0.1\n";
  EXPECT_THAT(instance_complaint(jobs(""), rows),
              HasSubstr("several kinds of GPU, 'A100', 'H100'"));
  JobsAndProfiles from;
  from.file = parse_jobs_file(jobs(R"(, "device": "A100")"), "jobs.json").value();
  from.rows = parse_profiles(rows, "p.csv").value();
  const auto instance = make_instance(from);
  ASSERT_TRUE(instance.has_value()) << instance.error().message();
  ASSERT_EQ(instance.value().tasks.front().configurations.size(), 1u);
  EXPECT_EQ(instance.value().tasks.front().configurations.front().seconds, 10);
}

/// A number of GPUs that the nodes cannot give hides none that they can.
TEST(SpaseInstance, HasWhatItsNodesCanGive) {
  JobsAndProfiles from;
  from.file = parse_jobs_file(
                  R"({"cluster": {"nodes": [4, 4]}, "profiles": "p.csv",
                      "jobs": [{"name": "a", "model": "m", "samples": 3600}]})",
                  "jobs.json")
                  .value();
  from.rows =
      parse_profiles("model,batch,gpus,iteration_s\nm,10,1,10\nm,10,6,1\nm,10,8,1.1\n", "p.csv")
          .value();
  const auto instance = make_instance(from);
  ASSERT_TRUE(instance.has_value()) << instance.error().message();
  EXPECT_NEAR(solve(instance.value(), {}).schedule.makespan, 396, 1e-6);
  from.file.jobs.front().technique = "dpp";
  from.rows.front().technique = "ddp";
  EXPECT_EQ(
      make_instance(from).error().message(),
      "job 'a': no profile of 'm' has a technique 'dpp' (did you mean 'ddp'?); there is 'ddp'");
}

TEST(Spase, WhatTakesSeveralNodesLeavesTheOthersInTheBaselines) {
  Instance instance;
  for (int i = 0; i < 8; ++i) instance.nodes.push_back({"w" + std::to_string(i), 8});
  for (int i = 0; i < 4; ++i) instance.tasks.push_back({"t", {{16, 2, 3600, 8, "pp"}}, {}});
  for (const Baseline& other : baselines(instance, 1))
    EXPECT_EQ(other.makespan, 3600) << other.name;
}

TEST(Spase, ThePictureSaysWhatItLeavesOut) {
  Instance instance;
  instance.nodes = {{"w0", 1024}, {"w1", 1024}, {"left-out", 1024}};
  instance.tasks = {{"t", {{1024, 1, 40, 8, "a"}}, {}}};
  const Solution solution = solve(instance, {});
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_THAT(svg, HasSubstr("1 more node is not drawn"));
  EXPECT_THAT(svg, testing::Not(HasSubstr("left-out")));
}

TEST(Spase, ThePictureTellsNamesApart) {
  Instance instance;
  for (int i = 0; i < 4; ++i)
    instance.nodes.push_back({fmt::format("dgx-h100-rack1-{:060}-node{}", 0, i), 1});
  const std::string umlauts = "ä\x01" + std::string(40, 'x') + "öööööööööööööööööööööööööööööö<";
  instance.tasks = {{umlauts, {{1, 1, 40, 8, "a"}}, {}}, {"t", {{1, 1, 400, 8, "a"}}, {}}};
  const Solution solution = solve(instance, {});
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_TRUE(is_utf8(svg));
  EXPECT_THAT(svg, testing::Not(HasSubstr("\x01")));
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(svg, HasSubstr("<title>" + instance.nodes[i].name + ": 1 GPU</title>dgx-"));
    EXPECT_THAT(svg, testing::ContainsRegex(fmt::format("…0*-node{}</text>", i)));
  }
  EXPECT_THAT(svg, HasSubstr("<title>ä\uFFFDxxx"));
  EXPECT_THAT(svg, testing::ContainsRegex("ä\uFFFDx*…(ö)*&lt;</text>"));
}

TEST(Spase, TimesOfAnyLengthCanBeRead) {
  EXPECT_EQ(time_text(45), "45 s");
  EXPECT_EQ(time_text(4800), "1 h 20 min");
  EXPECT_EQ(time_text(300000), "3 d 11 h");
  EXPECT_EQ(time_text(1e27), "1.16e+22 d");
}

}  // namespace
}  // namespace ptc::planner
