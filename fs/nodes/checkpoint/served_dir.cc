#include "fs/nodes/checkpoint/served_dir.h"

#include "fs/nodes/checkpoint/layout_dir.h"

namespace ptc {
namespace {

constexpr const char* kServe = "serve";
constexpr const char* kRank = "rank";

FsResult<NodeRef> make_files(const JobViewRef& job,
                             const std::shared_ptr<CheckpointView>& checkpoint, std::string key,
                             const ServedLayout& layout, std::optional<uint32_t> worker) {
  auto make = [of = checkpoint->checkpoint, layout, worker] {
    return of->served_files(layout, worker);
  };
  auto source = std::make_shared<FileSetSource>(job->tree().recent_sets(), std::move(make));
  PTC_TRY(const FileSetRef files, as_fs(source->get()));
  return NodeRef(
      std::make_shared<FileSetDir>(job, checkpoint, std::move(key), std::move(source), *files, ""));
}

/// layouts/vllm-tp8/rank/: a directory a worker.
class WorkersDir : public FrozenDir {
 public:
  WorkersDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
             const ServedLayout& layout)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)), layout_(layout) {}

 private:
  FsResult<NodeRef> find(const std::string& name) override {
    const std::optional<uint64_t> worker = parse_rank(name);
    if (!worker || *worker >= layout_.workers()) return Errno{ENOENT};
    std::string key = child_key(name);
    if (NodeRef node = known(key)) return node;
    PTC_TRY(NodeRef files, make_files(job(), checkpoint(), std::move(key), layout_,
                                      static_cast<uint32_t>(*worker)));
    return intern(std::move(files));
  }

  FsResult<std::vector<DirEntry>> entries() override {
    std::vector<DirEntry> result;
    for (uint32_t worker = 0; worker < layout_.workers(); ++worker)
      result.push_back(entry(std::to_string(worker), S_IFDIR));
    return result;
  }

  FsResult<std::optional<uint64_t>> subdirectories() override {
    return std::optional<uint64_t>(layout_.workers());
  }

  const ServedLayout layout_;
};

}  // namespace

FsResult<NodeRef> ServedDir::find(const std::string& name) {
  std::string key = child_key(name);
  if (NodeRef node = known(key)) return node;
  if (name == kRank)
    return intern(std::make_shared<WorkersDir>(job(), checkpoint(), std::move(key), layout_));
  if (name != kServe || !layout_.in_one_directory()) return Errno{ENOENT};
  PTC_TRY(NodeRef files,
          make_files(job(), checkpoint(), std::move(key), layout_, /*worker=*/std::nullopt));
  return intern(std::move(files));
}

FsResult<std::vector<DirEntry>> ServedDir::entries() {
  std::vector<DirEntry> result{entry(kRank, S_IFDIR)};
  if (layout_.in_one_directory()) result.push_back(entry(kServe, S_IFDIR));
  return result;
}

}  // namespace ptc
