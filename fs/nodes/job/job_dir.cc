#include "fs/nodes/job/job_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fs/nodes/checkpoint/checkpoints_dir.h"
#include "fs/nodes/dataset/data_set_dir.h"
#include "fs/nodes/flipping_link.h"
#include "fs/nodes/job/incoming_dir.h"
#include "fs/nodes/job/layout_file.h"
#include "fs/nodes/text_file.h"

namespace ptc {
namespace {

// `rm -r` goes in this order: `current` must come before what it points to, or it would be gone by
// itself when rm gets to it.
constexpr OwnNamesDir::OwnName kOwnNames[] = {{"layout.json", OwnNamesDir::Kind::kSaved},
                                              {"rules.json", OwnNamesDir::Kind::kSaved},
                                              {"status.json", OwnNamesDir::Kind::kText},
                                              {"plan.json", OwnNamesDir::Kind::kText},
                                              {"plan.svg", OwnNamesDir::Kind::kText},
                                              {"current", OwnNamesDir::Kind::kLink},
                                              {"dataset", OwnNamesDir::Kind::kDirectory},
                                              {"incoming", OwnNamesDir::Kind::kDirectory},
                                              {"checkpoints", OwnNamesDir::Kind::kDirectory},
                                              {".events.jsonl", OwnNamesDir::Kind::kUnlisted}};

}  // namespace

JobDir::JobDir(JobViewRef view, HostFile file)
    : OwnNamesDir(view, std::move(file), view->key(), kOwnNames, "") {}

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
  job().conceal_opened("", change);
  PTC_TRY(RealNode::set_attributes(change, handle));
  if (!change.mode && !change.uid && !change.gid) return ok();
  PTC_TRY(job().agree_on("", change));
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
  return job().agree_on("", change);
}

FsResult<> JobDir::remove_xattr(const std::string& name) {
  if (name != kQuotaXattr) return RealNode::remove_xattr(name);
  FileAttributes change;
  change.quota = "";
  return job().agree_on("", change);
}

EditableFile* JobDir::editable(const std::string& name) {
  if (name == "layout.json") return &job().layout();
  if (name == "rules.json") return &job().rules();
  return nullptr;
}

FsResult<NodeRef> JobDir::own_node(const std::string& name) {
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
                                     : name == "plan.svg"  ? &Job::plan_svg
                                                           : &Job::events_text;
  auto text = [view, made] { return (view->job().*made)(); };
  // Made of these, or an error quotes what was wrong in them.
  auto owner = [view] {
    return view->owner_of_text(
        {&view->layout(), &view->rules(), &view->source(), &view->order(), &view->consumed()});
  };
  return table.intern(std::make_shared<TextFile>(view->key() + "/" + name, text, owner));
}

FsResult<NodeRef> JobDir::make_directory(const Caller& caller, const std::string& name,
                                         mode_t mode) {
  // After half an rm -r: making it again takes the removal back.
  if ((name != "incoming" && name != "dataset") || !hides(name))
    return OwnNamesDir::make_directory(caller, name, mode);
  if (name == "incoming") job().renew_incoming();
  else DataSetDir::show_all(job());
  show(name);
  return own_node(name);
}

FsResult<> JobDir::unlink_own(const std::string& name) {
  if (EditableFile* file = editable(name)) {
    const JobViewRef view = job().shared_from_this();
    PTC_TRY(view->tree().errands().ask(view->key() + "/" + name, "unlink", [view, file] {
      const FsResult<> removed = file->remove();
      view->catch_up();  // nobody may wait for it any more
      return removed;
    }));
    if (!file->exists()) return ok();
  }
  hide(name);
  return ok();
}

FsResult<> JobDir::remove_own_directory(const std::string& name) {
  PTC_TRY(auto node, shown(name));
  if (node == nullptr) return Errno{ENOENT};
  PTC_TRY(auto entries, node->list());
  if (!entries.empty()) return Errno{ENOTEMPTY};
  if (name == "dataset") {
    const JobViewRef view = job().shared_from_this();
    PTC_TRY(view->tree().errands().ask(view->key() + "/dataset", "rmdir",
                                       [view] { return as_decided(view->data_set().remove()); }));
  }
  hide(name);
  return ok();
}

}  // namespace ptc
