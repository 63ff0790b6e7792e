// One job's data set: where its samples are, in which order they are read, how far the job has
// come, and the generations that follow from that.
//
// What is agreed on lies in the metadata, under jobs/<job>/dataset/:
//   source, order   the texts of source.json and order.json
//   plan            RunPlan::to_text(), once the index is known
//   consumed        the count
//   saved           by whom source.json was saved, and a number of that: by it, too, all nodes
//                   index anew
//   dp              how many data-parallel ranks the plan was last made for, and by which layout
// A decision is one transaction that compares all of these. Each node has an index of its own,
// beside its metadata; as all see the same shards, all come to the same plan, and who is first
// writes it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/plan/generation.h"
#include "dataset/source/sample_source.h"
#include "store/base/error.h"
#include "store/base/step_pool.h"
#include "store/base/user.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// How many data-parallel ranks there are, as of which layout: of two the one with the later
/// revision holds.
struct DataParallel {
  uint64_t ranks = 1;
  int64_t revision = 0;
  friend bool operator==(const DataParallel&, const DataParallel&) = default;
};

struct DataSetOptions {
  std::string job;
  MetaClient* meta = nullptr;  // outlives it
  std::string directory;       // exists; for the index
  StepPool* pool = nullptr;    // on whose threads the metadata is followed; outlives it
  /// Directories below which all shards must lie; none: anywhere.
  std::vector<std::string> data_roots;
  /// The job's owner: whose rights count where the metadata do not say who saved source.json. Left
  /// out: this process's.
  std::function<User()> owner;
  DataParallel dp;
  /// A key of the metadata that says dp from now on, and what its value says (nullopt: nothing).
  std::string dp_key;
  std::function<std::optional<DataParallel>(std::string_view)> dp_of;
  /// Whether this node may decide anything now; asked first, and answers at once. Left out: always.
  std::function<Result<>()> may_decide;
  /// Decisions are committed so; left out: by `meta`.
  std::function<Result<int64_t>(MetaTransaction)> commit;
  /// Whether a checkpoint of the job was committed with this count in a file `consumed`.
  std::function<bool(uint64_t)> checkpoint_has;
  /// Something that is shown has changed: generations, texts. On any thread, without a lock.
  std::function<void()> changed;
  /// A decision that a call here made is durable; before that call returns. On its thread, without
  /// a lock.
  std::function<void()> decided;
};

/// All that status_json() says as `state`.
inline constexpr std::string_view kDataSetStates[] = {"no source.json", "indexing", "refused",
                                                      "no order.json",  "waiting",  "ready"};

/// What a data set says about itself in numbers, for metrics.
struct DataSetNumbers {
  std::string_view state;    // one of kDataSetStates
  uint64_t read_errors = 0;  // that status_json() shows
  uint64_t consumed = 0;     // positions
  struct OfRun {
    uint64_t samples = 0;  // of an epoch
    uint64_t end = 0;      // a position
    uint64_t batch = 0, dp = 0, generation = 0;
    uint64_t dp_changes = 0;  // how many of its segments have another dp than the one before
  };
  std::optional<OfRun> run;
};

/// What lies under gen/<number>/. Immutable: who holds it reads the same whatever becomes of the
/// run.
struct ShownGeneration {
  uint64_t number;
  Generation cuts;
  SampleSourceRef source;
};
using ShownGenerationRef = std::shared_ptr<const ShownGeneration>;

/// Threads: any. Calls that change something return when it is durable. Refusals are
/// kInvalidArgument, and status_json() says them too, until something is accepted.
class DataSet {
 public:
  /// Reads in the background; until it has, nothing is there (loaded()).
  static std::unique_ptr<DataSet> open(DataSetOptions options);
  ~DataSet();

  /// Waits until what the metadata say has been read once. kUnavailable: it could not be within a
  /// few seconds.
  Result<> loaded() const;
  bool is_loaded() const;

  std::optional<std::string> source_text() const;
  std::optional<std::string> order_text() const;
  /// From now on shards are read as `by` may. They are indexed in the background, unless the index
  /// of before is still true. Shards with other samples than those of a run of which some are
  /// consumed are refused then (status_json()). kPermissionDenied: `by` may not read what it names.
  /// What the shards' file system has not answered in two seconds, the index says. kConflict: it
  /// has not answered within `wait`, which is less: the same save again goes on with that.
  /// `commit`: its decision is committed so, and not as options say; also where nothing changes.
  using Commit = std::function<Result<int64_t>(MetaTransaction)>;
  Result<> save_source(const std::string& text, const User& by,
                       std::chrono::milliseconds wait = kCheckingTakes, const Commit& commit = {});
  static constexpr std::chrono::seconds kCheckingTakes{2};
  /// Takes effect at `consumed`, as RunPlan::change() says.
  Result<> save_order(const std::string& text, const Commit& commit = {});
  /// What rests on source.json, order.json or consumed being this text: `commit` decides it, and
  /// is asked again where something else has changed. kConflict: it is another.
  Result<> decide_beside(std::string_view file, const std::string& text,
                         const Commit& commit) const;
  /// Refused once anything is consumed.
  Result<> remove_source();
  Result<> remove_order();
  /// Forgets the whole run, order and source: the next one begins at 0.
  Result<> remove();

  std::string consumed_text() const;  // "1024\n"
  /// A count of positions, in decimal digits. More than before: noted. Less: the run goes back
  /// there, if a checkpoint says so too (checkpoint_has).
  Result<> save_consumed(std::string_view text, const Commit& commit = {});

  /// Another layout is in force. What that changes is decided in the background.
  void set_dp(DataParallel dp);
  /// Whether a layout of so many data-parallel ranks can come into force now, by what all nodes
  /// agree on. Where it cannot when it does, the change waits, status_json() says for what, and the
  /// next `consumed` or order.json decides.
  Result<> check_dp(uint64_t ranks) const;

  /// Returns when what any node had decided is seen here, or after a second.
  void catch_up();

  /// Of the run, by number; the last one is what `head` names. Empty until source and order are
  /// there and indexed.
  std::vector<uint64_t> generations() const;
  ShownGenerationRef generation(uint64_t number) const;

  std::string plan_json() const;  // "{}\n" without a run
  std::string status_json() const;
  /// nullopt: the job has none, neither source.json nor order.json.
  std::optional<DataSetNumbers> numbers() const;

  /// Where it says why source.json, order.json or consumed was refused: says `why` instead.
  void conceal_refused(std::string_view file, const std::string& why);
  /// An error of reading a shard: the last few of ten minutes are in status_json(), until
  /// source.json is saved again.
  void note_read_error(const Error& error);
  /// Until nothing is indexed or to be decided; for tests.
  void wait_settled() const;
  /// The same after the start, no longer than `most`: what an earlier process has shown is there.
  void wait_shown(std::chrono::milliseconds most) const;

 private:
  struct Impl;
  explicit DataSet(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// The count that a file `consumed` holds. kInvalidArgument.
Result<uint64_t> parse_consumed(std::string_view text);

/// "000003"
std::string generation_name(uint64_t number);

}  // namespace ptc
