#include "fs/nodes/checkpoint/layouts_dir.h"

#include "fs/nodes/checkpoint/layout_dir.h"
#include "fs/nodes/checkpoint/served_dir.h"

namespace ptc {
namespace {

// No name: hidden with the first layout that `rm -r` takes away. A layout that comes in its place
// meanwhile has the same state, and must not keep the directory that goes.
constexpr const char* kBeingRemoved = "layouts/";

}  // namespace

FsResult<> LayoutsDir::remove_directory(const std::string& name) {
  PTC_TRY(FrozenDir::remove_directory(name));
  checkpoint()->hidden.hide(kBeingRemoved);
  return ok();
}

FsResult<struct stat> LayoutsDir::attributes() {
  PTC_TRY(auto stat, FrozenDir::attributes());
  stat.st_mtim = later(stat.st_mtim, job()->checkpoints_changed());
  return stat;
}

FsResult<NodeRef> LayoutsDir::find(const std::string& name) {
  if (const auto served = ServedLayout::from_name(name))
    return intern(std::make_shared<ServedDir>(job(), checkpoint(), child_key(name), *served));
  auto spec = job()->job().find_layout(*checkpoint()->checkpoint, name);
  if (!spec)
    return Errno{spec.error().code() == Code::kInvalidArgument ? ENOENT : to_errno(spec.error())};
  return intern(std::make_shared<LayoutDir>(job(), checkpoint(), child_key(name), spec.value()));
}

FsResult<std::vector<DirEntry>> LayoutsDir::entries() {
  std::vector<DirEntry> result;
  if (checkpoint()->hidden.hidden(kBeingRemoved)) return result;
  for (std::string& name : job()->job().materialised_layouts(*checkpoint()->checkpoint)) {
    result.push_back(entry(std::move(name), S_IFDIR));
  }
  return result;
}

}  // namespace ptc
