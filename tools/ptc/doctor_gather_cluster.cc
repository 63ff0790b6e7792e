// Asks the endpoints of etcd what `ptc doctor` wants to know of them.
#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include "store/meta/etcd_gateway.h"
#include "store/meta/etcd_json.h"
#include "tools/ptc/doctor_gather.h"

namespace ptc::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kEtcdPatience = 2s;
constexpr size_t kReads = 5;

uint64_t size_in(const json::object& answer, std::string_view key) {
  const auto number = ptc::number_field(answer, key);
  return number && number.value() > 0 ? static_cast<uint64_t>(number.value()) : 0;
}

/// Where what the status says is not to be had, the reads show that it serves.
void ask_status(EtcdGateway& gateway, EtcdFacts* facts) {
  const auto status = gateway.call("maintenance/status", {});
  if (status) {
    facts->version = json_text(status.value(), "version");
    facts->has_leader =
        size_in(status.value(), "leader") != 0 || !json_text(status.value(), "leader").empty();
    facts->size = size_in(status.value(), "dbSize");
    facts->in_use = size_in(status.value(), "dbSizeInUse");
    facts->quota = size_in(status.value(), "dbSizeQuota");
  }
  const auto alarms = gateway.call("maintenance/alarm", {{"action", "GET"}});
  if (alarms.has_error()) return;
  for (const json::value& alarm : ptc::array_field(alarms.value(), "alarms"))
    if (alarm.is_object()) facts->alarms.push_back(json_text(alarm.get_object(), "alarm"));
}

EtcdFacts ask_endpoint(const std::shared_ptr<const EtcdAccess>& access,
                       const std::string& cluster) {
  EtcdFacts facts{.endpoint = access->endpoints.front().text};
  EtcdGateway gateway(access);
  std::vector<double> took;
  for (size_t i = 0; i <= kReads; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    // Linearizable, as the daemon's are: a quorum answers.
    const auto read = gateway.call(
        "kv/range", {{"key", to_base64("/" + cluster + "/kv/")}, {"count_only", true}});
    if (read.has_error()) {
      facts.trouble = read.error().message();
      break;
    }
    if (i > 0)  // the first also connects
      took.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
              .count());
  }
  if (facts.trouble.empty()) {
    std::sort(took.begin(), took.end());
    facts.latency_ms = took[took.size() / 2];
    ask_status(gateway, &facts);
  }
  return facts;
}

}  // namespace

Result<std::vector<EtcdFacts>> gather_etcd(const EtcdOptions& options) {
  PTC_TRY(check_access(options));  // all endpoints together
  std::vector<std::future<EtcdFacts>> asked;
  for (const std::string& endpoint : options.endpoints) {
    EtcdOptions alone = options;
    alone.endpoints = {endpoint};
    alone.request_timeout = alone.patience = kEtcdPatience;
    PTC_TRY(auto access, check_access(alone));
    asked.push_back(std::async(std::launch::async, ask_endpoint, access, options.cluster));
  }
  std::vector<EtcdFacts> facts;
  for (auto& one : asked) facts.push_back(one.get());
  return facts;
}

}  // namespace ptc::cli
