// Compares of decisions that can be taken out, each alone, to see that what it is there for is noticed without it.
#pragma once

#include <string>
#include <vector>

#include "store/meta/meta_client.h"

namespace ptc::sim {

/// "flip-leader", "commit-in-force", …
const std::vector<std::string>& planted_breaks();
/// Whether the break takes this compare of this transaction out.
bool takes_out(const std::string& planted, const MetaTransaction& transaction, const std::string& compared);
/// Whether with the break no decision rests on what became of the nodes that made parts for it.
bool fences_nobody(const std::string& planted);

}  // namespace ptc::sim
