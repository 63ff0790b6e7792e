#include "reshard/cluster/peer_calls.h"

#include "store/base/fan_out.h"

namespace ptc {

std::vector<Result<std::string>> PeerCalls::call_all(
    const std::vector<Cluster::Question>& questions, const PeerRow& row,
    std::chrono::milliseconds time, std::stop_token stop) {
  return Answers<std::string>(
             questions.size(),
             [&](size_t i) {
               return call(questions[i].node, row, std::string(questions[i].request), time, stop);
             },
             row.method == PeerMethod::kPart ? kAllAtOnce : kAtWorkAtOnce)
      .wait();
}

}  // namespace ptc
