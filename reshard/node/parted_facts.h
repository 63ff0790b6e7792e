// Two stores of one history have seen the same decisions, the one of them perhaps more. Unless the
// agreement store was set back and went on, with nodes that had not seen what was lost: then there
// are other decisions of the same revisions, and neither store knows all.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "reshard/node/agreed_facts.h"

namespace ptc {

/// The first revision, as far as can be told, of which two stores of one history have seen
/// different things: of a job or a checkpoint only the one knows, though the other has seen later
/// ones and no tombstone, or a key has two values. 0: there is none.
int64_t parted_at(const AgreedFacts& one, const AgreedFacts& other);

/// Of another history: its revisions say nothing.
inline constexpr int64_t kNoneShared = std::numeric_limits<int64_t>::max();

/// What `known` has and `chosen` has not, in words ("job llama with 2 checkpoints"), by job. What
/// `known` has of revisions from `since` on `chosen` has not seen.
std::vector<std::string> left_out(const AgreedFacts& known, const AgreedFacts& chosen,
                                  int64_t since);

}  // namespace ptc
