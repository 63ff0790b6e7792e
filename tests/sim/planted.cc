#include "tests/sim/planted.h"

#include <algorithm>

namespace ptc::sim {
namespace {

enum class Decision { kFlip, kCommit, kRemoval, kOther };

bool is_in_force(const std::string& key) { return key.ends_with("/in_force"); }
bool is_checkpoint(const std::string& key) { return key.find("/checkpoints/") != std::string::npos; }

Decision decision_of(const MetaTransaction& transaction) {
  if (std::any_of(transaction.deletes.begin(), transaction.deletes.end(), is_checkpoint)) return Decision::kRemoval;
  for (const auto& compare : transaction.compares)
    if (is_checkpoint(compare.key) && compare.revision == 0) return Decision::kCommit;
  // By a leader, as what goes on with older checkpoints; but that puts nothing in force.
  const bool leads = std::any_of(transaction.compares.begin(), transaction.compares.end(),
                                 [](const auto& compare) { return compare.key.starts_with("leaders/"); });
  const bool puts = std::any_of(transaction.puts.begin(), transaction.puts.end(),
                                [](const auto& put) { return is_in_force(put.first); });
  return leads && puts ? Decision::kFlip : Decision::kOther;
}

struct Break {
  const char* name;
  Decision decision;
  bool (*takes)(const std::string& key);
};
const Break kBreaks[] = {
    {"flip-leader", Decision::kFlip, [](const std::string& key) { return key.starts_with("leaders/"); }},
    {"flip-layout", Decision::kFlip, [](const std::string& key) { return key.ends_with("/layout"); }},
    {"flip-in-force", Decision::kFlip, is_in_force},
    {"flip-makers", Decision::kFlip, nullptr},  // commit_fenced() looks at them: fences_nobody()
    {"commit-in-force", Decision::kCommit, is_in_force},
    {"removal-in-force", Decision::kRemoval, is_in_force},
};

}  // namespace

const std::vector<std::string>& planted_breaks() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Break& one : kBreaks) all.emplace_back(one.name);
    return all;
  }();
  return names;
}

bool takes_out(const std::string& planted, const MetaTransaction& transaction, const std::string& compared) {
  return std::any_of(std::begin(kBreaks), std::end(kBreaks), [&](const Break& one) {
    return one.name == planted && one.takes != nullptr && decision_of(transaction) == one.decision && one.takes(compared);
  });
}

bool fences_nobody(const std::string& planted) { return planted == "flip-makers"; }

}  // namespace ptc::sim
