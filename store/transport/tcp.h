// The transport between nodes over TCP, with or without TLS.
#pragma once

#include <memory>

#include "store/rpc/peers.h"
#include "store/transport/transport.h"

namespace ptc {

/// Items whose image is here go to `local`; the others, whose targets are in the host's memory, are
/// asked of their nodes, all nodes at the same time, one request and one stream each, received into
/// the target memory where runs are long. A stream that breaks, stalls or brings damaged bytes goes
/// on over a new connection behind the last good chunk, a few times, then kUnavailable. The other
/// nodes' streams run to their end before an error is returned. `peers` outlives the transport.
std::unique_ptr<Transport> make_tcp_transport(Peers& peers, std::unique_ptr<Transport> local);

}  // namespace ptc
