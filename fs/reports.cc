#include "fs/reports.h"

#include <sys/statvfs.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <chrono>
#include <map>
#include <utility>

#include "fs/version.h"
#include "store/base/json.h"

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
      for (const StoredImage& stored : checkpoint->stored()->images) {
        if (stored.image != nullptr) total += stored.image->bytes();
      }
    }
  }
  return total;
}

double uptime_seconds(const Tree& tree) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - tree.started()).count();
}

std::string version_text(Tree&) { return fmt::format("ptcfs {}\n", kVersion); }

std::string nodes_text(Tree& tree) {
  StoreSpace space = store_space(tree);
  json::object node{{"name", tree.store().node()},
                    {"state", "up"},
                    {"memory_total_bytes", space.total_bytes},
                    {"memory_used_bytes", space.used_bytes},
                    {"materialised_bytes", materialised_bytes(tree)}};
  std::map<std::string, json::object> by_name;
  for (const std::string& name : tree.store().nodes())
    by_name[name] = {{"name", name}, {"state", "up"}};
  const std::string& self = tree.store().node();
  if (!by_name.contains(self)) node["state"] = "fenced";  // cut off from the cluster: it decides nothing
  by_name[self] = std::move(node);
  for (const std::string& name : tree.store().drained()) {
    by_name.try_emplace(name, json::object{{"name", name}, {"state", "away"}});
    by_name[name]["drain"] = json::object{{"bytes_left", tree.store().bytes_on(name)}};
  }
  json::array nodes;
  for (auto& [name, one] : by_name) nodes.push_back(std::move(one));
  return pretty_json(json::object{{"nodes", std::move(nodes)}});
}

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
