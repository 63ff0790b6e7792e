#include "fs/nodes/checkpoint/megatron_dir.h"

#include "fs/nodes/checkpoint/file_set_dir.h"
#include "fs/nodes/checkpoint/frozen_text.h"
#include "fs/nodes/checkpoint/layout_dir.h"
#include "reshard/checkpoint/megatron_names.h"

namespace ptc {
namespace {

/// mp_rank_01_002/: without the tree's own file, which is in the first rank's directory.
class MegatronRankDir : public FileSetDir {
 public:
  using FileSetDir::FileSetDir;

 private:
  FsResult<NodeRef> find(const std::string& name) override {
    if (name == kMegatronTracker) return Errno{ENOENT};
    return FileSetDir::find(name);
  }
  FsResult<std::vector<DirEntry>> entries() override {
    PTC_TRY(auto files, FileSetDir::entries());
    std::erase_if(files, [](const DirEntry& entry) { return entry.name == kMegatronTracker; });
    return files;
  }
};

/// iter_0000100/: a directory a tensor-parallel rank, stage and expert rank.
class MegatronIterationDir : public FrozenDir {
 public:
  MegatronIterationDir(JobViewRef job, std::shared_ptr<CheckpointView> checkpoint, std::string key,
                       LayoutSpec spec, std::string in_rank)
      : FrozenDir(std::move(job), std::move(checkpoint), std::move(key)),
        spec_(std::move(spec)),
        in_rank_(std::move(in_rank)) {}

 private:
  FsResult<NodeRef> find(const std::string& name) override {
    const std::vector<uint32_t> numbers = megatron_rank_numbers(name);
    const auto coords = numbers.empty() ? std::nullopt : megatron_coords(spec_.sizes, numbers);
    // So that one rank has one path.
    if (!coords || megatron_rank_name(spec_.sizes, *coords) != name) return Errno{ENOENT};
    std::string key = child_key(name);
    if (NodeRef node = known(key)) return node;
    FileSetSourceRef source =
        rank_files_of(*job(), *checkpoint(), spec_, spec_.order.global_rank(spec_.sizes, *coords));
    PTC_TRY(const FileSetRef files, as_fs(source->get()));
    return intern(std::make_shared<MegatronRankDir>(job(), checkpoint(), std::move(key),
                                                    std::move(source), *files, in_rank_));
  }

  FsResult<std::vector<DirEntry>> entries() override {
    std::vector<DirEntry> result;
    RankCoords at;
    for (at.tp = 0; at.tp < spec_.sizes.tp; ++at.tp)
      for (at.pp = 0; at.pp < spec_.sizes.pp; ++at.pp)
        for (at.ep = 0; at.ep < spec_.sizes.ep; ++at.ep)
          result.push_back(entry(megatron_rank_name(spec_.sizes, at), S_IFDIR));
    return result;
  }

  FsResult<std::optional<uint64_t>> subdirectories() override {
    return std::optional(uint64_t{spec_.sizes.tp} * spec_.sizes.pp * spec_.sizes.ep);
  }

  const LayoutSpec spec_;
  const std::string in_rank_;
};

}  // namespace

FsResult<NodeRef> MegatronDir::find(const std::string& name) {
  if (name == megatron_iteration_name(tree_.iteration) && tree_.is_distributed) {
    std::string key = child_key(name);
    if (NodeRef node = known(key)) return node;
    auto make = [of = checkpoint()->checkpoint] { return of->dcp_files(); };
    auto source = std::make_shared<FileSetSource>(job()->tree().recent_sets(), std::move(make));
    return intern(
        std::make_shared<WholeSetDir>(job(), checkpoint(), std::move(key), std::move(source)));
  }
  if (name == megatron_iteration_name(tree_.iteration))
    return intern(std::make_shared<MegatronIterationDir>(job(), checkpoint(), child_key(name),
                                                         spec_, tree_.in_rank));
  if (name != kMegatronTracker) return Errno{ENOENT};
  return intern(std::make_shared<FrozenText>(
      checkpoint(), child_key(name),
      [text = megatron_tracker_text(tree_.iteration)](const Checkpoint&) { return text; }, false));
}

FsResult<std::vector<DirEntry>> MegatronDir::entries() {
  return std::vector<DirEntry>{entry(megatron_iteration_name(tree_.iteration), S_IFDIR),
                               entry(std::string(kMegatronTracker), S_IFREG)};
}

}  // namespace ptc
