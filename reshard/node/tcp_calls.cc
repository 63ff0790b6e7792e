#include "reshard/node/tcp_calls.h"

#include <map>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

std::unique_ptr<PeerServer> TcpCalls::serve(std::unique_ptr<PeerServer> server) {
  MutexLock lock(mutex_);
  server_.swap(server);
  return server;
}

std::string TcpCalls::address() const {
  MutexLock lock(mutex_);
  return server_ == nullptr ? "" : server_->address();
}

void TcpCalls::set(const std::string& node, const std::string& address) {
  peers_.set(node, address);
}
void TcpCalls::remove(const std::string& node) { peers_.remove(node); }

Result<> TcpCalls::meet(const std::string& node, const std::string& address) {
  return peers_.meet(node, address);
}

std::vector<Result<>> TcpCalls::meet_all(const std::vector<Place>& others,
                                         const std::string& own_address) {
  const PeerRow& row = row_of(PeerMethod::kMeet);
  std::vector<Peers::Place> places;
  for (const Place& one : others) places.push_back({one.node, one.address});
  std::vector<Peers::Met> met = peers_.meet_all(places, row.name, own_address, row.deadline);
  std::vector<Result<>> results;
  for (size_t i = 0; i < others.size(); ++i)
    results.push_back(met[i].let_in ? check_came_back(others[i].node, std::move(met[i].answer))
                                    : std::move(met[i].let_in));
  return results;
}

Result<std::string> TcpCalls::call(const std::string& node, const PeerRow& row,
                                   const std::string& request, std::chrono::milliseconds time,
                                   std::stop_token stop) {
  return peers_.call(node, row.name, request, time, std::move(stop));
}

std::vector<Result<std::string>> TcpCalls::call_all(const std::vector<Cluster::Question>& questions,
                                                    const PeerRow& row, AskManner manner,
                                                    std::stop_token stop) {
  std::vector<Peers::Call> calls;
  for (const Cluster::Question& one : questions) calls.push_back({one.node, row.name, one.request});
  Peers::Manner how{row.at_once(), row.is_idempotent(), manner.until, std::move(manner.then)};
  return peers_.call_all(calls, std::move(how), manner.each, std::move(stop));
}

std::vector<PeerNumbers> TcpCalls::numbers() const {
  std::vector<PeerNumbers> all = peers_.numbers();
  {
    MutexLock lock(mutex_);
    if (server_ != nullptr)
      for (PeerNumbers& theirs : server_->numbers()) all.push_back(std::move(theirs));
  }
  std::map<std::string, PeerNumbers> by_node;
  for (const PeerNumbers& one : all)
    by_node.try_emplace(one.node, PeerNumbers{one.node}).first->second.add(one);
  std::vector<PeerNumbers> numbers;
  for (auto& [node, sum] : by_node) numbers.push_back(std::move(sum));
  return numbers;
}

}  // namespace ptc
