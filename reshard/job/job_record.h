// What is agreed on of a job: the keys under jobs/<job>/ as one value, and decisions, which change
// it. Only here are these keys and their texts known.
//
//   jobs/<job>                         that it exists, and its id
//   jobs/<job>/layout                  LayoutEdit       layout.json as it was saved last
//   jobs/<job>/in_force                InForce          the layout that files have, and where
//                                      `current` points
//   jobs/<job>/sequence                LastSequence
//   jobs/<job>/rules                   rules.json
//   jobs/<job>/attributes              JobAttributes
//   jobs/<job>/specs/<name>            LayoutSpec       of which the name does not say all
//   jobs/<job>/checkpoints/<name>      CheckpointEntry
//   jobs/<job>/looked_over/<id>        LookedOver
//   jobs/<job>/dataset/…               dataset/run/data_set_state.h
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/checkpoint/known_damage.h"
#include "reshard/job/file_pieces.h"
#include "reshard/job/job_attributes.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// A value and the revision of its key in the metadata; 0: there is no such key.
template <class Value>
struct Agreed : Value {
  int64_t meta_revision = 0;
};

struct LayoutEdit {
  std::string text;
  Layout layout;         // what it says
  int64_t revision = 0;  // grows with each edit; saving the same text again puts the key again,
                         // with the same revision
};

struct InForce {
  LayoutSpec spec;
  int64_t revision = 0;                // LayoutEdit::revision
  std::optional<std::string> current;  // checkpoint
};

struct LastSequence {
  int64_t last = 0;  // that was given to a checkpoint, there or removed; each commit puts it
};

struct RulesText {
  std::optional<std::string> text;
};

struct AttributesInForce {
  std::shared_ptr<const JobAttributes> all = std::make_shared<const JobAttributes>();
};

struct CheckpointEntry {
  static constexpr size_t kNamedNodes = 16;
  std::string id;          // directory under checkpoints/
  int64_t sequence = 0;    // order of commits: each has its own
  int64_t generation = 0;  // of where its bytes lie
  std::string stored;      // file below it that says so: of one decision, and no other has the name
  bool pinned = false;
  int64_t mended =
      0;  // how often damaged bytes were mended where they lie: what was read before may be wrong
  /// In a cluster: on which its bytes lie, said where nothing else of it can be read. No more than
  /// kNamedNodes of them, and how many others: a decision does not grow with the nodes.
  std::vector<std::string> nodes = {};
  int64_t more_nodes = 0;
  /// By name, files that describe it, `stored` among them: no node takes another content for one.
  /// Not of those that an older ptcfs wrote.
  std::map<std::string, FileFacts, std::less<>> files = {};
  friend bool operator==(const CheckpointEntry&, const CheckpointEntry&) = default;
};

/// When a checkpoint was looked over last, and what was found.
struct LookedOver {
  int64_t time_ns = 0;
  std::vector<std::string> found = {}, mended = {};  // damaged still; and no more
  std::vector<std::string> away = {};                // nodes whose copies were not looked at
  int64_t more = 0;                                  // that are damaged still and not in `found`
  KnownDamage not_right = {};                        // is not read any more
  friend bool operator==(const LookedOver&, const LookedOver&) = default;

  std::string to_text() const;
  static std::optional<LookedOver> from_text(std::string_view text);
};

/// A value.
struct JobRecord {
  Agreed<LayoutEdit> saved;
  Agreed<InForce> in_force;
  Agreed<LastSequence> sequence;
  Agreed<AttributesInForce> attributes;
  std::optional<std::string> rules_text;
  std::map<std::string, LayoutSpec, std::less<>> custom_specs;              // by name
  std::map<std::string, Agreed<CheckpointEntry>, std::less<>> checkpoints;  // by name
  std::map<std::string, Agreed<LookedOver>> looked_over;  // by CheckpointEntry::id

  /// Errors: kNotFound: there is no such job; kCorrupt, with the key: not what a decision wrote;
  /// kUnavailable.
  static Result<JobRecord> read(MetaClient& meta, std::string_view job);
  static Result<Agreed<AttributesInForce>> read_attributes(MetaClient& meta, std::string_view job);
  static Result<Agreed<RulesText>> read_rules(MetaClient& meta, std::string_view job);
  /// One that cannot be understood has no time.
  static Result<Agreed<LookedOver>> read_looked_over(MetaClient& meta, std::string_view job,
                                                     std::string_view id);
};

/// The value of the key in_force, as somebody sees it who knows no more of the job.
Result<InForce> parse_in_force(std::string_view text);

/// A decision about a job: what it rests on, and what it changes. It comes to be when the
/// transaction is committed, and not where anything that it rests on is not what it was. By hand it
/// is written where there is no job yet; all else is read and decided by a JobUpdate.
class JobDecision {
 public:
  explicit JobDecision(std::string_view job) : job_(job) {}

  void rests_on(const Agreed<LayoutEdit>& edit);
  void rests_on(const Agreed<InForce>& in_force);
  void rests_on(const Agreed<LastSequence>& sequence);
  void rests_on(const Agreed<AttributesInForce>& attributes);
  void rests_on(const Agreed<RulesText>& rules);
  void rests_on(std::string_view checkpoint, const Agreed<CheckpointEntry>& entry);
  /// What was read of other keys, of nodes for one.
  void rests_on_key(std::string key, int64_t meta_revision);
  void rests_on_keys(const std::vector<MetaTransaction::Compare>& others);
  void rests_on_looked_over(std::string_view id, int64_t meta_revision);
  void rests_on_no_checkpoint(std::string_view name);  // of this name

  /// What somebody else compares and changes in the same transaction.
  void add(const MetaTransaction& other);

  /// The job itself, of which there is none yet.
  void create(std::string_view id, std::string_view time);
  void put(const LayoutEdit& edit);
  void put(const InForce& in_force);
  void put(const LastSequence& sequence);
  void put(const LayoutSpec& spec);  // nothing to do where its name says all
  void put(std::string_view checkpoint, const CheckpointEntry& entry);
  void put_looked_over(std::string_view id, const LookedOver& looked);
  void forget_looked_over(std::string_view id);
  void put_attributes(const JobAttributes& attributes);
  void put_rules(std::string_view text);
  void remove_rules();
  /// A tombstone says from then on that it was.
  void remove(std::string_view checkpoint, const CheckpointEntry& entry);

  /// kInternal: it writes a key of the job and does not rest on it, so that what another decided
  /// would be lost. Of rules.json the last that was saved stays; of a layout the name says which it
  /// is, and so does the id of a checkpoint, which is forgotten once that is no more.
  Result<> check() const;
  MetaTransaction transaction() && { return std::move(transaction_); }

 private:
  std::string key(std::string_view what) const;
  void put_text(std::string_view what, std::string text);

  const std::string job_;
  MetaTransaction transaction_;
};

}  // namespace ptc
