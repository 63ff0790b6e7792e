// What a store has seen agreed: a copy of the keys, each with its revision, that outlives the
// agreement store. With it a node knows at start whether that was set back, or is another; and what
// was agreed can be made anew (recover.h).
//
// <store>/agreed.jsonl, one line a change, the last of a key counts; written anew when most of it
// is of no use:
//   {"key": "jobs/llama", "value": "…", "revision": 12}   ·   {"key": "jobs/old"}: gone
//   {"seen": 31, "jobs": 12}    all up to these revisions, of everything and under "jobs/", is in
//                               the lines above
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// Of one transaction of several, of facts that are written anew.
inline constexpr size_t kStepKeys = 64, kStepBytes = size_t{1} << 20;

/// Keys of the jobs, of what was removed, of nodes that are drained, and of stores.
constexpr std::string_view kAgreedPrefixes[] = {"drained/", "jobs/", "removed/", "stores/"};

/// The tombstone of what an entry below jobs/ names, a job or a checkpoint; "": it names neither.
std::string key_of_removal(const MetaEntry& entry);

/// Threads: one at a time.
class AgreedFacts {
 public:
  /// Without a file: knows nothing. A line that a crash cut off is left out. `read_only`: somebody
  /// else may write it.
  static Result<AgreedFacts> open(const std::string& path, bool read_only = false);

  const std::map<std::string, MetaEntry, std::less<>>& entries() const { return entries_; }
  /// Of the agreement store, when it was looked at last.
  int64_t seen() const { return seen_; }
  /// The same of all that begins with "jobs/".
  int64_t jobs_seen() const { return jobs_revision_; }
  /// How many keys begin with that.
  size_t jobs_keys() const { return jobs_keys_; }

  /// kUnavailable, unless `jobs` (all that begins with "jobs/") can have come of what is known:
  /// nothing of it is older, nothing that is as old was not there, and what is gone of jobs and
  /// checkpoints is among `removed`. That last only with `all_removals`: a store that was away for
  /// too long is not told of all.
  Result<> check(const std::vector<MetaEntry>& jobs, const std::vector<MetaEntry>& removed,
                 bool all_removals) const;

  /// What of the above concerns keys that are there: some of those that begin with "jobs/".
  Result<> check_each(const std::vector<MetaEntry>& jobs) const;

  /// What has changed of those that begin with "jobs/": these were put, these have gone.
  void take_changes(const std::vector<MetaEntry>& puts, const std::vector<std::string>& gone);
  /// All that begins with `prefix`, as of now.
  void take(std::string_view prefix, const std::vector<MetaEntry>& entries);
  /// A key that was put.
  void note(MetaEntry entry);
  void set_seen(int64_t revision);  // after the above
  /// Forgets all: what comes next is of another history.
  void clear();
  /// Durable when it returns.
  Result<> write();

 private:
  std::string seen_line() const;
  void put(const MetaEntry& entry);
  void drop(const std::string& key);
  Result<> write_anew();

  std::string path_;
  std::map<std::string, MetaEntry, std::less<>> entries_;
  int64_t seen_ = 0, jobs_revision_ = 0;  // the latest under "jobs/", when all of it was known
  size_t jobs_keys_ = 0;
  std::string changes_;  // lines to be written
  uint64_t file_bytes_ = 0, live_bytes_ = 0;
};

}  // namespace ptc
