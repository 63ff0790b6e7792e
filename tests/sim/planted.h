// Compares of decisions that can be taken out, each alone, to see that what it is there for is
// noticed without it; and the schedule in which that shows: which decisions there are many of, and
// what others do while these are held back.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tests/sim/transactions.h"

namespace ptc::sim {

struct Break {
  std::string_view name;  // the decision, and what it compares
  std::vector<Decision> decisions;
  enum class What {
    kKey,         // of the transaction
    kOtherNodes,  // those that made something for it: compares that commit_fenced() looks at before
    kOwnNode,     // this node as it was at the beginning: the same
    kDrained,     // that nodes which get something are not drained: the same
  };
  What what;
  bool (*takes)(const std::string& key);  // kKey
  // As letters of World::act().
  std::string_view before;      // so that there are such decisions
  std::string_view beside;      // while one is held back
  std::string_view early = "";  // a moment after one of these nodes began with what it will decide
};

const std::vector<Break>& planted_breaks();
/// Null: there is none of this name.
const Break* planted_break(std::string_view name);

/// Whether the break takes this compare of a transaction out, which does not hold. Null: none does.
bool takes_out(const Break* planted, Decision decision, const std::string& compared);

/// commit_fenced() looks at other nodes' keys by three reads of its thread: membership, nodes/ and
/// drained/. With a break of those, it sees there what it was told before.
void note_fence(const std::string& node,
                int64_t revision);  // the thread's decision will rest on it
void note_get(std::string_view key);
void look_away(const Break* planted, std::string_view prefix, const std::string& self,
               std::vector<MetaEntry>& listed);
/// False: it was seen so, but the decision is another than those of the break: it fails, as it does
/// without.
bool may_be_decided(const Break* planted, Decision decision);
/// False: nothing has come of a break so far. A run that ends so is the one in which nothing is
/// taken out.
bool a_break_has_mattered();

}  // namespace ptc::sim
