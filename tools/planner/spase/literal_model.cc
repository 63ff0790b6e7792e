#include "tools/planner/spase/literal_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "store/base/json.h"

namespace ptc::planner {
namespace {

constexpr uint64_t kMostRows = 1'000'000;
constexpr size_t kTermsOfALine = 6;  // lines of the format are short

/// "row: a x + b y <= c". Coefficients beside, as the format has them.
class LpRows {
 public:
  LpRows& term(double factor, std::string_view variable) {
    if (terms_ > 0 && terms_ % kTermsOfALine == 0) text_ += "\n  ";
    fmt::format_to(std::back_inserter(text_), " {} {} {}", factor < 0 ? '-' : '+', std::abs(factor),
                   variable);
    ++terms_;
    return *this;
  }
  void end(std::string_view sense, double right) {
    fmt::format_to(std::back_inserter(all_), " r{}:{} {} {}\n", number_++, text_, sense, right);
    text_.clear();
    terms_ = 0;
  }
  const std::string& all() const { return all_; }

 private:
  std::string all_, text_;
  size_t number_ = 0, terms_ = 0;
};

class LiteralModel {
 public:
  explicit LiteralModel(const Instance& instance) : instance_(instance) {}

  Result<std::string> text() {
    for (const Task& task : instance_.tasks) {
      std::vector<Configuration> single;
      for (const Configuration& one : task.configurations)
        if (one.nodes == 1) single.push_back(one);
      if (single.empty())
        return invalid_argument(
            "task {}: it runs on several nodes, and this model has none that do",
            ptc::quoted(task.name));
      longest_ += std::max_element(single.begin(), single.end(), [](const auto& a, const auto& b) {
                    return a.seconds < b.seconds;
                  })->seconds;
      tasks_.push_back(std::move(single));
    }
    if (const uint64_t count = rows(); count > kMostRows)
      return invalid_argument("the model would have {} rows, and {} is the most", count, kMostRows);
    for (size_t t = 0; t < tasks_.size(); ++t) of_task(t);
    for (size_t a = 0; a < tasks_.size(); ++a)
      for (size_t b = a + 1; b < tasks_.size(); ++b) of_pair(a, b);
    return whole();
  }

 private:
  uint64_t rows() const {
    const uint64_t gpus = instance_.gpus(), nodes = instance_.nodes.size();
    uint64_t all = 0, before = 0;  // configurations of the tasks so far
    for (size_t t = 0; t < tasks_.size(); ++t) {
      const uint64_t own = tasks_[t].size();
      all += 2 + own * gpus + 2 * own * nodes + nodes + gpus - 1 + gpus * (t * own + before);
      before += own;
      if (all > kMostRows) break;
    }
    return all;
  }

  static std::string name(char what, size_t t, size_t i) {
    return fmt::format("{}_{}_{}", what, t, i);
  }
  static std::string name(char what, size_t t, size_t n, size_t g) {
    return fmt::format("{}_{}_{}_{}", what, t, n, g);
  }
  template <class Do>
  void each_gpu(const Do& what) const {
    for (size_t n = 0; n < instance_.nodes.size(); ++n)
      for (size_t g = 0; g < instance_.nodes[n].gpus; ++g) what(n, g);
  }

  void of_task(size_t t) {
    const std::vector<Configuration>& of = tasks_[t];
    const size_t nodes = instance_.nodes.size();
    for (size_t s = 0; s < of.size(); ++s)
      each_gpu([&](size_t n, size_t g) {
        rows_.term(1, "C").term(-1, name('I', t, n, g)).term(-longest_, name('B', t, s));
        rows_.end(">=", of[s].seconds - longest_);
      });
    for (size_t s = 0; s < of.size(); ++s) rows_.term(1, name('B', t, s));
    rows_.end("=", 1);
    for (size_t n = 0; n < nodes; ++n) rows_.term(1, name('O', t, n));
    rows_.end("=", 1);
    for (size_t n = 0; n < nodes; ++n) {
      const uint32_t gpus = instance_.nodes[n].gpus;
      const auto sum = [&] {
        for (size_t g = 0; g < gpus; ++g) rows_.term(1, name('P', t, n, g));
      };
      sum();
      rows_.term(-static_cast<double>(gpus), name('O', t, n)).end("<=", 0);
      for (size_t s = 0; s < of.size(); ++s) {
        const double wanted = of[s].gpus, slack = std::max<double>(wanted, gpus);
        sum();
        rows_.term(-slack, name('O', t, n)).term(-slack, name('B', t, s));
        rows_.end(">=", wanted - 2 * slack);
        sum();
        rows_.term(slack, name('O', t, n)).term(slack, name('B', t, s));
        rows_.end("<=", wanted + 2 * slack);
      }
    }
    each_gpu([&](size_t n, size_t g) {
      if (n == 0 && g == 0) return;
      rows_.term(1, name('I', t, n, g)).term(-1, name('I', t, 0, 0)).end("=", 0);
    });
  }

  void of_pair(size_t a, size_t b) {
    const auto order = [&](size_t first, size_t then, double sign, double least) {
      for (size_t s = 0; s < tasks_[first].size(); ++s)
        each_gpu([&](size_t n, size_t g) {
          rows_.term(1, name('I', first, n, g)).term(-1, name('I', then, n, g));
          rows_.term(longest_, name('P', first, n, g)).term(longest_, name('P', then, n, g));
          rows_.term(longest_, name('B', first, s)).term(sign * longest_, name('A', a, b));
          rows_.end("<=", least * longest_ - tasks_[first][s].seconds);
        });
    };
    order(a, b, -1, 3);
    order(b, a, 1, 4);
  }

  std::string whole() const {
    std::string text;
    const auto out = std::back_inserter(text);
    for (size_t n = 0; n < instance_.nodes.size(); ++n)
      fmt::format_to(out, "\\ node {}: {}, {} GPUs\n", n, ptc::quoted(instance_.nodes[n].name),
                     instance_.nodes[n].gpus);
    for (size_t t = 0; t < tasks_.size(); ++t) {
      fmt::format_to(out, "\\ task {}: {}\n", t, ptc::quoted(instance_.tasks[t].name));
      for (size_t s = 0; s < tasks_[t].size(); ++s)
        fmt::format_to(out, "\\   configuration {}: {} GPUs, {} s\n", s, tasks_[t][s].gpus,
                       tasks_[t][s].seconds);
    }
    fmt::format_to(out, "Minimize\n obj: C\nSubject To\n{}Binaries\n", rows_.all());
    for (size_t t = 0; t < tasks_.size(); ++t) {
      for (size_t s = 0; s < tasks_[t].size(); ++s) fmt::format_to(out, " {}\n", name('B', t, s));
      for (size_t n = 0; n < instance_.nodes.size(); ++n)
        fmt::format_to(out, " {}\n", name('O', t, n));
      each_gpu([&](size_t n, size_t g) { fmt::format_to(out, " {}\n", name('P', t, n, g)); });
      for (size_t b = t + 1; b < tasks_.size(); ++b) fmt::format_to(out, " {}\n", name('A', t, b));
    }
    text += "End\n";
    return text;
  }

  const Instance& instance_;
  std::vector<std::vector<Configuration>> tasks_;  // on one node
  double longest_ = 0;                             // U
  LpRows rows_;
};

}  // namespace

Result<std::string> literal_model(const Instance& instance) {
  return LiteralModel(instance).text();
}

}  // namespace ptc::planner
