#include "tests/sim/world.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;
// Of a large cluster: commits, edits, a removal, and faults meanwhile.
constexpr std::string_view kLargeHistory = "cfefcfefrfe";
constexpr Time kToStart = 60s;
constexpr Time kToAnswer = 30min;  // an operation, once all is healed
constexpr Time kToSettle = 10min;

testing::Sample model_of(unsigned tensors, std::mt19937_64& random) {
  // A Llama has 9 tensors a layer, and 3 others; with Adam's state four times as many.
  const bool with_optimizer = tensors < 1000 && random() % 2 == 0;
  const unsigned wanted = with_optimizer ? tensors / 4 : tensors;
  return testing::llama_sample(with_optimizer, std::max(2u, (wanted + 5) / 9));
}

/// What the daemons log, into the history; without a mutex, that would be one more place to switch
/// threads.
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
  for (size_t at; (at = line.find(outcome.directory)) != std::string::npos;)
    line.erase(at, outcome.directory.size());
  outcome.history.push_back(std::move(line));
  note(outcome.history.back());
  if (outcome.verbose) std::printf("%s\n", outcome.history.back().c_str());
}

World::World(const WorldOptions& options, Outcome& outcome)
    : options_(options),
      outcome_(outcome),
      random_(options.seed),
      model_(model_of(options.tensors, random_)),
      cluster_(options.nodes, options.seed + 1, options.directory,
               [this](const std::string& what) { broken(what); }) {
  // In each other seed what describes a checkpoint goes from node to node in pieces, however short.
  if (options.seed % 2 == 1)
    cluster_.set_pieces({.piece = is_large(options) ? 64u << 10 : 2u << 10,
                         .with_question = 0,
                         .fan_out = 1 + static_cast<unsigned>(options.seed / 2 % 2)});
  layouts_.emplace(LayoutSpec().name(), LayoutSpec());
  MetaServer& agreement = cluster_.agreement();
  agreement.plant(planted_break(options.without));
  focus_ = planted_break(options.focus.empty() ? options.without : options.focus);
  if (focus_ != nullptr) late_.insert(focus_->decisions.begin(), focus_->decisions.end());
  agreement.hold_back(
      [this](unsigned node, Decision decision) { return hold_back(node, decision); });
  agreement.on_decision(
      [this](const MetaEvent& event, const std::optional<MetaEntry>& before,
             std::optional<unsigned> by) { look_at_decision(event, before, by); });
}

void World::say(const std::string& text) { note(outcome_, text); }

void World::broken(const std::string& what) {
  say("BROKEN: " + what);
  outcome_.broken.push_back(what);
}

void World::run() {
  for (unsigned i = 0; i < options_.nodes; ++i) cluster_.start(i);
  for (unsigned i = 0; i < options_.nodes; ++i)
    if (!cluster_.wait_up(i, kToStart))
      return broken("node " + SimCluster::name(i) + " does not start");
  const std::optional<Result<>> made = ask(0, [](JobStore& store) -> Result<> {
    PTC_TRY(store.create_job("job"));
    return ok();
  });
  if (!made || made->has_error()) return broken("the job cannot be made");
  say(fmt::format("{} nodes, {} tensors", options_.nodes, model_.tensors.size()));

  const unsigned steps = is_large(options_)
                             ? std::min<unsigned>(options_.steps, kLargeHistory.size())
                             : options_.steps;
  for (unsigned step = 0; step < steps && outcome_.broken.empty(); ++step) {
    heal_what_is_due();
    operate_or_fail(step);
    if (chance(70)) sleep(std::chrono::milliseconds(draw(3000)));
    for (unsigned i = 0; i < options_.nodes; ++i) look_at(i);
  }
  over_ = true;
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
  if (outcome_.broken.empty() && was_full_) go_on_when_freed();
  if (outcome_.broken.empty()) check_end(false);
  if (outcome_.broken.empty()) start_all_anew();
  if (outcome_.broken.empty()) check_end(true);
  if (outcome_.broken.empty()) check_least_movement();
  say("end");
}

void World::operate_or_fail(unsigned step) {
  if (!is_large(options_)) return step > 2 && chance(40) ? fail() : operate();
  const unsigned node = some_node();
  switch (kLargeHistory[step]) {
    case 'c':
      return in_background("commit", node, [this](unsigned n) { write_and_commit(n); });
    case 'e':
      return in_background("edit", node, [this](unsigned n) { edit(n); });
    case 'r':
      return in_background("remove", node, [this](unsigned n) { remove(n); });
    default:
      return fail();
  }
}

void report(const Outcome& outcome) {
  if (!outcome.verbose)
    for (const std::string& line : outcome.history) std::printf("%s\n", line.c_str());
  for (const std::string& what : outcome.broken) std::printf("BROKEN: %s\n", what.c_str());
}

/// What was given up for want of room is done when the layout is saved again.
void World::go_on_when_freed() {
  bool gave_up = false;
  for (unsigned i = 0; i < options_.nodes && !gave_up; ++i)
    cluster_.on(i, [&](JobStore& store) {
      JobRef job = store.find("job");
      if (!(gave_up = job->numbers().state == JobState::kFailed)) return;
      Result<> saved = job->save_layout(job->layout_text());
      say("the layout is saved again: " + (saved.has_value() ? "ok" : saved.error().message()));
    });
  if (gave_up && !wait_settled(kToSettle))
    broken("the cluster does not settle when there is room again");
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
    if (!cluster_.wait_up(i, kToStart))
      return broken("node " + SimCluster::name(i) + " does not start");
  if (!wait_settled(kToSettle)) broken("the cluster does not settle after a start of all");
  sleep(5s);  // what nobody needs any more goes a moment later
}

Outcome run_world(const WorldOptions& options) {
  Outcome outcome;
  outcome.verbose = options.verbose;
  outcome.directory = options.directory;
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("", std::make_shared<HistorySink>(outcome)));
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
