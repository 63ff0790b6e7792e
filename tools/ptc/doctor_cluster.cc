// What `ptc doctor` says of a cluster: its nodes, its etcd, its certificates.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <utility>

#include "store/base/size_text.h"
#include "store/base/wall_time.h"
#include "tools/ptc/doctor_checks.h"

namespace ptc::cli {
namespace {

constexpr double kSilentSeconds = 10;
constexpr double kClockWarnSeconds = 1, kClockFailSeconds = 30;
constexpr double kSlowMs = 100, kTooSlowMs = 1000;
constexpr uint64_t kDefaultQuota = uint64_t{2} << 30;  // etcd's own
constexpr int64_t kDay = 86400;
constexpr int64_t kWarnBefore = 30 * kDay, kFailBefore = 7 * kDay;

bool is_up(const NodeFacts& node) { return node.state == "up"; }

std::string date_of(int64_t seconds) { return time_text(seconds * 1'000'000'000).substr(0, 10); }

/// Before etcd 3.4 the gateway has no /v3/.
bool is_too_old(const std::string& version) {
  unsigned major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%u.%u", &major, &minor) != 2) return false;
  return major < 3 || (major == 3 && minor < 4);
}

/// One certificate.
Finding judge(const CertificateFacts::Span& span, const std::string& what, int64_t now) {
  const std::string anew = "have it made anew; ptcfs takes the new file while it runs";
  Finding finding;
  if (span.since > now)
    return {Level::kFail, "", fmt::format("{} is good from {} on only", what, date_of(span.since)),
            "is this machine's clock right?"};
  if (span.until < now)
    return {Level::kFail, "", fmt::format("{} has expired on {}", what, date_of(span.until)), anew};
  const int64_t left = span.until - now, days = left / kDay, life = span.until - span.since;
  finding.found =
      fmt::format("{} is good until {} ({})", what, date_of(span.until),
                  days >= 2 ? fmt::format("{} days", days) : fmt::format("{} hours", left / 3600));
  // Those that are made for days alone are exchanged later, too.
  if (left >= std::min(kWarnBefore, life / 3)) return finding;
  finding.level = left < std::min(kFailBefore, life / 10) ? Level::kFail : Level::kWarn;
  finding.advice = anew;
  return finding;
}

}  // namespace

Finding check_clock(const Facts& facts) {
  const auto& synchronised = facts.machine.clock_synchronised;
  Finding finding{.name = "clock", .found = "kept by NTP"};
  if (synchronised && *synchronised) return finding;
  finding.found = synchronised ? "not kept by NTP" : "not known whether it is kept by NTP";
  const bool matters = facts.in_cluster || !facts.certificates.empty();
  if (!matters) {
    finding.found += ", which matters where there are several nodes or certificates";
    return finding;
  }
  finding.level = Level::kWarn;
  finding.advice = "run chrony or systemd-timesyncd; in a virtual machine its host's clock may do";
  return finding;
}

Finding check_node_clocks(const Facts& facts) {
  Finding finding{.name = "node clocks"};
  size_t compared = 0;
  double worst = 0;
  for (const NodeFacts& node : facts.nodes) {
    if (!node.clock_ahead || !is_up(node)) continue;
    ++compared;
    // No more than is certain.
    const double off = std::max(0.0, std::abs(*node.clock_ahead) - node.clock_within.value_or(0));
    if (off < kClockWarnSeconds || off <= worst) continue;
    worst = off;
    finding.level = off < kClockFailSeconds ? Level::kWarn : Level::kFail;
    finding.found =
        fmt::format("{}'s clock is {:.1f} s {} this node's", node.name, std::abs(*node.clock_ahead),
                    *node.clock_ahead > 0 ? "ahead of" : "behind");
    finding.advice =
        "run chrony or systemd-timesyncd on all nodes: times of files, and which "
        "certificate is good, differ";
  }
  if (worst == 0)
    finding.found = compared == 0 ? "no other node has told its time"
                                  : fmt::format("{} of other nodes agree with this one", compared);
  return finding;
}

Finding check_nodes(const Facts& facts) {
  std::vector<std::string> away, silent, fenced;
  size_t up = 0;
  for (const NodeFacts& node : facts.nodes) {
    if (node.state == "fenced") {
      fenced.push_back(node.name);
    } else if (!is_up(node)) {
      away.push_back(node.name);
    } else if (!node.is_self &&
               (!node.heard_seconds_ago || *node.heard_seconds_ago > kSilentSeconds)) {
      silent.push_back(node.name);
    } else {
      ++up;
    }
  }
  Finding finding{.name = "nodes", .found = fmt::format("{} answer", up)};
  if (!fenced.empty()) {
    finding.level = Level::kFail;
    finding.found = fmt::format("{} is cut off from its cluster", fmt::join(fenced, ", "));
    finding.advice = "see etcd below, and the network between";
  } else if (!silent.empty()) {
    finding.level = Level::kFail;
    finding.found =
        fmt::format("{} is there and does not answer this node", fmt::join(silent, ", "));
    finding.advice =
        "look at the network and firewalls between (--listen, --advertise), at the "
        "secret or certificates, and whether all run one version";
  } else if (!away.empty()) {
    finding.level = Level::kWarn;
    finding.found += fmt::format(", {} is away", fmt::join(away, ", "));
    finding.advice = "start it, or, where it will not come back, see ptc drain";
  }
  return finding;
}

Finding check_versions(const Facts& facts) {
  Finding finding{.name = "versions", .found = "ptc " + facts.own_version};
  std::map<std::string, std::vector<std::string>> of;
  for (const NodeFacts& node : facts.nodes)
    if (is_up(node) && !node.version.empty()) of[node.version].push_back(node.name);
  if (of.size() > 1) {
    std::vector<std::string> each;
    for (const auto& [version, names] : of)
      each.push_back(fmt::format("{} on {}", version, fmt::join(names, ", ")));
    finding.level = Level::kFail;
    finding.found =
        fmt::format("nodes of one cluster run different ones: {}", fmt::join(each, "; "));
    finding.advice = "install one version on all nodes, and mount again";
    return finding;
  }
  const DaemonFacts* daemon = facts.running();
  if (daemon == nullptr) return finding;
  finding.found += ", ptcfs " + daemon->version;
  if (facts.nodes.size() > 1) finding.found += " on all nodes that answer";
  if (daemon->version == facts.own_version) return finding;
  finding.level = Level::kWarn;
  finding.advice = "mount again, so that the daemon is of the version that is installed";
  return finding;
}

Finding check_agreement(const Facts& facts) {
  Finding finding{.name = "agreement", .found = "the daemon decides with the others"};
  if (facts.agreement.empty()) return finding;
  return {Level::kFail, finding.name, facts.agreement,
          "where etcd is away, start it; where its data were lost, see ptc recover"};
}

Finding check_etcd(const EtcdFacts& etcd, const Facts& facts) {
  Finding finding{.name = "etcd", .found = etcd.endpoint};
  if (!etcd.trouble.empty()) {
    finding.found = etcd.trouble;
    const bool others = std::any_of(facts.etcd.begin(), facts.etcd.end(),
                                    [](const EtcdFacts& one) { return one.trouble.empty(); });
    const bool daemon_has =
        facts.running() != nullptr && facts.in_cluster && facts.agreement.empty();
    finding.level = others || daemon_has ? Level::kWarn : Level::kFail;
    finding.advice = others       ? "the others serve; start this one again"
                     : daemon_has ? "the daemon reaches it: does ptc doctor run in another network?"
                                  : "start etcd, or look at the address, the network and the "
                                    "credentials";
    return finding;
  }
  const uint64_t quota = etcd.quota > 0 ? etcd.quota : kDefaultQuota;
  finding.found += fmt::format(": {} answers in {:.1f} ms, its database has {} of {}{}",
                               etcd.version.empty() ? "etcd" : "etcd " + etcd.version,
                               etcd.latency_ms, format_size(etcd.size), format_size(quota),
                               etcd.quota > 0 ? "" : " (etcd's default)");
  const auto say = [&](Level level, const std::string& what, const std::string& advice) {
    finding.level = level;
    finding.found += what;
    finding.advice = advice;
    return finding;
  };
  if (!etcd.alarms.empty()) {
    const bool full =
        std::find(etcd.alarms.begin(), etcd.alarms.end(), "NOSPACE") != etcd.alarms.end();
    return say(Level::kFail, fmt::format("; its alarm is on: {}", fmt::join(etcd.alarms, ", ")),
               full ? "nothing can be written: etcdctl compaction, etcdctl defrag, a larger "
                      "--quota-backend-bytes, then etcdctl alarm disarm"
                    : "a member's data are damaged: see etcdctl endpoint status, and replace it");
  }
  if (!etcd.has_leader)
    return say(Level::kFail, "; it has no leader", "start the other members of etcd");
  if (is_too_old(etcd.version))
    return say(Level::kWarn, ", and is old", "ptcfs is tried with etcd 3.4 and later");
  if (etcd.latency_ms > kSlowMs)
    return say(etcd.latency_ms > kTooSlowMs ? Level::kFail : Level::kWarn,
               ", which is slow: every commit and layout waits for it",
               "etcd wants a disk with fast fsync, its own processors, and a near network");
  if (static_cast<double>(etcd.size) > 0.8 * static_cast<double>(quota))
    return say(Level::kWarn, fmt::format(", of which {} is in use", format_size(etcd.in_use)),
               "etcdctl defrag, --auto-compaction-retention, or a larger --quota-backend-bytes");
  return finding;
}

Finding check_certificate(const CertificateFacts& certificate, int64_t now) {
  const std::string what = certificate.path.empty() ? "the certificate it shows" : certificate.path;
  if (!certificate.trouble.empty())
    return {Level::kWarn, certificate.option, certificate.trouble,
            "where others may not read it, ask as root"};
  if (certificate.spans.empty())
    return {Level::kFail, certificate.option, what + " holds no certificate", "give a file in PEM"};
  // Of a chain all must be good; of authorities one, for old and new are there while they change.
  std::optional<Finding> finding;
  std::optional<int64_t> until;
  for (const CertificateFacts::Span& span : certificate.spans) {
    Finding one = judge(span, what, now);
    const auto rank = std::pair(one.level, -span.until);
    const bool takes =
        !finding || (certificate.is_authority ? rank < std::pair(finding->level, -*until)
                                              : rank > std::pair(finding->level, -*until));
    if (!takes) continue;
    finding = std::move(one);
    until = span.until;
  }
  finding->name = certificate.option;
  return *finding;
}

}  // namespace ptc::cli
