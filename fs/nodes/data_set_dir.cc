#include "fs/nodes/data_set_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fs/nodes/flipping_link.h"
#include "fs/nodes/generation_dir.h"
#include "fs/nodes/layout_file.h"
#include "fs/nodes/text_file.h"

namespace ptc {
namespace {

// As they are listed. `rm -r` goes in this order: without order.json there is no head, and nothing
// in gen/ to go through.
constexpr std::string_view kDataNames[] = {"head",      "order.json",  "source.json", "consumed",
                                           "plan.json", "status.json", "gen"};

bool is_data_name(std::string_view name) {
  return std::find(std::begin(kDataNames), std::end(kDataNames), name) != std::end(kDataNames);
}

std::string hidden_path(std::string_view name) { return fmt::format("dataset/{}", name); }

}  // namespace

DataSetDir::DataSetDir(JobViewRef view, HostFile file)
    : RealNode(view, std::move(file), view->key() + "/dataset"),
      loading_{fmt::format("what is agreed on about the data set of job {}", view->job().name())} {}

FsResult<NodeRef> DataSetDir::make(const JobViewRef& job) {
  NodeTable& table = job->tree().table();
  if (NodeRef known = table.find(job->key() + "/dataset")) return known;
  PTC_TRY(auto file, job->copy_of(job->data_set_fd()));
  return table.intern(NodeRef(new DataSetDir(job, std::move(file))));
}

void DataSetDir::show_all(JobView& job) {
  for (const std::string_view name : kDataNames) job.hidden().show(hidden_path(name));
}

bool DataSetDir::hides(const std::string& name) const {
  return job().hidden().hidden(hidden_path(name));
}

FsResult<struct stat> DataSetDir::attributes() {
  PTC_TRY(auto stat, RealNode::attributes());
  stat.st_mtim = later(later(stat.st_mtim, job().data_set_changed()), job().hidden().restored());
  stat.st_nlink += 1;  // gen/
  return stat;
}

EditableFile* DataSetDir::editable(const std::string& name) {
  if (name == "source.json") return &job().source();
  if (name == "order.json") return &job().order();
  if (name == "consumed") return &job().consumed();
  return nullptr;
}

bool DataSetDir::reserved(const std::string& name) const {
  return is_data_name(name) && name != "source.json" && name != "order.json" && name != "consumed";
}

FsResult<NodeRef> DataSetDir::own_name(const std::string& name) {
  PTC_TRY(as_decided(job().data_set().loaded()));
  if (hides(name)) return NodeRef();
  JobViewRef view = job().shared_from_this();
  NodeTable& table = view->tree().table();
  if (EditableFile* file = editable(name)) {
    if (!file->exists()) return NodeRef();
    return table.intern(std::make_shared<LayoutFile>(view, *file));
  }
  if (name == "gen") return table.intern(std::make_shared<GenerationsDir>(view));
  if (name == "head") {
    const std::vector<uint64_t> numbers = view->data_set().generations();
    if (numbers.empty() || hides("order.json")) return NodeRef();
    return FlippingLink::make(view, "dataset/head", "gen/" + generation_name(numbers.back()));
  }
  const bool plan = name == "plan.json";
  auto text = [view, plan] {
    return plan ? view->data_set().plan_json() : view->data_set().status_json();
  };
  auto owner = [view] { return view->directory(); };
  return table.intern(std::make_shared<TextFile>(key() + "/" + name, text, owner));
}

FsResult<NodeRef> DataSetDir::lookup(const std::string& name) {
  if (!is_data_name(name)) return RealNode::lookup(name);
  PTC_TRY(auto node, own_name(name));
  if (node == nullptr) return Errno{ENOENT};
  return node;
}

FsResult<std::vector<DirEntry>> DataSetDir::list() {
  PTC_TRY(as_decided(job().data_set().loaded()));
  PTC_TRY(auto entries, RealNode::list());
  std::erase_if(entries, [](const DirEntry& entry) { return is_data_name(entry.name); });
  for (uint64_t place = 1; std::string_view name : kDataNames) {
    const uint64_t own_place = place++;
    auto node = own_name(std::string(name));
    if (!node || node.value() == nullptr) continue;
    PTC_TRY(auto stat, node.value()->attributes());
    entries.push_back({std::string(name), stat.st_mode & S_IFMT, stat.st_ino, own_place});
  }
  return entries;
}

FsResult<Created> DataSetDir::create(const Caller& caller, const std::string& name, mode_t mode,
                                     int flags) {
  EditableFile* file = editable(name);
  if (file == nullptr) {
    if (reserved(name)) return Errno{EPERM};
    return RealNode::create(caller, name, mode, flags);
  }
  if (file->exists() && !hides(name)) return Errno{(flags & O_EXCL) != 0 ? EEXIST : ESTALE};
  PTC_TRY(auto handle, file->open(caller, flags, true, job().shared_from_this()));
  Opened opened{std::move(handle), IoMode::kDirect, 0};
  job().hidden().show(hidden_path(name));
  PTC_TRY(auto node, own_name(name));
  if (node == nullptr) return Errno{EIO};
  return Created{std::move(node), std::move(opened)};
}

FsResult<NodeRef> DataSetDir::refuse_own_name(const std::string& name) {
  PTC_TRY(auto node, own_name(name));
  return Errno{node == nullptr ? EPERM : EEXIST};
}

FsResult<NodeRef> DataSetDir::make_directory(const Caller& caller, const std::string& name,
                                             mode_t mode) {
  if (is_data_name(name)) return refuse_own_name(name);
  return RealNode::make_directory(caller, name, mode);
}

FsResult<NodeRef> DataSetDir::make_node(const Caller& caller, const std::string& name,
                                        mode_t mode) {
  if (is_data_name(name)) return refuse_own_name(name);
  return RealNode::make_node(caller, name, mode);
}

FsResult<NodeRef> DataSetDir::make_symlink(const Caller& caller, const std::string& name,
                                           const std::string& target) {
  if (is_data_name(name)) return refuse_own_name(name);
  return RealNode::make_symlink(caller, name, target);
}

FsResult<NodeRef> DataSetDir::make_link(Node& node, const std::string& name) {
  if (is_data_name(name)) return refuse_own_name(name);
  return RealNode::make_link(node, name);
}

FsResult<> DataSetDir::unlink(const std::string& name) {
  if (!is_data_name(name)) return RealNode::unlink(name);
  if (name == "gen") return Errno{EISDIR};
  job().hidden().hide(hidden_path(name));
  if (name == "order.json") job().touch_data_set();  // gen/ is empty
  return ok();
}

FsResult<> DataSetDir::remove_directory(const std::string& name) {
  if (name != "gen")
    return is_data_name(name) ? FsResult<>(Errno{ENOTDIR}) : RealNode::remove_directory(name);
  if (!hides("order.json") && !job().data_set().generations().empty()) return Errno{ENOTEMPTY};
  job().hidden().hide(hidden_path(name));
  return ok();
}

}  // namespace ptc
