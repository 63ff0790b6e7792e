// What the subcommands of "ptc spase" have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>

#include "tools/planner/spase/schedule.h"
#include "tools/planner/spase/solver.h"
#include "tools/ptc/command.h"

namespace ptc::cli {

struct SearchOptions {
  std::string time = "2", steps = "0", seed = "1";
};
/// --time, --steps and --seed.
void add_search_options(CLI::App& command, SearchOptions& options);
/// --threshold.
void add_threshold_option(CLI::App& command, std::optional<std::string>& threshold);
/// An interruption ends the search.
planner::SolverOptions solver_options(const SearchOptions& options);

/// As a table, at most so wide.
void print_schedule(const planner::Instance& instance, const planner::Schedule& schedule,
                    size_t width, std::FILE* out);

/// A line on a terminal that says what takes its time; it goes when that is over.
class Waiting {
 public:
  explicit Waiting(const std::string& what);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const bool is_live_;
};

void add_spase_run(CLI::App& spase, Context& context);
void add_spase_rehearse(CLI::App& spase, Context& context);

}  // namespace ptc::cli
