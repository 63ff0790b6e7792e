// The inside of a DataSet, shared by data_set.cc and data_set_status.cc.
//
// `changes` is held while a decision is made, written, and taken over; `mutex` only to look at or
// change what is in memory. Lock order: changes, mutex. A loop follows the metadata; a thread of
// its own indexes.
#pragma once

#include <chrono>
#include <deque>
#include <future>
#include <map>
#include <stop_token>

#include "dataset/run/data_set.h"
#include "dataset/run/data_set_state.h"
#include "store/base/mutex.h"

namespace ptc {

struct DataSet::Impl {
  explicit Impl(DataSetOptions given)
      : options(std::move(given)),
        record(*options.meta, options.job, options.commit),
        seen(options.dp) {}
  ~Impl();

  void start(StepPool& pool);
  /// Writes a decision and takes it over; says in status.json why it was refused.
  Result<> decide(const std::function<Result<>(DataSetState&)>& change, const Commit& commit = {});
  /// Brings the plan to what order, source and dp say.
  Result<> bring_up_to_date(DataSetState& state) const PTC_REQUIRES(changes);
  void take_over(const DataSetState& now) PTC_REQUIRES(changes);
  void want_look() PTC_EXCLUDES(mutex);
  std::optional<StepPool::Time> follow();
  Result<> watch_metadata();
  Result<> look_at_layout();
  Result<> look();
  SourceAccessRef access_for(const std::optional<DataSetState::Saved>& saved) const;
  void set_refused(std::string what);
  std::string why_nothing_is_shown() const PTC_REQUIRES(mutex);
  /// One of kDataSetStates; and what is wrong, or was with what was refused last.
  std::string_view state_now(std::string* error) const PTC_REQUIRES(mutex);
  std::vector<std::string_view> read_errors_now() const PTC_REQUIRES(mutex);

  const DataSetOptions options;
  const DataSetRecord record;
  Mutex changes;

  mutable Mutex mutex;
  mutable StoppableConditionVariable changed;
  DataParallel seen PTC_GUARDED_BY(mutex);   // the layout in force here
  DataSetState state PTC_GUARDED_BY(mutex);  // as last read
  std::map<uint64_t, ShownGenerationRef> shown PTC_GUARDED_BY(mutex);
  SampleSourceRef source PTC_GUARDED_BY(mutex);  // of indexed_text
  std::optional<std::string> indexed_text
      PTC_GUARDED_BY(mutex);  // what is, or was last, indexed; as it was saved then:
  std::optional<DataSetState::Saved> indexed_saved PTC_GUARDED_BY(mutex);
  bool indexing PTC_GUARDED_BY(mutex) = false;
  std::shared_ptr<IndexProgress> progress PTC_GUARDED_BY(mutex);
  std::string index_error PTC_GUARDED_BY(mutex);  // why indexed_text has no source
  std::string refused PTC_GUARDED_BY(mutex);      // what was not accepted last
  std::string pending PTC_GUARDED_BY(mutex);      // why the plan is not what it should be
  struct ReadError {
    std::string what;
    std::chrono::steady_clock::time_point last;
  };
  std::deque<ReadError> read_errors PTC_GUARDED_BY(mutex);
  bool look_wanted PTC_GUARDED_BY(mutex) = true, looking PTC_GUARDED_BY(mutex) = false;
  bool loaded PTC_GUARDED_BY(mutex) = false;
  uint64_t looks_begun PTC_GUARDED_BY(mutex) = 0, looks_done PTC_GUARDED_BY(mutex) = 0;

  /// How what a save of source.json names is looked at, by a thread that may hang.
  struct Check {
    std::string text;
    User by;
    std::stop_source stop;
    std::shared_future<Result<>> answer;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  };
  std::shared_ptr<const Check> checking PTC_GUARDED_BY(mutex);  // of the newest save

  /// What a thread that indexes has of this object: nothing any more once another one does, or the
  /// data set is gone. A source that does not answer holds up that thread alone.
  struct Indexer {
    Mutex mutex;
    ConditionVariable ended_changed;
    Impl* of PTC_GUARDED_BY(mutex) = nullptr;
    bool ended PTC_GUARDED_BY(mutex) = false;
    std::stop_source stop;
  };
  Result<> begin_indexing(const DataSetState& now, std::shared_ptr<IndexProgress> into);
  void end_indexing();
  /// That of the same save, if it goes on; else a new one, and the former ends.
  Result<std::shared_ptr<const Check>> check_of(const SourceSpec& spec, const std::string& text,
                                                const User& by);
  /// What it has found; kConflict: nothing yet.
  Result<> result_of(const Check& check, std::chrono::milliseconds wait);
  /// All; or `only` that, if it is still the newest.
  void end_checking(const Check* only = nullptr);  // takes mutex

  std::shared_ptr<void> watch, dp_watch;  // follower's
  std::shared_ptr<Indexer> indexer;       // follower's
  Loop follower;                          // last: it uses all of the above
};

}  // namespace ptc
