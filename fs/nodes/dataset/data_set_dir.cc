#include "fs/nodes/dataset/data_set_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "fs/nodes/dataset/generation_dir.h"
#include "fs/nodes/flipping_link.h"
#include "fs/nodes/job/layout_file.h"
#include "fs/nodes/text_file.h"

namespace ptc {
namespace {

constexpr const char* kHiddenAt = "dataset/";

// `rm -r` goes in this order: without order.json there is no head, and nothing in gen/ to go
// through.
constexpr OwnNamesDir::OwnName kDataNames[] = {
    {"head", OwnNamesDir::Kind::kLink},         {"order.json", OwnNamesDir::Kind::kSaved},
    {"source.json", OwnNamesDir::Kind::kSaved}, {"consumed", OwnNamesDir::Kind::kSaved},
    {"plan.json", OwnNamesDir::Kind::kText},    {"status.json", OwnNamesDir::Kind::kText},
    {"gen", OwnNamesDir::Kind::kDirectory}};

}  // namespace

DataSetDir::DataSetDir(JobViewRef view, HostFile file)
    : OwnNamesDir(view, std::move(file), view->key() + "/dataset", kDataNames, kHiddenAt),
      loading_{fmt::format("what is agreed on about the data set of job {}", view->job().name())} {}

FsResult<NodeRef> DataSetDir::make(const JobViewRef& job) {
  NodeTable& table = job->tree().table();
  if (NodeRef known = table.find(job->key() + "/dataset")) return known;
  PTC_TRY(auto file, job->copy_of(job->data_set_fd()));
  return table.intern(NodeRef(new DataSetDir(job, std::move(file))));
}

void DataSetDir::show_all(JobView& job) {
  for (const OwnName& one : kDataNames) job.hidden().show(std::string(kHiddenAt).append(one.name));
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

FsResult<> DataSetDir::ready() {
  PTC_TRY(as_decided(job().data_set().loaded()));
  job().await_data_set();
  return ok();
}

FsResult<NodeRef> DataSetDir::own_node(const std::string& name) {
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
  auto owner = [view] {
    return view->owner_of_text({&view->source(), &view->order(), &view->consumed()});
  };
  return table.intern(std::make_shared<TextFile>(key() + "/" + name, text, owner));
}

FsResult<> DataSetDir::unlink_own(const std::string& name) {
  hide(name);
  if (name == "order.json") job().touch_data_set();  // gen/ is empty
  return ok();
}

FsResult<> DataSetDir::remove_own_directory(const std::string& name) {
  if (!hides("order.json") && !job().data_set().generations().empty()) return Errno{ENOTEMPTY};
  hide(name);
  return ok();
}

}  // namespace ptc
