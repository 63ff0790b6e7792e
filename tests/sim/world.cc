#include "tests/sim/world.h"

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

void print(const Outcome& outcome, size_t most) {
  const std::vector<std::string>& history = outcome.history;
  for (size_t i = history.size() > most ? history.size() - most : 0; i < history.size(); ++i)
    std::printf("  %s\n", history[i].c_str());
}

}  // namespace

World::World(const WorldOptions& options, Outcome& outcome)
    : options_(options), outcome_(outcome), random_(options.seed), model_(model_of(options.tensors, random_)),
      cluster_(options.nodes, options.seed + 1, options.directory, [this](const std::string& what) { broken(what); }) {
  layouts_.emplace(LayoutSpec().name(), LayoutSpec());
}

void World::say(const std::string& text) {
  const double seconds = std::chrono::duration<double>(now()).count() - 1000;
  outcome_.history.push_back(fmt::format("{:10.6f} {}", seconds, text));
  note(outcome_.history.back());
  if (options_.verbose) std::printf("  %s\n", outcome_.history.back().c_str());
}

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
    print(outcome_, SIZE_MAX);
    std::fflush(nullptr);
    _exit(1);
  }
  if (!wait_settled(kToSettle)) {
    std::string why;
    (void)all_settled(&why);
    broken("the cluster does not settle: " + why);
  }
  if (outcome_.broken.empty()) check_end();
  if (outcome_.broken.empty()) check_least_movement();
  say("end");
}

Outcome run_world(const WorldOptions& options) {
  Outcome outcome;
  spdlog::set_level(options.verbose ? spdlog::level::info : spdlog::level::off);
  spdlog::set_pattern("  %E.%f   | %v");
  SchedulerOptions scheduler;
  scheduler.seed = options.seed;
  scheduler.on_deadlock = [&](const std::string& threads) {
    print(outcome, SIZE_MAX);
    std::printf("seed %lu: nobody can run:\n%s", options.seed, threads.c_str());
  };
  outcome.run = sim::run(scheduler, [&] {
    World world(options, outcome);
    world.run();
  });
  return outcome;
}

}  // namespace ptc::sim
