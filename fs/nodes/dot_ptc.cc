#include "fs/nodes/dot_ptc.h"

#include <time.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "fs/nodes/ask_file.h"
#include "fs/nodes/text_file.h"
#include "fs/report/metrics.h"
#include "fs/report/reports.h"

namespace ptc {
namespace {

struct File {
  const char* name;
  std::string (*text)(Tree&);
};
constexpr File kFiles[] = {{"version", version_text},    {"nodes.json", nodes_text},
                           {"daemon.json", daemon_text}, {"stats", stats_text},
                           {"requests", requests_text},  {"metrics", metrics_text}};

struct stat owner() {
  timespec now;
  ::clock_gettime(CLOCK_REALTIME, &now);
  return virtual_stat(S_IFDIR | 0755, ::geteuid(), ::getegid(), now, inode_of(".ptc"));
}

class DotPtcDir : public Node {
 public:
  explicit DotPtcDir(Tree& tree) : Node(".ptc"), tree_(tree) {}
  NameLife name_life() const override { return NameLife::kForever; }
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
