// Decisions that come later than what they rest on was read, and what others do in between.
#include <thread>

#include "tests/sim/world.h"

namespace ptc::sim {

using namespace std::chrono_literals;
constexpr unsigned kMostHeld = 12;  // of a seed
constexpr std::string_view kAnything = "CceerpmaAtTUdkSjoR";

namespace {

/// What is done by the very node whose decision is held back; all else is done by others.
bool is_of_that_node(char what) { return what == 'S'; }

}  // namespace

Time World::hold_back(unsigned node, Decision decision) {
  if (over_ || held_ >= kMostHeld || !late_.contains(decision) || !chance(60)) return {};
  ++held_;
  const Time held = std::chrono::milliseconds(200 + draw(3000));
  say(fmt::format("{}: a decision ({}) comes {} ms late", SimCluster::name(node), name_of(decision),
                  std::chrono::duration_cast<std::chrono::milliseconds>(held).count()));
  const std::string_view with = alone_ ? "p" : focus_ != nullptr ? focus_->beside : kAnything;
  if (!with.empty() && (!alone_ || focus_ == nullptr || focus_->beside == with))
    interfere(node, held / 2, with);
  return held;
}

void World::note_begin(unsigned node, Decision decision) {
  if (focus_ == nullptr || focus_->early.empty() || over_ || slept_ >= kMostHeld ||
      !late_.contains(decision) || !chance(50))
    return;
  ++slept_;
  slow_down_disk(node);  // else it is over at once
  interfere(node, 600ms, focus_->early);
}

void World::interfere(unsigned node, Time within, std::string_view with) {
  ++operating_;
  std::thread([this, node, within, with] {
    set_group(0);
    name_thread("what others do");
    for (uint64_t more = 1 + draw(2); more > 0 && !over_; --more) {
      sleep(std::chrono::microseconds(draw(1 + static_cast<uint64_t>(within.count() / 1000))));
      const char what = with[draw(with.size())];
      if (!over_) act(what, is_of_that_node(what) ? node : another_node(node));
    }
    --operating_;
    wake_all(&operating_);
  }).detach();
}

void World::slow_down_disk(unsigned node) {
  const std::string what = "the disk of " + SimCluster::name(node) + " is slow";
  say(what);
  cluster_.set_slow_disk(node, true);
  until(now() + std::chrono::milliseconds(draw(8000)), what,
        [this, node] { cluster_.set_slow_disk(node, false); });
}

/// A machine that sleeps, longer than its lease lasts; its clocks stand still meanwhile, and it
/// goes on where it was.
void World::suspend(unsigned node) {
  Network& network = cluster_.network();
  if (!cluster_.is_up(node) || network.is_frozen(node)) return;
  const std::string name = SimCluster::name(node);
  say("suspended: " + name);
  note_fault();
  network.set_frozen(node, true);
  cluster_.agreement().end_lease_of(node);
  ++operating_;
  std::thread([this, node, name, &network] {
    set_group(0);
    name_thread("sleep of " + name);
    sleep(std::chrono::milliseconds(100 + draw(4000)));
    say("goes on: " + name);
    note_fault();
    network.set_frozen(node, false);
    --operating_;
    wake_all(&operating_);
  }).detach();
}

/// Those of some kinds, for a while.
void World::let_decisions_come_late() {
  if (focus_ != nullptr) return;
  std::string what = "decisions come late:";
  std::set<Decision> kinds;
  for (uint64_t more = 1 + draw(3); more > 0; --more) {
    const auto kind = static_cast<Decision>(1 + draw(static_cast<uint64_t>(Decision::kEndDrain)));
    if (kinds.insert(kind).second) what += fmt::format(" {}", name_of(kind));
  }
  say(what);
  late_ = kinds;
  until(now() + std::chrono::milliseconds(5000 + draw(15'000)), what, [this] { late_.clear(); });
  for (uint64_t more = 2 + draw(4); more > 0; --more) {
    act(kAnything[draw(kAnything.size())], some_node());
    sleep(std::chrono::milliseconds(draw(1000)));
  }
}

}  // namespace ptc::sim
