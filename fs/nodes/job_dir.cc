#include "fs/nodes/job_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fs/nodes/checkpoints_dir.h"
#include "fs/nodes/data_set_dir.h"
#include "fs/nodes/flipping_link.h"
#include "fs/nodes/incoming_dir.h"
#include "fs/nodes/layout_file.h"
#include "fs/nodes/text_file.h"

namespace ptc {
namespace {

// As they are listed. `rm -r` goes in this order: `current` must come before what it points to, or
// it would be gone by itself when rm gets to it.
constexpr std::string_view kOwnNames[] = {"layout.json", "rules.json", "status.json",
                                          "plan.json",   "plan.svg",   "current",
                                          "dataset",     "incoming",   "checkpoints"};

bool own(std::string_view name) {
  return std::find(std::begin(kOwnNames), std::end(kOwnNames), name) != std::end(kOwnNames);
}

}  // namespace

JobDir::JobDir(JobViewRef view, HostFile file) : RealNode(view, std::move(file), view->key()) {}

FsResult<NodeRef> JobDir::make(const JobViewRef& job) {
  NodeTable& table = job->tree().table();
  if (NodeRef known = table.find(job->key())) return known;
  PTC_TRY(auto file, job->copy_of(job->files_fd()));
  return table.intern(NodeRef(new JobDir(job, std::move(file))));
}

FsResult<struct stat> JobDir::attributes() {
  PTC_TRY(auto stat, RealNode::attributes());
  stat.st_nlink += 1;  // checkpoints/; dataset/ counts as the directory it is
  stat.st_mtim = later(stat.st_mtim, job().hidden().restored());
  return stat;
}

FsResult<> JobDir::set_attributes(const AttributeChange& change, Handle* handle) {
  PTC_TRY(RealNode::set_attributes(change, handle));
  if (!change.mode && !change.uid && !change.gid) return ok();
  PTC_TRY(job().agree_on(""));
  // These have the job's owner and mode.
  Tree& tree = job().tree();
  for (const std::string& key : {checkpoints_key(job()), job().key() + "/dataset/gen"})
    if (NodeRef node = tree.table().find(key)) tree.drop_attributes(*node);
  return ok();
}

FsResult<std::string> JobDir::get_xattr(const std::string& name) {
  if (name != kQuotaXattr) return RealNode::get_xattr(name);
  const std::string quota = job().job().attributes()->of("").quota.value_or("");
  return quota.empty() ? FsResult<std::string>(Errno{ENODATA}) : FsResult<std::string>(quota);
}

FsResult<> JobDir::set_xattr(const std::string& name, std::string_view value, int flags) {
  if (name != kQuotaXattr) return RealNode::set_xattr(name, value, flags);
  if (!QuotaLimit::parse(value)) return Errno{EINVAL};
  FileAttributes change;
  change.quota = std::string(value);
  return as_decided(job().job().change_attributes("", change));
}

FsResult<> JobDir::remove_xattr(const std::string& name) {
  if (name != kQuotaXattr) return RealNode::remove_xattr(name);
  FileAttributes change;
  change.quota = "";
  return as_decided(job().job().change_attributes("", change));
}

EditableFile* JobDir::editable(const std::string& name) {
  if (name == "layout.json") return &job().layout();
  if (name == "rules.json") return &job().rules();
  return nullptr;
}

bool JobDir::reserved(const std::string& name) const {
  return own(name) && name != "layout.json" && name != "rules.json";
}

FsResult<NodeRef> JobDir::own_name(const std::string& name) {
  if (job().hidden().hidden(name)) return NodeRef();
  JobViewRef view = job().shared_from_this();
  NodeTable& table = job().tree().table();
  if (EditableFile* file = editable(name)) {
    if (!file->exists()) return NodeRef();
    return table.intern(std::make_shared<LayoutFile>(view, *file));
  }
  if (name == "checkpoints") return CheckpointsDir::make(view);
  if (name == "current") {
    std::optional<std::string> target = view->job().current_target();
    if (!target) return NodeRef();
    return FlippingLink::make(view, name, std::move(*target));
  }
  if (name == "dataset") return DataSetDir::make(view);
  if (name == "incoming") {
    std::string key = view->incoming_key();
    if (NodeRef known = table.find(key)) return known;
    PTC_TRY(auto file, view->copy_of(view->incoming_fd()));
    return table.intern(NodeRef(new IncomingDir(view, std::move(file), std::move(key))));
  }
  std::string (Job::*made)() const = name == "status.json" ? &Job::status_json
                                     : name == "plan.json" ? &Job::plan_json
                                                           : &Job::plan_svg;
  auto text = [view, made] { return (view->job().*made)(); };
  auto owner = [view] { return view->directory(); };
  return table.intern(std::make_shared<TextFile>(view->key() + "/" + name, text, owner));
}

FsResult<NodeRef> JobDir::lookup(const std::string& name) {
  if (!own(name)) return RealNode::lookup(name);
  PTC_TRY(auto node, own_name(name));
  if (node == nullptr) return Errno{ENOENT};
  return node;
}

FsResult<std::vector<DirEntry>> JobDir::list() {
  PTC_TRY(auto entries, RealNode::list());
  std::erase_if(entries, [](const DirEntry& entry) { return own(entry.name); });
  for (uint64_t place = 1; std::string_view name : kOwnNames) {
    uint64_t own_place = place++;
    auto node = own_name(std::string(name));
    if (!node || node.value() == nullptr) continue;
    PTC_TRY(auto stat, node.value()->attributes());
    entries.push_back({std::string(name), stat.st_mode & S_IFMT, stat.st_ino, own_place});
  }
  return entries;
}

FsResult<Created> JobDir::create(const Caller& caller, const std::string& name, mode_t mode,
                                 int flags) {
  EditableFile* file = editable(name);
  if (file == nullptr) {
    if (reserved(name)) return Errno{EPERM};
    return RealNode::create(caller, name, mode, flags);
  }
  bool hidden = job().hidden().hidden(name);
  if (file->exists() && !hidden) return Errno{(flags & O_EXCL) != 0 ? EEXIST : ESTALE};
  PTC_TRY(auto handle, file->open(caller, flags, true, job().shared_from_this()));
  Opened opened{std::move(handle), IoMode::kDirect, 0};
  job().hidden().show(name);
  PTC_TRY(auto node, own_name(name));
  if (node == nullptr) return Errno{EIO};
  return Created{std::move(node), std::move(opened)};
}

FsResult<NodeRef> JobDir::refuse_own_name(const std::string& name) {
  PTC_TRY(auto node, own_name(name));
  return Errno{node == nullptr ? EPERM : EEXIST};
}

FsResult<NodeRef> JobDir::make_directory(const Caller& caller, const std::string& name,
                                         mode_t mode) {
  // After half an rm -r: making it again takes the removal back.
  if (name == "incoming" && job().hidden().hidden(name)) {
    job().renew_incoming();
    job().hidden().show(name);
    return own_name(name);
  }
  if (name == "dataset" && job().hidden().hidden(name)) {
    DataSetDir::show_all(job());
    job().hidden().show(name);
    return own_name(name);
  }
  if (own(name)) return refuse_own_name(name);
  return RealNode::make_directory(caller, name, mode);
}

FsResult<NodeRef> JobDir::make_node(const Caller& caller, const std::string& name, mode_t mode) {
  if (own(name)) return refuse_own_name(name);
  return RealNode::make_node(caller, name, mode);
}

FsResult<NodeRef> JobDir::make_symlink(const Caller& caller, const std::string& name,
                                       const std::string& target) {
  if (own(name)) return refuse_own_name(name);
  return RealNode::make_symlink(caller, name, target);
}

FsResult<NodeRef> JobDir::make_link(Node& node, const std::string& name) {
  if (own(name)) return refuse_own_name(name);
  return RealNode::make_link(node, name);
}

FsResult<> JobDir::unlink(const std::string& name) {
  if (!own(name)) return RealNode::unlink(name);
  if (name == "incoming" || name == "checkpoints" || name == "dataset") return Errno{EISDIR};
  if (EditableFile* file = editable(name)) {
    PTC_TRY(file->remove());
    if (!file->exists()) return ok();
  }
  job().hidden().hide(name);
  return ok();
}

FsResult<> JobDir::remove_directory(const std::string& name) {
  if (!own(name)) return RealNode::remove_directory(name);
  PTC_TRY(auto node, own_name(name));
  if (node == nullptr) return Errno{ENOENT};
  PTC_TRY(auto entries, node->list());
  if (!entries.empty()) return Errno{ENOTEMPTY};
  if (name == "dataset") {
    PTC_TRY(as_decided(job().data_set().remove()));
  }
  job().hidden().hide(name);
  return ok();
}

}  // namespace ptc
