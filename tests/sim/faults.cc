// What fails, and for how long.
#include <fstream>

#include "tests/sim/world.h"

namespace ptc::sim {

using namespace std::chrono_literals;
constexpr Time kToCopy = 60s;  // the others have what was lost again
constexpr Time kToEnd = 2min;  // what is under way, once all is healed

namespace {

/// Of the header or of an array.
std::optional<uint64_t> some_byte(const Checkpoint& checkpoint, const ImageLayout& image,
                                  std::mt19937_64& random) {
  if (image.arrays.empty() || random() % 4 == 0) {
    const uint64_t bytes = image.arrays.empty() ? image.bytes : image.literals.header().size();
    return bytes > 0 ? std::optional(random() % bytes) : std::nullopt;
  }
  const ArraySlot& slot = image.arrays[random() % image.arrays.size()];
  uint64_t elements = 1;
  for (uint64_t extent : slot.part->local_shape) elements *= extent;
  const uint64_t bytes = elements * checkpoint.manifest().element_bits()[slot.tensor] / 8;
  if (bytes == 0) return std::nullopt;
  return slot.byte_offset + random() % bytes;
}

/// As long as it lives, whoever holds decisions back lets nobody do more than pin meanwhile.
class Alone {
 public:
  explicit Alone(bool& alone) : alone_(alone) { alone_ = true; }
  Alone(const Alone&) = delete;
  ~Alone() { alone_ = false; }

 private:
  bool& alone_;
};

}  // namespace

void World::until(Time end, const std::string& what, std::function<void()> heal) {
  to_heal_.emplace(end, std::pair(what, std::move(heal)));
}

bool World::is_calm() const { return to_heal_.empty() && now() - last_fault_ > 10s; }

void World::heal_what_is_due() {
  while (!to_heal_.empty() && to_heal_.begin()->first <= now()) {
    last_fault_ = now();
    auto [what, heal] = std::move(to_heal_.begin()->second);
    to_heal_.erase(to_heal_.begin());
    say("over: " + what);
    heal();
  }
}

void World::heal_all() {
  while (!to_heal_.empty()) {  // in random order
    auto some = std::next(to_heal_.begin(), static_cast<ptrdiff_t>(draw(to_heal_.size())));
    auto [what, heal] = std::move(some->second);
    to_heal_.erase(some);
    say("over: " + what);
    heal();
    if (chance(50)) sleep(std::chrono::milliseconds(draw(2000)));
  }
}

/// The last copies are not among what goes: all is settled, everything has copies, and one
/// directory is lost. A copy of all that it held is there again before the next one may go.
void World::lose_a_directory() {
  const Alone alone(alone_);
  if (!wait_calm_with_copies()) return;
  const unsigned node = some_node();
  say("lost, with its directory: " + SimCluster::name(node));
  lost_a_directory_ = true;
  cluster_.kill(node, false);
  sleep(chance(50) ? kToCopy : std::chrono::milliseconds(draw(3000)));
  say("comes back with nothing: " + SimCluster::name(node));
  cluster_.start(node);
  (void)cluster_.wait_up(node, kToEnd);
  (void)wait_settled(kToEnd);
}

/// Nobody else is at work, and each image has a copy; one byte of one of them changes. It is found
/// by ptc verify, or by a change of layout that reads it, and made anew of another.
void World::damage_an_image() {
  const Alone alone(alone_);
  if (!wait_calm_with_copies()) return;
  std::string image;
  const unsigned node = some_node();
  cluster_.on(node, [&](JobStore& store) {
    const std::vector<CheckpointRef> all = store.find("job")->checkpoints();
    if (all.empty()) return;
    const CheckpointRef checkpoint = all[draw(all.size())];
    const std::shared_ptr<const StoredState> stored = checkpoint->stored();
    std::vector<uint32_t> here;
    for (uint32_t i = 0; i < stored->images.size(); ++i)
      if (const StoredImage& one = stored->images[i];
          one.node == SimCluster::name(node) && one.image != nullptr && one.image->bytes() > 0)
        here.push_back(i);
    if (here.empty()) return;
    const uint32_t number = here[draw(here.size())];
    const std::optional<uint64_t> byte_of_it =
        some_byte(*checkpoint, stored->layouts()[number], random_);
    if (!byte_of_it) return;
    image = stored->images[number].id;
    const std::filesystem::path path = std::filesystem::path(store.images().directory()) / image;
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(*byte_of_it);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1 << draw(8));
    file.seekp(at);
    file.put(byte);
    say(fmt::format("image {} on {} is damaged at byte {}", image, SimCluster::name(node), at));
  });
  if (image.empty()) return;
  if (chance(50)) {
    edit(some_node());
    if (!wait_settled(kToEnd))
      return broken("a change of layout with a damaged image does not settle");
  }
  cluster_.on(some_node(), [&](JobStore& store) {
    for (const CheckpointRef& checkpoint : store.find("job")->checkpoints()) {
      auto repaired = store.find("job")->repair(checkpoint->name());
      note_answer("repair of " + checkpoint->name(),
                  repaired.has_value() ? Result<>(ok()) : std::move(repaired).error());
    }
  });
  if (!wait_settled(kToEnd)) return broken("a damaged image is not made anew");
  if (was_full_) go_on_when_freed();
  check_end(false);
}

/// The one that leads stands still just before it writes something down, or hears and says nothing
/// in time; meanwhile others go on, some of them after its lease has ended.
void World::delay_the_leader() {
  if (chance(70)) in_background("edit", some_node(), [this](unsigned n) { edit(n); });
  const Time limit = now() + 2s;
  while (!leader() && now() < limit) sleep(2ms);
  if (!leader()) return;
  const unsigned node = *leader();
  const std::string name = SimCluster::name(node);
  Network& network = cluster_.network();
  if (network.is_frozen(node) || !cluster_.is_up(node)) return;
  const Time end = now() + std::chrono::milliseconds(draw(9000));
  switch (draw(4)) {
    case 0:
    case 1: {
      const unsigned calls = static_cast<unsigned>(1 + draw(12));
      const std::string what = fmt::format("{}, which leads, is stopped at write {}", name, calls);
      say(what);
      cluster_.at_write(node, calls, [this, node, name, &network] {
        say("stopped while it writes: " + name);
        network.set_frozen(node, true);
        yield();
      });
      until(end, what, [this, node, &network] {
        cluster_.at_write(node, 0, nullptr);
        network.set_frozen(node, false);
      });
      break;
    }
    case 2:
      if (chance(50)) {  // it still leads, as it believes, when another does; and is a member again
                         // before it decides
        say("the network is slow");
        for (unsigned i = 0; i < options_.nodes; ++i) network.set_slow(i, true);
        until(end + std::chrono::milliseconds(draw(5000)), "the network is slow", [this, &network] {
          for (unsigned i = 0; i < options_.nodes; ++i) network.set_slow(i, false);
        });
      }
      network.cut(network.store(), node);
      say("cut from the agreement store to " + name + ", which leads");
      until(end, "cut from the agreement store to " + name + ", which leads",
            [node, &network] { network.mend(network.store(), node); });
      break;
    default:
      network.set_slow(node, true);
      say(name + ", which leads, is slow");
      until(end, name + ", which leads, is slow",
            [node, &network] { network.set_slow(node, false); });
  }
  for (uint64_t more = 1 + draw(3); more > 0; --more) {
    if (chance(60)) sleep(std::chrono::milliseconds(draw(draw(2) == 0 ? 50 : 3000)));
    change_something(some_node());
  }
}

/// What one decides reaches the agreement store seconds later, and it hears as late of what others
/// decide; they go on.
void World::decide_behind_the_time() {
  MetaServer& agreement = cluster_.agreement();
  Network& network = cluster_.network();
  unsigned node = some_node();
  if (chance(50)) {
    change_something(some_node());
    const Time limit = now() + 2s;
    while (!leader() && now() < limit) sleep(2ms);
    node = leader().value_or(node);
  }
  if (!cluster_.is_up(node) || network.is_frozen(node)) return;
  const std::string what = SimCluster::name(node) + " decides behind the time";
  say(what);
  agreement.set_watch_lag(node, std::chrono::milliseconds(500 + draw(8000)));
  until(now() + std::chrono::milliseconds(5000 + draw(10'000)), what,
        [&agreement, node] { agreement.set_watch_lag(node, Time()); });
  for (uint64_t more = 3 + draw(5); more > 0; --more) {
    change_something(chance(40) ? node
                                : (node + 1 + static_cast<unsigned>(draw(options_.nodes - 1))) %
                                      options_.nodes);
    if (chance(80)) sleep(std::chrono::milliseconds(draw(draw(2) == 0 ? 300 : 2000)));
  }
}

/// Two others are killed, or stop, and come back one after the other.
void World::come_back_beside_a_slow_node() {
  Network& network = cluster_.network();
  const unsigned slow = some_node();
  const std::string what = SimCluster::name(slow) + " is slow, and others come back";
  say(what);
  network.set_slow(slow, true);
  until(now() + std::chrono::milliseconds(2000 + draw(10'000)), what,
        [slow, &network] { network.set_slow(slow, false); });
  for (unsigned i = 1; i <= 2; ++i) {
    const unsigned node = (slow + i) % options_.nodes;
    if (node == slow || !cluster_.is_wanted(node) || network.is_frozen(node)) continue;
    if (chance(50)) cluster_.kill(node, true);
    else cluster_.stop(node);
    until(now() + std::chrono::milliseconds(draw(8000)), SimCluster::name(node) + " is away",
          [this, node] { cluster_.start(node); });
  }
  change_something(slow);
}

/// All messages take a second or so, and many decide at the same time; one or another is started
/// anew meanwhile.
void World::crowd_a_slow_network() {
  Network& network = cluster_.network();
  const std::string what = "the network is slow";
  say(what);
  for (unsigned i = 0; i < options_.nodes; ++i) network.set_slow(i, true);
  until(now() + std::chrono::milliseconds(5000 + draw(20'000)), what, [this, &network] {
    for (unsigned i = 0; i < options_.nodes; ++i) network.set_slow(i, false);
  });
  for (uint64_t more = 2 + draw(4); more > 0; --more) {
    change_something(some_node());
    sleep(std::chrono::milliseconds(draw(2500)));
    const unsigned node = some_node();
    if (!chance(25) || !cluster_.is_wanted(node) || network.is_frozen(node)) continue;
    say("started anew, as if killed: " + SimCluster::name(node));
    cluster_.kill(node, true);
    cluster_.start(node);
  }
}

bool World::wait_calm_with_copies() {
  heal_all();
  const Time limit = now() + kToEnd;
  while (operating_ > 0 && now() < limit) wait_until(&operating_, now() + 1s);
  heal_all();  // what began meanwhile; whoever heals when it is due is here
  return operating_ == 0 && replicas_ > 0 && wait_settled(kToEnd) && all_have_copies();
}

void World::note_fault() {
  ++faults_;
  last_fault_ = now();
}

void World::fail() {
  note_fault();
  if (chance(5)) return lose_a_directory();
  Network& network = cluster_.network();
  const unsigned node = some_node();
  const std::string name = SimCluster::name(node);
  const Time end = now() + std::chrono::milliseconds(draw(15'000));
  auto begin = [&](const std::string& what, std::function<void()> heal) {
    say(what);
    until(end, what, std::move(heal));
  };
  auto cut = [&](const std::string& what, const std::vector<std::pair<unsigned, unsigned>>& ways) {
    for (const auto& [from, to] : ways) network.cut(from, to);
    begin(what, [&network, ways] {
      for (const auto& [from, to] : ways) network.mend(from, to);
    });
  };
  switch (draw(28)) {
    case 0:
    case 1:
      if (!cluster_.is_wanted(node)) return;
      cluster_.kill(node, true);
      return begin("kill " + name, [this, node] { cluster_.start(node); });
    case 2:
      if (!cluster_.is_wanted(node)) return;
      cluster_.stop(node);
      return begin("stop " + name, [this, node] { cluster_.start(node); });
    case 3: {
      const unsigned other =
          (node + 1 + static_cast<unsigned>(draw(options_.nodes - 1))) % options_.nodes;
      if (chance(50))
        return cut(fmt::format("cut from {} to {}", name, SimCluster::name(other)),
                   {{node, other}});
      return cut(fmt::format("cut between {} and {}", name, SimCluster::name(other)),
                 {{node, other}, {other, node}});
    }
    case 4: {
      std::vector<std::pair<unsigned, unsigned>> ways;
      std::string side;
      std::vector<bool> left(options_.nodes + 1);
      for (unsigned i = 0; i < options_.nodes; ++i)
        if ((left[i] = chance(40))) side += " " + SimCluster::name(i);
      for (unsigned a = 0; a <= options_.nodes; ++a)
        for (unsigned b = 0; b <= options_.nodes; ++b)
          if (left[a] != left[b]) ways.emplace_back(a, b);
      return cut("cut off:" + side, ways);
    }
    case 5: {
      const unsigned store = network.store();
      if (chance(30)) return cut("cut from " + name + " to the agreement store", {{node, store}});
      if (chance(40)) return cut("cut from the agreement store to " + name, {{store, node}});
      return cut("cut between " + name + " and the agreement store",
                 {{node, store}, {store, node}});
    }
    case 6: {
      std::vector<std::pair<unsigned, unsigned>> ways;
      for (unsigned i = 0; i < options_.nodes; ++i)
        for (const auto& way : {std::pair(i, network.store()), std::pair(network.store(), i)})
          ways.push_back(way);
      return cut("the agreement store is away", ways);
    }
    case 7:
      network.set_slow(node, true);
      return begin(name + " is slow", [&network, node] { network.set_slow(node, false); });
    case 8:
      if (!cluster_.is_up(node) || network.is_frozen(node)) return;
      network.set_frozen(node, true);
      return begin(name + " is stopped", [&network, node] { network.set_frozen(node, false); });
    case 9: {
      if (!cluster_.is_wanted(node)) return;
      const unsigned calls = static_cast<unsigned>(1 + draw(draw(2) == 0 ? 10 : 200));
      cluster_.at_write(node, calls, [this, node, name] {
        cluster_.kill(node, true);
        say("killed while it writes: " + name);
      });
      return begin(fmt::format("{} is killed at write {}", name, calls), [this, node] {
        cluster_.at_write(node, 0, nullptr);
        cluster_.start(node);
      });
    }
    case 10:
      was_full_ = true;
      cluster_.set_full(node, true);
      return begin("the store of " + name + " is full",
                   [this, node] { cluster_.set_full(node, false); });
    case 11:
      set_wall_offset(group_of(node), std::chrono::hours(chance(50) ? 72 : -72));
      return begin("the clock of " + name + " jumps",
                   [node] { set_wall_offset(group_of(node), Time()); });
    case 12:
      return damage_an_image();
    case 13:
    case 14:
    case 15:
    case 16:
      return delay_the_leader();
    case 17:
      return come_back_beside_a_slow_node();
    case 18:
    case 19:
      return crowd_a_slow_network();
    case 20:
    case 21:
    case 22:
    case 23:
      return decide_behind_the_time();
    case 24:
    case 25:
      return let_decisions_come_late();
    case 26:
      if (chance(50)) slow_down_disk(leader().value_or(node));
      return suspend(leader().value_or(node));
    default:
      network.set_breaks(static_cast<unsigned>(1 + draw(50)));
      return begin("connections break", [&network] { network.set_breaks(0); });
  }
}

}  // namespace ptc::sim
