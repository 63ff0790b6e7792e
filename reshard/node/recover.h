// What was agreed, made anew of what stores have seen of it (agreed_facts.h), where the agreement
// store lost its data or has those of a backup. No daemon of the cluster runs meanwhile.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "reshard/node/agreed_facts.h"
#include "reshard/node/store_identity.h"

namespace ptc {

struct SeenStore {
  std::string directory;
  StoreIdentity identity;
  AgreedFacts facts;
};
/// kNotFound: the directory is not there, is no store of a cluster, or has seen nothing yet.
Result<SeenStore> look_at_store(const std::string& directory);

struct RecoverReport {
  size_t newest = 0;  // of the stores that were given: the one that has seen most
  size_t chosen = 0;  // … of which everything is made
  /// Stores have seen different things from this revision on (parted_facts.h): none of them knows
  /// all, and somebody has to choose. 0: they have not.
  int64_t parted = 0;
  struct LeftOut {
    std::string what;
    std::vector<std::string> nodes;  // whose stores know of it
    friend bool operator==(const LeftOut&, const LeftOut&) = default;
  };
  /// By store: what is named no more if everything is made of that one. Empty also where it cannot
  /// be chosen.
  std::vector<std::vector<LeftOut>> left_out;
  std::vector<bool> can_be_chosen;  // by store: it is of the latest history
  std::vector<std::string> gone;    // what is agreed there now, in the same words, and goes
  struct Checkpoint {
    std::string job, name;
    uint64_t bytes = 0;             // that the stores have
    size_t files = 0, missing = 0;  // that lie in these stores, and that should
    std::vector<std::pair<std::string, size_t>>
        elsewhere;       // by node: files that nobody has looked at
    bool known = false;  // where its bytes lie
  };
  std::vector<std::string> jobs;
  std::vector<Checkpoint> checkpoints;
  std::vector<RegisteredStore> others;  // stores of the cluster that were not given
  std::vector<std::string> changes;     // what is agreed otherwise there, or not at all: keys
  std::vector<std::string> alive;       // nodes that count as there: recovering is refused
};
/// `from`: the node whose store is chosen; empty: the newest is. kInvalidArgument: stores of
/// different clusters, or none of this node, or one that cannot be chosen; kAlreadyExists: another
/// cluster with jobs is there.
Result<RecoverReport> look_at_all(const std::vector<SeenStore>& stores, MetaClient& meta,
                                  const std::string& from = {});

/// Of what the chosen of them has seen; how often each store was started, of all.
/// In steps, that may be done again after a crash; until the last no store belongs to the cluster.
Result<> recover(const std::vector<SeenStore>& stores, size_t chosen, MetaClient& meta);

}  // namespace ptc
