// What the metadata say of a data set, and how a decision about it is written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "dataset/plan/order_spec.h"
#include "dataset/plan/run_plan.h"
#include "dataset/run/data_set.h"
#include "store/base/user.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// A value. `next` differs from what was read by what is to be written.
struct DataSetState {
  std::optional<std::string> source, order;  // texts that were accepted
  /// Whose rights its shards are read with, and a number that no other saving of source.json has,
  /// also not of the same text after the data set was removed: by it all nodes know that the shards
  /// are to be looked at anew. nullopt: what saved it knew neither; the job's owner, then.
  struct Saved {
    uint64_t number = 0;
    User by;
    friend bool operator==(const Saved&, const Saved&) = default;
  };
  std::optional<Saved> saved;
  std::optional<RunPlan> plan;
  uint64_t consumed = 0;
  DataParallel dp;  // what the plan was last made for
  friend bool operator==(const DataSetState&, const DataSetState&) = default;

  std::optional<OrderSpec> order_spec() const;
  /// The later of what the plan knows and what this node sees.
  DataParallel dp_now(const DataParallel& seen) const {
    return dp.revision >= seen.revision ? dp : seen;
  }
};

class DataSetRecord {
 public:
  DataSetRecord(MetaClient& meta, std::string job,
                std::function<Result<int64_t>(MetaTransaction)> commit);

  /// Errors: kUnavailable; kCorrupt: not what write() wrote; kInvalidArgument: another version did.
  Result<DataSetState> read() const;
  /// Reads, lets `decide` change the state, and writes what it changed; again where somebody else
  /// was quicker. Nothing changed: nothing is written. kNotFound: the job is no more. Returns the
  /// new state. `commit`: for this one, also where nothing changed.
  using Commit = std::function<Result<int64_t>(MetaTransaction)>;
  Result<DataSetState> update(const std::function<Result<>(DataSetState&)>& decide,
                              const Commit& commit = {}) const;
  std::string prefix() const { return "jobs/" + job_ + "/dataset/"; }

 private:
  struct Read;
  Result<Read> read_all() const;

  MetaClient& meta_;
  const std::string job_;
  const std::function<Result<int64_t>(MetaTransaction)> commit_;
};

}  // namespace ptc
