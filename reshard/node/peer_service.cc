#include "reshard/node/peer_service.h"

#include "reshard/cluster/peer_table.h"
#include "reshard/node/meeting.h"

namespace ptc {

void serve_peers(PeerServer& server, JobStore& store, Peers& peers) {
  for (const PeerRow& row : kPeerTable) {
    PeerServer::Handler handler = [&store, method = row.method](std::string_view request,
                                                                const std::string&) {
      return store.answer(method, request);
    };
    if (row.handler == PeerHandler::kMeetings) handler = answer_meetings(peers);
    server.handle(std::string(row.name), std::move(handler));
  }
  server.handles_all();
}

}  // namespace ptc
