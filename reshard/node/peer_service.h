// What a daemon answers to other nodes: cluster/peer_table.h, row by row.
#pragma once

#include "reshard/node/job_store.h"
#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"

namespace ptc {

/// From now on `server` answers all that is in the table, and no other node has to wait for more:
/// what it does not know it never will. `store` and `peers` outlive it.
void serve_peers(PeerServer& server, JobStore& store, Peers& peers);

}  // namespace ptc
