// The literal model as a file: its rows beside schedules, and its optimum.
#include "tools/planner/spase/literal_model.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/tools/planner/spase_checker.h"
#include "tools/planner/spase/schedule.h"

namespace ptc::planner {
namespace {

using testing::HasSubstr;

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
        in_order_.push_back(line.substr(1));
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
  /// The least C of all that the rows allow. Binaries are enumerated, one after the other, as long
  /// as no row that has nothing else is broken. With all of them the rows are bounds of differences
  /// between the others, whose least values are the longest paths to them. Infinity: there is none.
  double least() const {
    Enumeration all;
    std::map<std::string, size_t> numbers;  // of variables: C, binaries, others
    numbers.emplace("C", 0);
    for (const std::string& one : in_order_) numbers.emplace(one, numbers.size());
    all.binaries = in_order_.size();
    all.rows_ending_at.resize(all.binaries + 1);
    for (const Row& row : rows_) {
      Enumeration::Row made{{}, row.sense, row.right};
      size_t last = 0;
      for (const auto& [variable, factor] : row.terms) {
        const size_t number = numbers.emplace(variable, numbers.size()).first->second;
        made.terms.emplace_back(number, factor);
        last = std::max(last, number == 0 ? SIZE_MAX : number);
      }
      if (last <= all.binaries) all.rows_ending_at[last].push_back(std::move(made));
      else all.differences.push_back(std::move(made));
    }
    all.value.assign(numbers.size(), 0);
    all.from(1);
    return all.best;
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
  struct Enumeration {
    struct Row {
      std::vector<std::pair<size_t, double>> terms;
      std::string sense;
      double right = 0;
    };
    size_t binaries = 0;
    std::vector<std::vector<Row>> rows_ending_at;  // with binaries alone, by the last of them
    std::vector<Row> differences;
    std::vector<double> value;  // by variable
    double best = std::numeric_limits<double>::infinity();

    bool is_binary(size_t variable) const { return variable >= 1 && variable <= binaries; }
    void from(size_t binary) {
      if (binary > binaries) {
        best = std::min(best, longest_path());
        return;
      }
      for (const double one : {0.0, 1.0}) {
        value[binary] = one;
        const std::vector<Row>& rows = rows_ending_at[binary];
        if (std::all_of(rows.begin(), rows.end(), [&](const Row& row) {
              double left = 0;
              for (const auto& [variable, factor] : row.terms) left += factor * value[variable];
              return row.sense == "<="   ? left <= row.right + 1e-9
                     : row.sense == ">=" ? left >= row.right - 1e-9
                                         : std::abs(left - row.right) <= 1e-9;
            }))
          from(binary + 1);
      }
    }
    /// Of C. Each is as early as the rows let it be, from 0 on.
    double longest_path() {
      struct Arc {
        size_t from, to;
        double length;
      };
      std::vector<Arc> arcs;
      for (const Row& row : differences) {
        double right = row.right;
        size_t plus = SIZE_MAX, minus = SIZE_MAX;
        for (const auto& [variable, factor] : row.terms) {
          if (is_binary(variable)) right -= factor * value[variable];
          else (factor > 0 ? plus : minus) = variable;
        }
        EXPECT_TRUE(plus != SIZE_MAX && minus != SIZE_MAX);
        if (row.sense != "<=") arcs.push_back({minus, plus, right});
        if (row.sense != ">=") arcs.push_back({plus, minus, -right});
      }
      std::vector<double> least = value;
      for (size_t i = 0; i < least.size(); ++i)
        if (!is_binary(i)) least[i] = 0;
      for (size_t round = 0; round <= least.size(); ++round) {
        bool moved = false;
        for (const Arc& arc : arcs) {
          if (least[arc.from] + arc.length <= least[arc.to] + 1e-9) continue;
          least[arc.to] = least[arc.from] + arc.length;
          moved = true;
        }
        if (!moved) return least[0];
      }
      return std::numeric_limits<double>::infinity();  // each is to be behind the other
    }
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
  std::vector<std::string> in_order_;  // the same, as they stand there
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

TEST(SpaseModel, ItsOptimumIsTheShortestSchedule) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 30; ++turn) {
    Instance instance = drawn.instance(1 + drawn.below(3), 1 + drawn.below(2), 3, 2);
    for (Task& task : instance.tasks) {
      std::erase_if(task.configurations, [](const Configuration& one) { return one.nodes > 1; });
      if (task.configurations.empty()) task.configurations.push_back({1, 1, 7, 8, "ddp"});
    }
    const auto text = literal_model(instance);
    ASSERT_TRUE(text.has_value()) << text.error().message();
    const double best = shortest(instance);
    ASSERT_NEAR(LpFile(text.value()).least(), best, 1e-6 * best) << text.value();
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

}  // namespace
}  // namespace ptc::planner
