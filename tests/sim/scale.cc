#include "tests/sim/scale.h"

#include <spdlog/sinks/null_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tests/sim/sim_cluster.h"
#include "tests/support/job_fixture.h"

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;

constexpr Time kToEnd = 600s;  // of a change
constexpr Time kCalm = 10s;    // what a change still causes when all have it
// Goals, of simulated time; and of agreed writes a node and change, on average, and of how often
// one node calls all others.
constexpr Time kJoin = 30s, kEdit = 1s;
constexpr double kWrites = 5, kAsked = 3;

double seconds_of(Time time) { return std::chrono::duration<double>(time).count(); }

/// Of a processor, in truth, that this process has had so far.
double busy_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

class Scale {
 public:
  explicit Scale(const ScaleOptions& options)
      : options_(options),
        cluster_(options.nodes, options.seed, options.directory,
                 [this](const std::string& why) { fail(why); }) {
    cluster_.agreement().set_costs(EtcdCosts::measured());
  }
  bool run();

 private:
  /// Counts what happens until `holds`, which shall be so within `goal`, and for a while after
  /// that.
  void measure(const std::string& what, Time goal, const std::function<void()>& change,
               const std::function<bool()>& holds);
  void fail(const std::string& why) {
    std::printf("MISSED: %s\n", why.c_str());
    ok_ = false;
  }
  bool all(const std::function<bool(JobStore&)>& holds);
  bool sees_all(JobStore& store) const;
  /// Until all are there that are wanted, and all images of the checkpoint twice; else why not.
  std::string what_lacks(JobStore& store) const;
  bool all_see_all() {
    return all([this](JobStore& store) { return sees_all(store); });
  }
  /// A tenth of all, of whose files there are copies elsewhere: the last such.
  std::vector<unsigned> choose_lost();
  void edit(const std::string& text);
  void write(const std::string& checkpoint);

  const ScaleOptions options_;
  SimCluster cluster_;
  unsigned last_ = 0;             // the node of which something did not hold yet
  bool ok_ = true, runs_ = true;  // the goals are met; each change came to its end
  std::string lacking_;           // on that one
  Result<> done_ = ok();
};

/// Of all nodes that are wanted.
bool Scale::all(const std::function<bool(JobStore&)>& holds) {
  // That one first: else all are asked again and again for one that is late.
  for (unsigned k = 0; k < cluster_.size(); ++k) {
    const unsigned i = (last_ + k) % cluster_.size();
    if (!cluster_.is_wanted(i)) continue;
    bool one = false;
    if (!cluster_.is_up(i) || !cluster_.on(i, [&](JobStore& store) { one = holds(store); }) ||
        !one) {
      last_ = i;
      return false;
    }
  }
  return true;
}

bool Scale::sees_all(JobStore& store) const {
  size_t wanted = 0;
  for (unsigned i = 0; i < cluster_.size(); ++i) wanted += cluster_.is_wanted(i);
  return store.nodes().size() == wanted;
}

std::vector<unsigned> Scale::choose_lost() {
  std::map<std::string, unsigned> numbers;
  for (unsigned i = 0; i < cluster_.size(); ++i) numbers[cluster_.name(i)] = i;
  using Image = std::tuple<uint32_t, std::string, int32_t>;
  std::map<Image, unsigned> copies;
  std::vector<std::vector<Image>> held(cluster_.size());
  cluster_.on(0, [&](JobStore& store) {
    const auto stored = store.find("job")->find_checkpoint("base")->stored();
    for (const StoredImage& image : stored->images) {
      const Image key{image.state, image.path, image.written};
      ++copies[key];
      held[numbers.at(image.node)].push_back(key);
    }
  });
  std::vector<unsigned> lost;
  for (unsigned i = cluster_.size(); i-- > 1 && lost.size() < cluster_.size() / 10;) {
    if (std::any_of(held[i].begin(), held[i].end(), [&](auto& key) { return copies[key] < 2; }))
      continue;
    for (const Image& key : held[i]) --copies[key];
    lost.push_back(i);
  }
  return lost;
}

std::string Scale::what_lacks(JobStore& store) const {
  const JobRef job = store.find("job");
  if (!job->is_settled()) return "the job is not settled";
  const std::vector<std::string> there = store.nodes();
  if (!sees_all(store)) return fmt::format("it sees {} nodes", there.size());
  std::map<std::tuple<uint32_t, std::string, int32_t>, unsigned> copies;
  for (const auto stored_now = job->find_checkpoint("base")->stored();
       const StoredImage& image : stored_now->images)
    copies[{image.state, image.path, image.written}] +=
        std::binary_search(there.begin(), there.end(), image.node);
  for (const auto& [image, count] : copies)
    if (count < 2)
      return fmt::format("of state {}, {} (written {}) there are {} copies", std::get<0>(image),
                         std::get<1>(image), std::get<2>(image), count);
  return {};
}

void Scale::measure(const std::string& what, Time goal, const std::function<void()>& change,
                    const std::function<bool()>& holds) {
  if (!runs_) return;
  std::vector<NodeCosts> before;
  for (unsigned i = 0; i < cluster_.size(); ++i) before.push_back(cluster_.costs(i));
  const Time start = now();
  const double busy = busy_seconds();
  const uint64_t turns = turns_taken();
  change();
  while (!holds() && now() - start < kToEnd) sleep(20ms);
  const Time took = now() - start;
  runs_ = done_.has_value() && took < kToEnd;
  if (done_.has_error()) fail(what + ": " + done_.error().message());
  else if (!runs_)
    fail(what + " does not end" +
         (lacking_.empty() ? "" : fmt::format("; on node {} {}", last_, lacking_)));
  sleep(kCalm);
  NodeCosts sum, most;
  std::string often;  // the method that one node asks all others most often
  uint64_t asked = 0;
  for (unsigned i = 0; i < cluster_.size(); ++i) {
    const NodeCosts one = cluster_.costs(i) - before[i];
    sum += one;
    most.raise_to(one);
    for (size_t row = 0; row < one.calls.size(); ++row)
      if (one.calls[row] > asked) {
        asked = one.calls[row];
        often = kPeerTable[row].name;
      }
  }
  const double n = cluster_.size();
  std::printf(
      "| %s | %.2f s | %.1f (%lu) | %.1f | %.1f (%lu) | %.1f, %s | %.1f (%.1f) | %.0f s |\n",
      what.c_str(), seconds_of(took), sum.writes / n, most.writes, sum.conflicts / n,
      sum.all_calls() / n, most.all_calls(), asked / (n - 1), often.c_str(),
      (sum.sent + sum.agreement) / n / 1e3, (most.sent + most.agreement) / 1e3,
      busy_seconds() - busy);
  if (options_.verbose)
    std::printf("    %.1f million turns\n", static_cast<double>(turns_taken() - turns) / 1e6);
  if (options_.verbose)
    for (size_t row = 0; row < sum.calls.size(); ++row)
      if (sum.calls[row] > 0 || sum.bytes_of_calls[row] > 0)
        std::printf("    %s: %lu, at most %lu of a node; %.1f kB, at most %.1f of a node\n",
                    std::string(kPeerTable[row].name).c_str(), sum.calls[row], most.calls[row],
                    sum.bytes_of_calls[row] / 1e3, most.bytes_of_calls[row] / 1e3);
  if (took > goal) fail(fmt::format("{}: more than {} s", what, seconds_of(goal)));
  if (sum.writes / n > kWrites) fail(fmt::format("{}: more than {} writes a node", what, kWrites));
  if (asked / (n - 1) > kAsked) fail(fmt::format("{}: {} of all {} times", what, often, kAsked));
  std::fflush(stdout);
}

void Scale::edit(const std::string& text) {
  cluster_.on(0, [&](JobStore& store) { done_ = store.find("job")->save_layout(text); });
}

/// Of each rank on the node of its number.
void Scale::write(const std::string& checkpoint) {
  const std::filesystem::path scratch = options_.directory / "written";
  LayoutSpec spec;
  cluster_.on(0, [&](JobStore& store) {
    spec = Layout::parse(store.find("job")->layout_text()).value().spec;
  });
  testing::write_ranks(testing::llama_sample(), spec, scratch);
  for (unsigned i = 0; i < spec.sizes.world_size(); ++i)
    cluster_.on(i % cluster_.size(), [&](JobStore& store) {
      const std::filesystem::path incoming =
          std::filesystem::path(store.find("job")->files_dir()) / "incoming" / checkpoint;
      const std::string rank = "rank/" + std::to_string(i);
      std::filesystem::create_directories(incoming / rank);
      std::filesystem::copy(scratch / rank, incoming / rank,
                            std::filesystem::copy_options::recursive);
    });
  std::filesystem::remove_all(scratch);
}

bool Scale::run() {
  const unsigned n = cluster_.size();
  std::printf("%u nodes, seed %lu; writes, refused, calls and kB: a node on average (the most)\n\n",
              n, options_.seed);
  std::printf(
      "| change | time | agreed writes | refused | calls | asked by one of all | kB | took |\n"
      "|---|---|---|---|---|---|---|---|\n");
  std::fflush(stdout);
  measure(
      "join of all", kJoin,
      [&] {
        for (unsigned i = 0; i < n; ++i) cluster_.start(i);
      },
      [&] { return all_see_all(); });
  measure(
      "a job is made", kEdit,
      [&] {
        cluster_.on(0, [&](JobStore& store) {
          Result<JobRef> made = store.create_job("job");
          if (made.has_error()) done_ = made.error();
        });
      },
      [&] { return all([](JobStore& store) { return store.find("job") != nullptr; }); });
  const auto in_force = [&](const std::string& text) {
    return all([&](JobStore& store) {
      const JobRef job = store.find("job");
      return job->layout_text() == text && job->is_settled();
    });
  };
  const std::string layout = fmt::format(R"({{"tp": 2, "pp": 2, "dp": {}, "replicas": 1)", n / 4),
                    first = layout + "}", second = layout + R"(, "keep": 3})",
                    third = fmt::format(R"({{"tp": 4, "pp": 1, "dp": {}, "replicas": 1}})", n / 4);
  measure(
      "an edit of an empty job", kEdit, [&] { edit(first); }, [&] { return in_force(first); });
  const auto commit = [&](const std::string& name) {
    cluster_.on(0, [&](JobStore& store) { done_ = store.find("job")->commit(name, name); });
  };
  const auto has = [&](const std::string& name, bool wanted) {
    return all([&](JobStore& store) {
      return (store.find("job")->find_checkpoint(name) != nullptr) == wanted;
    });
  };
  write("base");
  measure(
      "a commit from all", kToEnd, [&] { commit("base"); }, [&] { return has("base", true); });
  measure(
      "an edit without bytes", kEdit, [&] { edit(second); }, [&] { return in_force(second); });
  std::vector<unsigned> lost;
  if (runs_) lost = choose_lost();
  const auto settled_with_copies = [&] {
    return all([this](JobStore& store) {
      lacking_ = what_lacks(store);
      return lacking_.empty();
    });
  };
  measure(
      "a loss of 10 %", kToEnd,
      [&] {
        for (const unsigned i : lost) cluster_.kill(i, true);
      },
      settled_with_copies);
  measure(
      "they come back", kJoin,
      [&] {
        for (const unsigned i : lost) cluster_.start(i);
      },
      [&] { return all_see_all(); });
  Network& network = cluster_.network();
  measure(
      "the agreement store away for 60 s", kToEnd,
      [&] {
        for (unsigned i = 0; i < n; ++i) {
          network.cut(i, network.store());
          network.cut(network.store(), i);
        }
        sleep(60s);
        for (unsigned i = 0; i < n; ++i) {
          network.mend(i, network.store());
          network.mend(network.store(), i);
        }
      },
      [&] { return all_see_all(); });
  measure(
      "an edit that moves all", kToEnd, [&] { edit(third); },
      [&] { return in_force(third) && settled_with_copies(); });
  measure(
      "a node is drained", kToEnd,
      [&] {
        const std::string last = SimCluster::name(n - 1);
        cluster_.on(0, [&](JobStore& store) { done_ = store.drain(last); });
      },
      settled_with_copies);
  write("newer");
  commit("newer");
  while (runs_ && done_.has_value() && !has("newer", true)) sleep(20ms);
  sleep(kCalm);
  measure(
      "a checkpoint is removed", kToEnd,
      [&] {
        cluster_.on(0,
                    [&](JobStore& store) { done_ = store.find("job")->remove_checkpoint("base"); });
      },
      [&] { return has("base", false); });
  measure(
      "the job is removed", kToEnd,
      [&] {
        cluster_.on(0, [&](JobStore& store) { done_ = store.remove_job("job", /*force=*/true); });
      },
      [&] { return all([](JobStore& store) { return store.find("job") == nullptr; }); });
  measure(
      "nothing", kToEnd, [] {}, [] { return true; });
  return ok_;
}

}  // namespace

bool run_scale(const ScaleOptions& options) {
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::null_sink_st>()));
  bool ok = false;
  SchedulerOptions scheduler;
  scheduler.seed = options.seed;
  // What is measured is no race: threads change where they wait, and nowhere else. And what a turn
  // costs it costs one node, while the others go on.
  scheduler.preempt_every = 0;
  scheduler.many_threads = options.nodes > 100;
  scheduler.step = std::max<Time>(Time(1), scheduler.step / options.nodes);
  sim::run(scheduler, [&] { ok = Scale(options).run(); });
  return ok;
}

}  // namespace ptc::sim
