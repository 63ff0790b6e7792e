#include "reshard/cluster/node_reports.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <optional>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

constexpr auto kFresh = std::chrono::seconds(1);
constexpr auto kStillTrue = std::chrono::seconds(5);
constexpr auto kFirstLook = std::chrono::milliseconds(300);

struct Member {
  const char* key;
  uint64_t NodeNumbers::*number;
};
constexpr Member kMembers[] = {{"memory_total_bytes", &NodeNumbers::memory_total_bytes},
                               {"memory_used_bytes", &NodeNumbers::memory_used_bytes},
                               {"sent_bytes", &NodeNumbers::sent_bytes},
                               {"received_bytes", &NodeNumbers::received_bytes},
                               {"broken_connections", &NodeNumbers::broken_connections},
                               {"checksum_failures", &NodeNumbers::checksum_failures},
                               {"retries", &NodeNumbers::retries},
                               {"time_ns", &NodeNumbers::time_ns}};

}  // namespace

void NodeNumbers::add(const PeerNumbers& peer) {
  sent_bytes += peer.bytes_sent;
  received_bytes += peer.bytes_received;
  broken_connections += peer.broken_connections;
  checksum_failures += peer.checksum_failures;
  retries += peer.retries;
}

std::string NodeAnswer::to_text() const {
  json::object text{{"memory_id", numbers.memory_id}, {"version", numbers.version}}, doing;
  for (const Member& member : kMembers) text[member.key] = numbers.*member.number;
  for (const auto& [job, progress] : reshards) {
    json::object one = progress.to_json();
    one["leads"] = progress.leads;
    doing[job] = std::move(one);
  }
  text["reshards"] = std::move(doing);
  return json::serialize(text);
}

Result<NodeAnswer> NodeAnswer::from_text(std::string_view text) {
  PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{16} << 20}));
  if (!value.is_object()) return make_error(Code::kCorrupt, "a node's numbers are no JSON object");
  const json::object& object = value.get_object();
  NodeAnswer answer;
  for (const Member& member : kMembers) {
    PTC_TRY(auto number, json_uint(object, member.key));
    answer.numbers.*member.number = number.value_or(0);
  }
  answer.numbers.memory_id = json_text(object, "memory_id");
  answer.numbers.version = json_text(object, "version");
  const json::value* doing = object.if_contains("reshards");
  if (doing == nullptr || !doing->is_object()) return answer;
  for (const auto& [job, one] : doing->get_object()) {
    if (!one.is_object()) continue;
    PTC_TRY(answer.reshards[std::string(job)], ReshardProgress::from_json(one.get_object()));
  }
  return answer;
}

std::string memory_id_of(const std::string& directory) {
  Result<std::string> boot = read_text_file(AT_FDCWD, "/proc/sys/kernel/random/boot_id", 64);
  struct stat status = {};
  if (boot.has_error() || ::stat(directory.c_str(), &status) != 0) return "";
  return fmt::format("{}:{:x}", boot.value().substr(0, boot.value().find('\n')), status.st_dev);
}

std::optional<ClockOffset> ClockOffset::of(uint64_t asked_ns, uint64_t said_ns,
                                           uint64_t answered_ns) {
  if (said_ns == 0 || answered_ns < asked_ns) return std::nullopt;
  const double half = static_cast<double>(answered_ns - asked_ns) / 2;
  const double ahead = static_cast<double>(said_ns) - (static_cast<double>(asked_ns) + half);
  return ClockOffset{ahead / 1e9, half / 1e9};
}

NodeReports::~NodeReports() {
  std::jthread last;
  {
    MutexLock lock(mutex_);
    last = std::move(asker_);
  }
}

std::vector<std::string> NodeReports::others() const {
  std::vector<std::string> nodes = cluster_.alive();
  std::erase(nodes, cluster_.self());
  return nodes;
}

std::map<std::string, NodeReports::Heard> NodeReports::heard() {
  const bool anybody = !others().empty();
  MutexLock lock(mutex_);
  if (!anybody) {
    heard_.clear();
    return {};
  }
  const auto now = std::chrono::steady_clock::now();
  if (!asking_ && (!asked_ || now - *asked_ >= kFresh)) {
    asking_ = true;
    asked_ = now;
    asker_ = {};  // the one before has ended
    try {
      asker_ = std::jthread([this](const std::stop_token& stop) {
        ::pthread_setname_np(::pthread_self(), "ptcfs-reports");
        ask_all(stop);
        MutexLock ended(mutex_);
        asking_ = false;
        decided_.clear();
        answered_ = std::chrono::steady_clock::now();
        changed_.notify_all();
      });
    } catch (const std::system_error&) {  // no thread now
      asking_ = false;
    }
  }
  if (!answered_ || now - *answered_ >= kStillTrue)
    changed_.wait_for(mutex_, kFirstLook, [&]() PTC_REQUIRES(mutex_) { return !asking_; });
  return heard_;
}

std::vector<ReshardProgress> NodeReports::reshard_of(const std::string& job,
                                                     std::chrono::milliseconds since) {
  std::vector<ReshardProgress> doing;
  const std::map<std::string, Heard> all = heard();
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [node, heard] : all) {
    const auto found = heard.answer.reshards.find(job);
    if (found != heard.answer.reshards.end() && now - heard.when < since)
      doing.push_back(found->second);
  }
  return doing;
}

void NodeReports::decided(const std::string& job) {
  MutexLock lock(mutex_);
  if (asking_) decided_.insert(job);
  bool anything = false;
  for (auto& [node, heard] : heard_) anything |= heard.answer.reshards.erase(job) > 0;
  if (!anything) return;
  asked_.reset();
  answered_.reset();
}

void NodeReports::ask_all(const std::stop_token& stop) {
  const std::vector<std::string> nodes = others();
  {
    MutexLock lock(mutex_);
    std::erase_if(heard_, [&](const auto& one) {
      return std::find(nodes.begin(), nodes.end(), one.first) == nodes.end();
    });
  }
  std::vector<Cluster::Question> questions;
  for (const std::string& node : nodes) questions.push_back({node, ""});
  const auto asked = static_cast<uint64_t>(now_ns());
  // Each as soon as it has answered: one that hangs keeps nothing from whoever looks.
  const auto hear = [&](size_t i, const Result<std::string>& answer) -> std::optional<NextCall> {
    if (answer.has_error()) return std::nullopt;
    Result<NodeAnswer> said = NodeAnswer::from_text(answer.value());
    if (said.has_error()) return std::nullopt;
    const auto clock =
        ClockOffset::of(asked, said.value().numbers.time_ns, static_cast<uint64_t>(now_ns()));
    MutexLock lock(mutex_);
    for (const std::string& job : decided_) said.value().reshards.erase(job);
    heard_[nodes[i]] = {std::move(said).value(), std::chrono::steady_clock::now(), clock};
    return std::nullopt;
  };
  (void)cluster_.ask_all(PeerMethod::kNumbers, questions, stop, {}, hear);
}

}  // namespace ptc
