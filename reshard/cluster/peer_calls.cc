#include "reshard/cluster/peer_calls.h"

namespace ptc {

std::vector<Result<std::string>> PeerCalls::call_all(
    const std::vector<Cluster::Question>& questions, const PeerRow& row, AskTime time,
    std::stop_token stop) {
  return ask_each(row, questions.size(), time, stop, [&](size_t i, std::chrono::milliseconds left) {
    return call(questions[i].node, row, std::string(questions[i].request), left, stop);
  });
}

}  // namespace ptc
