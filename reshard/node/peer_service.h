// What a daemon answers to other nodes: cluster/peer_table.h, row by row.
#pragma once

#include "reshard/cluster/peer_calls.h"
#include "reshard/node/job_store.h"
#include "store/rpc/peer_server.h"

namespace ptc {

/// As one node answers another, however it was asked.
Result<std::string> answer_peer(JobStore& store, PeerCalls& calls, const PeerRow& row,
                                std::string_view request, const std::string& from);

/// From now on `server` answers all that is in the table, and no other node has to wait for more:
/// what it does not know it never will. `store` and `calls` outlive it.
void serve_peers(PeerServer& server, JobStore& store, PeerCalls& calls);

}  // namespace ptc
