#include "fs/report/reports.h"

#include <sys/statvfs.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <chrono>
#include <map>
#include <utility>

#include "fs/report/version.h"
#include "reshard/checkpoint/manifest.h"
#include "store/base/json.h"
#include "store/base/wall_time.h"

namespace ptc {

StoreSpace store_space(const Tree& tree) {
  struct statvfs space = {};
  if (::statvfs(tree.store().directory().c_str(), &space) != 0) return {};
  return {space.f_blocks * space.f_frsize, (space.f_blocks - space.f_bfree) * space.f_frsize};
}

uint64_t materialised_bytes(const Tree& tree) {
  uint64_t total = 0;
  for (const JobRef& job : tree.store().jobs()) {
    for (const CheckpointRef& checkpoint : job->checkpoints()) {
      const std::shared_ptr<const StoredState> stored = checkpoint->stored();
      for (const StoredImage& image : stored->images) {
        if (image.image != nullptr && image.image->is_here()) total += image.image->bytes();
      }
    }
  }
  return total;
}

double uptime_seconds(const Tree& tree) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - tree.started()).count();
}

std::string version_text(Tree&) { return fmt::format("ptcfs {}\n", kVersion); }

namespace {

json::object node_object(const NodeReport& report) {
  json::object node{{"name", report.name}, {"state", report.state}};
  if (report.since_ns != 0) node["since"] = time_text(report.since_ns);
  if (report.numbers) {
    node["memory_total_bytes"] = report.numbers->memory_total_bytes;
    node["memory_used_bytes"] = report.numbers->memory_used_bytes;
  }
  node["materialised_bytes"] = report.stored_bytes;
  if (report.draining) node["drain"] = json::object{{"bytes_left", report.stored_bytes}};
  if (!report.numbers) return node;
  node["traffic"] = json::object{{"sent_bytes", report.numbers->sent_bytes},
                                 {"received_bytes", report.numbers->received_bytes},
                                 {"broken_connections", report.numbers->broken_connections},
                                 {"checksum_failures", report.numbers->checksum_failures},
                                 {"retries", report.numbers->retries}};
  if (!report.numbers->version.empty()) node["version"] = report.numbers->version;
  if (report.clock)
    node["clock"] = json::object{{"ahead_seconds", report.clock->ahead_seconds},
                                 {"within_seconds", report.clock->within_seconds}};
  node["heard_seconds_ago"] = std::round(report.age_seconds * 10) / 10;
  return node;
}

/// Memory that several nodes have together counts once.
json::object cluster_object(const std::vector<NodeReport>& reports) {
  uint64_t memory_total = 0, memory_used = 0, materialised = 0;
  std::set<std::string> counted;
  for (const NodeReport& report : reports) {
    materialised += report.stored_bytes;
    if (!report.numbers) continue;
    const std::string& memory = report.numbers->memory_id;
    if (!memory.empty() && !counted.insert(memory).second) continue;
    memory_total += report.numbers->memory_total_bytes;
    memory_used += report.numbers->memory_used_bytes;
  }
  return {{"memory_total_bytes", memory_total},
          {"memory_used_bytes", memory_used},
          {"materialised_bytes", materialised}};
}

/// Why nothing is decided here; nullopt: it is.
std::optional<json::object> agreement_trouble(const Tree& tree,
                                              const std::vector<NodeReport>& reports) {
  if (const auto why = tree.store().distrusted())
    return json::object{{"state", "refused"}, {"why", *why}};
  for (const NodeReport& report : reports) {
    if (std::string_view(report.state) != "fenced") continue;
    json::object trouble{
        {"state", "away"},
        {"why", fmt::format("node {} does not reach the agreement store (etcd), or "
                            "has not joined again",
                            report.name)}};
    if (report.since_ns != 0) trouble["since"] = time_text(report.since_ns);
    return trouble;
  }
  return std::nullopt;
}

json::object missing_copies(const Tree& tree) {
  json::array jobs;
  uint64_t missing = 0;
  for (const JobRef& job : tree.store().jobs()) {
    const uint64_t bytes = job->missing_copy_bytes();
    missing += bytes;
    if (bytes > 0) jobs.push_back(json::object{{"job", job->name()}, {"bytes", bytes}});
  }
  return {{"bytes", missing}, {"jobs", std::move(jobs)}};
}

}  // namespace

json::object nodes_document(Tree& tree) {
  const std::vector<NodeReport> reports = tree.store().node_reports();
  json::array nodes;
  for (const NodeReport& report : reports) nodes.push_back(node_object(report));
  json::object document{{"nodes", std::move(nodes)},
                        {"cluster", cluster_object(reports)},
                        {"missing_copies", missing_copies(tree)}};
  if (std::optional<json::object> trouble = agreement_trouble(tree, reports))
    document["agreement"] = *std::move(trouble);
  if (const std::vector<std::string> kept = tree.store().kept(); !kept.empty())
    document["kept"] = json::array(kept.begin(), kept.end());
  return document;
}

std::string nodes_text(Tree& tree) { return pretty_json(nodes_document(tree)); }

std::string stats_text(Tree& tree) {
  json::object operations;
  for (size_t i = 0; i < kOpCount; ++i) {
    Op op = static_cast<Op>(i);
    Stats::OpCounts counts = tree.stats().counts(op);
    if (counts.requests == 0) continue;
    json::object one{{"requests", counts.requests}, {"errors", counts.errors}};
    if (op == Op::kRead || op == Op::kWrite) one["bytes"] = counts.bytes;
    operations[op_name(op)] = std::move(one);
  }
  return pretty_json(json::object{{"uptime_seconds", static_cast<int64_t>(uptime_seconds(tree))},
                                  {"passthrough", tree.passthrough().enabled()},
                                  {"nodes_in_memory", tree.table().size()},
                                  {"operations", std::move(operations)}});
}

std::string requests_text(Tree& tree) {
  json::array requests;
  for (const Stats::Pending& pending : tree.stats().in_flight()) {
    requests.push_back(json::object{{"operation", op_name(pending.op)},
                                    {"node", fmt::format("{:x}", pending.node)},
                                    {"pid", pending.pid},
                                    {"age_ms", pending.age.count()}});
  }
  return pretty_json(json::object{{"requests", std::move(requests)}});
}

}  // namespace ptc
