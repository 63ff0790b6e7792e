#include "reshard/cluster/peer_calls.h"

#include "reshard/cluster/peer_table.h"
#include "store/base/fan_out.h"

namespace ptc {

Result<> check_came_back(const std::string& node, Result<std::string> answer) {
  if (answer) return ok();
  return std::move(answer).error().with_context(fmt::format("node {} cannot come back", node));
}

std::vector<Result<>> PeerCalls::meet_all(const std::vector<Place>& others,
                                          const std::string& own_address) {
  const PeerRow& row = row_of(PeerMethod::kMeet);
  const auto both_ways = [&](size_t i) -> Result<> {
    const Place& other = others[i];
    PTC_TRY(meet(other.node, other.address));
    return check_came_back(
        other.node, ask_by(row, own_address.size(), {}, {}, [&](std::chrono::milliseconds time) {
          return call(other.node, row, own_address, time, {});
        }));
  };
  return Answers<void>(others.size(), both_ways, meets_at_once()).wait();
}

std::vector<Result<std::string>> PeerCalls::call_all(
    const std::vector<Cluster::Question>& questions, const PeerRow& row, AskManner manner,
    std::stop_token stop) {
  std::vector<std::string_view> requests;
  for (const Cluster::Question& one : questions) requests.push_back(one.request);
  return ask_each(row, requests, manner, stop,
                  [&](size_t i, std::string_view request, std::chrono::milliseconds left) {
                    return call(questions[i].node, row, std::string(request), left, stop);
                  });
}

}  // namespace ptc
