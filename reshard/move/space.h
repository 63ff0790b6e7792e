// Whether the nodes of a cluster have room for what a decision would bring them, before it is made.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "reshard/cluster/cluster.h"
#include "reshard/move/change.h"
#include "store/base/error.h"
#include "store/image/image_store.h"

namespace ptc {

/// What a plan writes on each node, added to `bytes`.
void add_bytes(const ChangePlan& change, const StoredState& stored,
               std::map<std::string, uint64_t>& bytes);

/// Asks all nodes at the same time (PeerMethod::kSpace: {"free": <bytes>}). kNoSpace says which
/// node lacks how much, and what to do. kUnavailable: none lacks any, but one does not answer.
Result<> check_space(Cluster& cluster, ImageStore& own,
                     const std::map<std::string, uint64_t>& needed);

}  // namespace ptc
