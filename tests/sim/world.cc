#include "tests/sim/world.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
constexpr Time kToStart = 60s;
constexpr Time kToAnswer = 30min;  // an operation, once all is healed
constexpr Time kToSettle = 10min;

testing::Sample model_of(unsigned tensors, std::mt19937_64& random) {
  // A Llama has 9 tensors a layer, and 3 others; with Adam's state four times as many.
  const bool with_optimizer = tensors < 1000 && random() % 2 == 0;
  const unsigned wanted = with_optimizer ? tensors / 4 : tensors;
  return testing::llama_sample(with_optimizer, std::max(2u, (wanted + 5) / 9));
}

/// What the daemons log, into the history; without a mutex, that would be one more place to switch threads.
class HistorySink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit HistorySink(Outcome& outcome) : outcome_(outcome) {}

 private:
  void sink_it_(const spdlog::details::log_msg& line) override {
    note(outcome_, "    " + std::string(line.payload.data(), line.payload.size()));
  }
  void flush_() override {}
  Outcome& outcome_;
};

}  // namespace

void note(Outcome& outcome, const std::string& text) {
  const double seconds = std::chrono::duration<double>(now()).count() - 1000;
  std::string line = fmt::format("{:10.6f} {}", seconds, text);
  for (size_t at; (at = line.find(outcome.directory)) != std::string::npos;) line.erase(at, outcome.directory.size());
  outcome.history.push_back(std::move(line));
  note(outcome.history.back());
  if (outcome.verbose) std::printf("%s\n", outcome.history.back().c_str());
}

World::World(const WorldOptions& options, Outcome& outcome)
    : options_(options), outcome_(outcome), random_(options.seed), model_(model_of(options.tensors, random_)),
      cluster_(options.nodes, options.seed + 1, options.directory, [this](const std::string& what) { broken(what); }) {
  layouts_.emplace(LayoutSpec().name(), LayoutSpec());
}

void World::say(const std::string& text) { note(outcome_, text); }

void World::broken(const std::string& what) {
  say("BROKEN: " + what);
  outcome_.broken.push_back(what);
}

void World::run() {
  for (unsigned i = 0; i < options_.nodes; ++i) cluster_.start(i);
  for (unsigned i = 0; i < options_.nodes; ++i)
    if (!cluster_.wait_up(i, kToStart)) return broken("node " + SimCluster::name(i) + " does not start");
  const std::optional<Result<>> made = ask(0, [](JobStore& store) -> Result<> {
    PTC_TRY(store.create_job("job"));
    return ok();
  });
  if (!made || made->has_error()) return broken("the job cannot be made");
  say(fmt::format("{} nodes, {} tensors", options_.nodes, model_.tensors.size()));

  for (unsigned step = 0; step < options_.steps && outcome_.broken.empty(); ++step) {
    heal_what_is_due();
    if (step > 2 && chance(40)) fail();
    else operate();
    if (chance(70)) sleep(std::chrono::milliseconds(draw(3000)));
    for (unsigned i = 0; i < options_.nodes; ++i) look_at(i);
  }
  heal_all();
  const Time limit = now() + kToAnswer;
  while (operating_ > 0 && now() < limit) wait_until(&operating_, now() + 1s);
  if (operating_ > 0) {
    broken("an operation never ends:\n" + list_threads());
    report(outcome_);
    std::fflush(nullptr);
    _exit(1);
  }
  if (!wait_settled(kToSettle)) {
    std::string why;
    (void)all_settled(&why);
    broken("the cluster does not settle: " + why);
  }
  if (outcome_.broken.empty()) check_end(false);
  if (outcome_.broken.empty()) start_all_anew();
  if (outcome_.broken.empty()) check_end(true);
  if (outcome_.broken.empty()) check_least_movement();
  say("end");
}

void report(const Outcome& outcome) {
  if (!outcome.verbose)
    for (const std::string& line : outcome.history) std::printf("%s\n", line.c_str());
  for (const std::string& what : outcome.broken) std::printf("BROKEN: %s\n", what.c_str());
}

/// Some as if killed, the others in order.
void World::start_all_anew() {
  say("all nodes are started anew");
  for (unsigned i = 0; i < options_.nodes; ++i) {
    if (chance(50)) cluster_.kill(i, true);
    else cluster_.stop(i);
    cluster_.start(i);
  }
  for (unsigned i = 0; i < options_.nodes; ++i)
    if (!cluster_.wait_up(i, kToStart)) return broken("node " + SimCluster::name(i) + " does not start");
  if (!wait_settled(kToSettle)) broken("the cluster does not settle after a start of all");
  sleep(5s);  // what nobody needs any more goes a moment later
}

Outcome run_world(const WorldOptions& options) {
  Outcome outcome;
  outcome.verbose = options.verbose;
  outcome.directory = options.directory;
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("", std::make_shared<HistorySink>(outcome)));
  SchedulerOptions scheduler;
  scheduler.seed = options.seed;
  scheduler.on_deadlock = [&](const std::string& threads) {
    report(outcome);
    std::printf("BROKEN: nobody can run:\n%s", threads.c_str());
  };
  outcome.run = sim::run(scheduler, [&] {
    World world(options, outcome);
    world.run();
  });
  return outcome;
}

}  // namespace ptc::sim
