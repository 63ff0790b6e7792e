// What a transaction decides, as far as its keys and values tell.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "store/meta/meta_client.h"

namespace ptc::sim {

enum class Decision {
  kNone,  // another, or none
  kLead,  // a node leads a job; and does no more
  kEndLead,
  kFlip,   // what is in force, by a leader
  kOlder,  // where the bytes of a checkpoint beside the newest lie, by a leader
  kTrim,   // that copies beyond those that are wanted go, by a leader
  kCommit,
  kRemoval,  // of a checkpoint
  kPin,
  kReplaced,  // images of a checkpoint that are missing, back, or taken out
  kMended,    // bytes where they lie
  kLayout,    // is wanted, or wanted again
  kAttributes,
  kRules,
  kDataSet,
  kMakeJob,
  kRemoveJob,
  kDrain,
  kEndDrain,
};

std::string_view name_of(Decision decision);
/// kNone: there is none of this name.
Decision decision_named(std::string_view name);

/// `value_at`: what a key of a checkpoint had as its value at a revision; empty: it was not there.
using ValueAt = std::function<std::string(const std::string& key, int64_t revision)>;
Decision decision_of(const MetaTransaction& transaction, const ValueAt& value_at);

inline bool is_checkpoint_key(std::string_view key) {
  return key.starts_with("jobs/") && key.find("/checkpoints/") != key.npos;
}
inline bool is_job_key(std::string_view key) {
  return key.starts_with("jobs/") && key.find('/', 5) == key.npos;
}

}  // namespace ptc::sim
