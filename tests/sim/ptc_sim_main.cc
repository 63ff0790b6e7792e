// ptc_sim --seed S [--seeds N] [--nodes N] [--tensors T]: each seed in a process of its own.
#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>

#include "tests/sim/planted.h"
#include "tests/sim/scale.h"
#include "tests/sim/world.h"

namespace ptc::sim {
namespace {

struct Numbers {  // what the process of a seed says
  uint64_t hash, steps, seconds_simulated, events;
  bool mattered;  // what --without takes out
};

/// One thread runs at a time: on one processor the next one begins at once, and one heap is enough.
void run_on_one_processor() {
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(sched_getcpu(), &here);
  (void)sched_setaffinity(0, sizeof(here), &here);
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 26);
}

int run_seed(WorldOptions options, bool scale, Numbers& result) {
  const std::filesystem::path below = std::filesystem::is_directory("/dev/shm")
                                          ? "/dev/shm"
                                          : std::filesystem::temp_directory_path();
  std::string name = below / "ptcfs-sim-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) return 2;
  options.directory = name;
  const pid_t child = fork();
  if (child == 0) {
    run_on_one_processor();
    if (scale) {
      const bool ok = run_scale({options.seed, options.nodes, options.directory, options.verbose});
      std::fflush(nullptr);
      _exit(ok ? 0 : 1);
    }
    const Outcome outcome = run_world(options);
    result = {outcome.run.hash, outcome.run.steps,
              static_cast<uint64_t>(
                  std::chrono::duration_cast<std::chrono::seconds>(outcome.run.time).count()) -
                  1000,
              outcome.history.size(), a_break_has_mattered()};
    if (!outcome.broken.empty()) report(outcome);
    std::fflush(nullptr);
    _exit(outcome.broken.empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::error_code ignored;
  std::filesystem::remove_all(name, ignored);
  if (WIFSIGNALED(status))
    std::printf("seed %lu: ended by signal %d\n", options.seed, WTERMSIG(status));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}

}  // namespace
}  // namespace ptc::sim

int main(int argc, char** argv) {
  using namespace ptc::sim;
  WorldOptions options;
  uint64_t seeds = 1;
  bool twice = false, until_caught = false, scale = false;
  CLI::App app(
      "A simulated cluster: random operations and faults, a seed each; what breaks can be run "
      "again.");
  app.add_option("--seed", options.seed, "The first seed");
  app.add_option("--seeds", seeds, "How many");
  app.add_option("--nodes", options.nodes, "Nodes of the cluster")->check(CLI::Range(2u, 1000u));
  app.add_option("--tensors", options.tensors, "Tensors of the job's model, about");
  app.add_option("--steps", options.steps, "Operations and faults");
  app.add_flag("--twice", twice, "Each seed twice: the runs must be the same");
  std::vector<std::string> planted;
  for (const Break& one : planted_breaks()) planted.emplace_back(one.name);
  app.add_option("--without", options.without,
                 "Take a compare out of all decisions, to see that it is noticed")
      ->check(CLI::IsMember(planted));
  app.add_option("--focus", options.focus, "What --without does, but take nothing out")
      ->check(CLI::IsMember(planted));
  app.add_flag_callback(
      "--list-planted",
      [&] {
        for (const std::string& name : planted) std::printf("%s\n", name.c_str());
        throw CLI::Success();
      },
      "What --without takes");
  app.add_flag("--until-caught", until_caught,
               "End well with the first seed that fails, and not well when none does");
  app.add_flag("--scale", scale, "Tell what each change costs a cluster, with its goals");
  app.add_flag("--verbose", options.verbose, "Tell what happens");
  CLI11_PARSE(app, argc, argv);

  auto* result = static_cast<Numbers*>(
      mmap(nullptr, sizeof(Numbers), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  uint64_t failed = 0;
  for (uint64_t i = 0; i < seeds; ++i, ++options.seed) {
    *result = {};
    const auto start = std::chrono::steady_clock::now();
    int status = run_seed(options, scale, *result);
    const Numbers first = *result;
    if (status == 0 && twice &&
        (run_seed(options, scale, *result) != 0 || result->hash != first.hash)) {
      std::printf("seed %lu: another run, another history\n", options.seed);
      status = 4;
    }
    failed += status != 0;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::printf("seed %lu: %s, %lu events, %lu turns, %lu s simulated, %.1f s, %016lx%s\n",
                options.seed, status == 0 ? "ok" : "FAILED", first.events, first.steps,
                first.seconds_simulated, seconds.count(), first.hash,
                status == 0 && !options.without.empty() && !first.mattered
                    ? ", nothing came of what is taken out"
                    : "");
    std::fflush(stdout);
    if (until_caught && status != 0) {
      std::printf("caught by seed %lu\n", options.seed);
      return 0;
    }
  }
  if (until_caught) {
    std::printf("not caught by %lu seeds\n", seeds);
    return 1;
  }
  std::printf("%lu of %lu seeds failed\n", failed, seeds);
  return failed == 0 ? 0 : 1;
}
