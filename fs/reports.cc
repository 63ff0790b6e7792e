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
        if (stored.image != nullptr && stored.image->is_here()) total += stored.image->bytes();
      }
    }
  }
  return total;
}

double uptime_seconds(const Tree& tree) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - tree.started()).count();
}

std::string version_text(Tree&) { return fmt::format("ptcfs {}\n", kVersion); }

std::vector<NodeReport> node_reports(const Tree& tree) {
  const JobStore& store = tree.store();
  std::map<std::string, NodeReport> by_name;
  auto of = [&](const std::string& name) -> NodeReport& {
    return by_name.try_emplace(name, NodeReport{name, "away"}).first->second;
  };
  for (const JobRef& job : store.jobs())
    for (const CheckpointRef& checkpoint : job->checkpoints()) {
      const std::shared_ptr<const StoredState> stored = checkpoint->stored();
      for (size_t i = 0; i < stored->images.size(); ++i) {
        const std::string& node = stored->images[i].node;
        of(node.empty() ? store.node() : node).stored_bytes += stored->layouts()[i].bytes;
      }
    }
  for (const std::string& name : store.drained()) of(name).draining = true;
  for (const std::string& name : store.nodes()) of(name).state = "up";
  NodeReport& own = of(store.node());
  if (std::string_view(own.state) != "up") own.state = "fenced";  // cut off from the cluster: it decides nothing
  std::vector<NodeReport> reports;
  for (auto& [name, report] : by_name) reports.push_back(std::move(report));
  return reports;
}

uint64_t missing_copy_bytes(const Job& job) {
  const Result<Layout> layout = Layout::parse(job.layout_text());
  const uint64_t wanted = 1 + (layout ? layout.value().replicas : 0);
  uint64_t missing = 0;
  for (const CheckpointRef& checkpoint : job.checkpoints()) {
    const std::shared_ptr<const StoredState> stored = checkpoint->stored();
    const std::vector<StoredImage>& images = stored->images;
    auto same = [&](size_t a, size_t b) {  // they stand beside each other
      return images[a].state == images[b].state && images[a].path == images[b].path && images[a].written == images[b].written;
    };
    for (size_t begin = 0, end; begin < images.size(); begin = end) {
      uint64_t there = 0;
      for (end = begin; end < images.size() && same(begin, end); ++end) there += images[end].image != nullptr;
      if (there < wanted) missing += (wanted - there) * stored->layouts()[begin].bytes;
    }
  }
  return missing;
}

json::object nodes_document(Tree& tree) {
  json::array nodes;
  uint64_t materialised = 0;
  const std::string& self = tree.store().node();
  for (const NodeReport& report : node_reports(tree)) {
    json::object node{{"name", report.name}, {"state", report.state}};
    if (report.name == self) {
      const StoreSpace space = store_space(tree);
      node["memory_total_bytes"] = space.total_bytes;
      node["memory_used_bytes"] = space.used_bytes;
    }
    node["materialised_bytes"] = report.stored_bytes;
    if (report.draining) node["drain"] = json::object{{"bytes_left", report.stored_bytes}};
    nodes.push_back(std::move(node));
    materialised += report.stored_bytes;
  }
  json::array missing_jobs;
  uint64_t missing = 0;
  for (const JobRef& job : tree.store().jobs()) {
    const uint64_t bytes = missing_copy_bytes(*job);
    missing += bytes;
    if (bytes > 0) missing_jobs.push_back(json::object{{"job", job->name()}, {"bytes", bytes}});
  }
  json::object document{{"nodes", std::move(nodes)},
                        {"cluster", json::object{{"materialised_bytes", materialised}}},
                        {"missing_copies", json::object{{"bytes", missing}, {"jobs", std::move(missing_jobs)}}}};
  if (const auto why = tree.store().distrusted()) document["agreement"] = json::object{{"state", "refused"}, {"why", *why}};
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
