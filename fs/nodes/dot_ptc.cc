#include "fs/nodes/dot_ptc.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "fs/nodes/ask_file.h"
#include "fs/nodes/text_file.h"
#include "fs/version.h"
#include "store/base/json.h"

namespace ptc {
namespace {

struct Memory {
  uint64_t total = 0, used = 0;
};

Memory store_memory(const Tree& tree) {
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

int64_t uptime_seconds(const Tree& tree) {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() -
                                                          tree.started())
      .count();
}

std::string version_text(Tree&) { return fmt::format("ptcfs {}\n", kVersion); }

std::string nodes_text(Tree& tree) {
  Memory memory = store_memory(tree);
  json::object node{{"name", tree.store().node()},
                    {"state", "up"},
                    {"memory_total_bytes", memory.total},
                    {"memory_used_bytes", memory.used},
                    {"materialised_bytes", materialised_bytes(tree)}};
  return pretty_json(json::object{{"nodes", json::array{std::move(node)}}});
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
  return pretty_json(json::object{{"uptime_seconds", uptime_seconds(tree)},
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

std::string metrics_text(Tree& tree) {
  std::string text;
  auto out = std::back_inserter(text);
  auto head = [&](std::string_view name, std::string_view type, std::string_view help) {
    fmt::format_to(out, "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  };
  struct Column {
    const char *name, *help;
    uint64_t Stats::OpCounts::*value;
  };
  const Column columns[] = {
      {"ptcfs_requests_total", "Requests of the kernel.", &Stats::OpCounts::requests},
      {"ptcfs_request_errors_total", "Requests answered with an errno.", &Stats::OpCounts::errors},
      {"ptcfs_request_bytes_total", "Bytes read and written through the daemon; what the kernel "
       "does by itself is not among them.", &Stats::OpCounts::bytes}};
  for (const Column& column : columns) {
    head(column.name, "counter", column.help);
    for (size_t i = 0; i < kOpCount; ++i) {
      Stats::OpCounts counts = tree.stats().counts(static_cast<Op>(i));
      if (counts.requests == 0) continue;
      fmt::format_to(out, "{}{{operation=\"{}\"}} {}\n", column.name,
                     op_name(static_cast<Op>(i)), counts.*column.value);
    }
  }
  uint64_t checkpoints = 0;
  auto jobs = tree.store().jobs();
  for (const JobRef& job : jobs) checkpoints += job->checkpoints().size();
  Memory memory = store_memory(tree);
  auto gauge = [&](std::string_view name, std::string_view help, uint64_t value) {
    head(name, "gauge", help);
    fmt::format_to(out, "{} {}\n", name, value);
  };
  gauge("ptcfs_requests_in_flight", "Requests being answered.", tree.stats().in_flight().size());
  gauge("ptcfs_jobs", "Jobs.", jobs.size());
  gauge("ptcfs_checkpoints", "Committed checkpoints of all jobs.", checkpoints);
  gauge("ptcfs_materialised_bytes", "Bytes of checkpoints held here.", materialised_bytes(tree));
  gauge("ptcfs_memory_total_bytes", "Size of the store.", memory.total);
  gauge("ptcfs_memory_used_bytes", "Used of the store, by whatever.", memory.used);
  gauge("ptcfs_passthrough", "1 if the kernel reads images by itself.",
        tree.passthrough().enabled() ? 1 : 0);
  gauge("ptcfs_uptime_seconds", "Since this mount was made.", uptime_seconds(tree));
  return text;
}

struct File {
  const char* name;
  std::string (*text)(Tree&);
};
constexpr File kFiles[] = {{"version", version_text},
                           {"nodes.json", nodes_text},
                           {"stats", stats_text},
                           {"requests", requests_text},
                           {"metrics", metrics_text}};

struct stat owner() {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  return virtual_stat(S_IFDIR | 0755, ::geteuid(), ::getegid(), now, inode_of(".ptc"));
}

class DotPtcDir : public Node {
 public:
  explicit DotPtcDir(Tree& tree) : Node(".ptc"), tree_(tree) {}
  bool keeps_its_name() const override { return true; }
  FsResult<struct stat> attributes() override { return owner(); }

  FsResult<NodeRef> lookup(const std::string& name) override {
    if (name == "ask") return make_ask_file(tree_);
    for (const File& file : kFiles) {
      if (name != file.name) continue;
      auto text = [&tree = tree_, &file] { return file.text(tree); };
      return tree_.table().intern(std::make_shared<TextFile>(".ptc/" + name, text, owner));
    }
    return Errno{ENOENT};
  }

  FsResult<std::vector<DirEntry>> list() override {
    std::vector<DirEntry> entries{{"ask", S_IFREG, inode_of(".ptc/ask")}};
    for (const File& file : kFiles) {
      entries.push_back({file.name, S_IFREG, inode_of(std::string(".ptc/") + file.name)});
    }
    return entries;
  }

 private:
  Tree& tree_;
};

}  // namespace

FsResult<NodeRef> make_dot_ptc(Tree& tree) {
  return tree.table().intern(std::make_shared<DotPtcDir>(tree));
}

}  // namespace ptc
