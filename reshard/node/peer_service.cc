#include "reshard/node/peer_service.h"

#include "reshard/cluster/peer_table.h"
#include "reshard/node/meeting.h"

namespace ptc {

Result<std::string> answer_peer(JobStore& store, PeerCalls& calls, const PeerRow& row,
                                std::string_view request, const std::string& from) {
  if (row.handler == PeerHandler::kMeetings) return answer_meeting(calls, from, request);
  return store.answer(row.method, request);
}

void serve_peers(PeerServer& server, JobStore& store, PeerCalls& calls) {
  for (const PeerRow& row : kPeerTable)
    server.handle(
        std::string(row.name),
        [&store, &calls, &row](std::string_view request, const std::string& from) {
          return answer_peer(store, calls, row, request, from);
        },
        row.pace == PeerPace::kAtOnce ? PeerServer::Pace::kAtOnce : PeerServer::Pace::kMayWait);
  server.handles_all();
}

}  // namespace ptc
