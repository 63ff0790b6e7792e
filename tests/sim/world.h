// One seed: a cluster, a job, what users do on random nodes, and what fails meanwhile; and what
// must hold of it.
//
// What is known to be true is kept beside it: which checkpoints were tried, acknowledged, removed,
// and which layouts were asked for. An answer of a node that died meanwhile counts as no answer.
#pragma once

#include <boost/json/object.hpp>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/sim_cluster.h"
#include "tests/support/job_fixture.h"

namespace ptc::sim {

struct WorldOptions {
  uint64_t seed = 0;
  unsigned nodes = 4;
  unsigned tensors = 40;
  unsigned steps =
      25;  // operations and faults; of a large cluster (is_large) at most those of its history
  std::filesystem::path directory;
  bool verbose = false;  // what happens, as it happens
  std::string without;   // a compare of decisions that is taken out, by its name in planted.h: it
                         // must be noticed
  std::string focus;     // the same decisions are held back, and others do the same meanwhile; but
                         // nothing is taken out
};

/// The history is a short one, and some reads stand for all.
inline bool is_large(const WorldOptions& options) { return options.nodes > 16; }

struct Outcome {
  std::vector<std::string> broken;   // guarantees, in words; none: all hold
  std::vector<std::string> history;  // operations and faults, with their times
  RunResult run;
  std::string directory;  // is not told: it is another in each run
  bool verbose = false;
};
/// Adds to the history, and tells it when that is wanted.
void note(Outcome& outcome, const std::string& text);
/// The history, unless it was told already, and what is broken.
void report(const Outcome& outcome);

/// Runs the seed. Threads: one at a time in a process. Ends the process on a deadlock, with what
/// was known by then.
Outcome run_world(const WorldOptions& options);

/// nullopt: the safetensors file holds these parts, and no others.
std::optional<std::string> difference(const std::string& content,
                                      const std::map<std::string, testing::SlowPart>& parts);

class World {
 public:
  explicit World(const WorldOptions& options, Outcome& outcome);
  void run();

 private:
  struct Known {
    testing::Sample sample;
    bool acknowledged = false, removing = false, removed = false;
    bool may_be_lost = false;  // its last copies
    unsigned tries = 0;        // commits, all of the same bytes
    std::map<std::pair<std::string, uint64_t>, testing::RankParts> ranks =
        {};  // by layout and rank: the oracle's answers
  };
  using Op = std::function<void(unsigned node)>;

  void say(const std::string& text);
  void broken(const std::string& what);
  uint64_t draw(uint64_t below) { return random_() % below; }
  bool chance(unsigned of_100) { return draw(100) < of_100; }
  unsigned some_node() { return static_cast<unsigned>(draw(options_.nodes)); }

  // operations.cc: each runs in a thread of its own
  void operate();
  void operate_or_fail(unsigned step);
  /// The operation or fault that a letter stands for.
  void act(char what, unsigned node);
  void in_background(const std::string& what, unsigned node, const Op& op);
  /// What a call on a node's store said; nullopt: the node was not there, or died meanwhile.
  std::optional<Result<>> ask(unsigned node, const std::function<Result<>(JobStore&)>& what);
  void note_answer(const std::string& what, const std::optional<Result<>>& answer);
  std::string random_layout();
  enum class Write {
    kAny,
    kInForce,
    kSameName
  };  // in any layout; in the one in force; as another that is under way
  void write_and_commit(unsigned node, Write how = Write::kAny);
  void write_and_commit_elsewhere(unsigned node);
  void edit(unsigned node);
  void edit_replicas(unsigned node);
  void edit(unsigned node, const std::string& text);
  void remove(unsigned node);
  void drain(unsigned node, bool cancel);
  void make_and_remove_job(unsigned node);
  void change_something(unsigned node);
  void pin(unsigned node);
  void repair(unsigned node);
  void change_attributes(unsigned node, const std::string& job);
  void change_data_set(unsigned node, const std::string& job);
  void save_rules(unsigned node, const std::string& job);
  void remove_job(unsigned node, const std::string& name);
  void read_something(unsigned node);
  void read_late(unsigned node);

  // names.cc
  void use_names_again();
  void hear_late(unsigned node);
  bool write_again(unsigned node);
  void commit_again(unsigned node);
  void remove_again(unsigned node);
  std::optional<size_t> read_again(unsigned node, bool must_read);
  void check_again();

  // faults.cc
  void fail();
  void note_fault();
  void until(Time end, const std::string& what, std::function<void()> heal);
  void heal_what_is_due();
  bool is_calm() const;  // nothing fails, nor did a moment ago
  void heal_all();
  bool wait_calm_with_copies();
  void delay_the_leader();
  void decide_behind_the_time();
  void come_back_beside_a_slow_node();
  void crowd_a_slow_network();
  void lose_a_directory();
  void damage_an_image();

  // held_back.cc
  Time hold_back(unsigned node, Decision decision);
  void interfere(unsigned node, Time within, std::string_view with);
  void note_begin(unsigned node, Decision decision);  // of what leads to it
  void suspend(unsigned node);
  void slow_down_disk(unsigned node);
  void let_decisions_come_late();
  unsigned another_node(unsigned node) {
    return (node + 1 + static_cast<unsigned>(draw(options_.nodes - 1))) % options_.nodes;
  }

  // decisions.cc
  void look_at_decision(const MetaEvent& event, const std::optional<MetaEntry>& before,
                        std::optional<unsigned> by);
  std::optional<std::string> wrong_checkpoint(const MetaEvent& event,
                                              const std::optional<MetaEntry>& before);
  std::optional<std::string> wrong_placement(const MetaEvent& event, bool is_new);
  std::optional<std::string> wrong_trim(const MetaEvent& event, const MetaEntry& before);
  std::optional<boost::json::object> state_in(const std::string& id,
                                              const std::string& stored) const;
  std::map<std::string, std::string> images_in(const std::string& id,
                                               const std::string& stored) const;
  std::optional<unsigned> leader() const;

  // checks.cc
  void look_at(unsigned node);
  bool wait_settled(Time limit);
  bool all_settled(std::string* why);
  bool all_have_copies();
  /// `must_read` is asked when the files are open, before they are read.
  void check_rank(const Checkpoint& checkpoint, const LayoutSpec& spec, uint64_t rank,
                  const std::string& where, const std::function<bool()>& must_read);
  void check_rank(const Checkpoint& checkpoint, const LayoutSpec& spec, uint64_t rank,
                  const std::string& where, bool must_read) {
    check_rank(checkpoint, spec, rank, where, [must_read] { return must_read; });
  }
  void check_end(bool started_anew);
  void start_all_anew();
  void check_files(unsigned node, JobStore& store, bool started_anew);
  void check_other_files(const Checkpoint& checkpoint, const std::string& where);
  const testing::RankParts& parts_of(Known& known, const LayoutSpec& spec, uint64_t rank);
  void check_copies(const Job& job);
  std::optional<std::string> wrong_copies(const Checkpoint& checkpoint, const Layout& layout,
                                          bool is_newest) const;
  void check_least_movement();
  void go_on_when_freed();

  const WorldOptions options_;
  Outcome& outcome_;
  std::mt19937_64 random_;
  testing::Sample model_;  // of which every checkpoint has bytes of its own
  SimCluster cluster_;
  std::map<std::string, Known> checkpoints_;
  /// Of a job and a checkpoint whose names are used again and again.
  struct Again {
    std::vector<testing::Sample> times;     // what was written, each time
    std::map<std::string, size_t> time_of;  // by checkpoint id, as read
    std::optional<size_t> shown;            // committed, for sure, and nobody has removed it
    bool gone = false;                      // removed, for sure, and nothing can come any more
    bool in_doubt = false;                  // something committed may still come
    bool busy = false;
  } again_;
  std::map<std::string, LayoutSpec> layouts_;  // asked for, by name
  std::set<std::string> left_over_;  // images of no checkpoint, before all nodes were started anew
  std::map<std::string, std::map<std::string, std::string>>
      images_of_;                      // by checkpoint id, as last decided on: image → node
  std::set<std::string> removed_ids_;  // of checkpoints
  const Break* focus_ = nullptr;
  std::set<Decision> late_;  // these are held back
  unsigned held_ = 0, slept_ = 0;
  bool alone_ = false;  // a fault wants that nobody else is at work
  bool over_ = false;   // operations and faults are
  unsigned last_attribute_ = 0;
  unsigned last_checkpoint_ = 0;
  bool lost_a_directory_ = false, was_full_ = false;
  unsigned operating_ = 0;
  uint64_t faults_ = 0;
  Time last_fault_{};  // when it came, or went
  uint32_t replicas_ =
      0;  // as the last edit that was accepted, or may have been, asks for; the least of those
  std::multimap<Time, std::pair<std::string, std::function<void()>>> to_heal_;
};

}  // namespace ptc::sim
