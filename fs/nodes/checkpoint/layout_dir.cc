#include "fs/nodes/checkpoint/layout_dir.h"

#include <charconv>

#include "fs/nodes/checkpoint/megatron_dir.h"
#include "fs/nodes/checkpoint/sources_file.h"

namespace ptc {

std::optional<uint64_t> parse_rank(const std::string& name) {
  uint64_t rank = 0;
  auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), rank);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  if (std::to_string(rank) != name) return std::nullopt;
  return rank;
}

FileSetSourceRef rank_files_of(const JobView& job, const CheckpointView& checkpoint,
                               const LayoutSpec& spec, uint64_t rank) {
  auto make = [of = checkpoint.checkpoint, spec, rank] { return of->rank_files(spec, rank); };
  return std::make_shared<FileSetSource>(job.tree().recent_sets(), std::move(make));
}

FsResult<NodeRef> LayoutDir::find(const std::string& name) {
  std::string key = child_key(name);
  if (name == "rank")
    return intern(std::make_shared<RanksDir>(job(), checkpoint(), std::move(key), spec_));
  if (name == "deepspeed") {
    if (NodeRef node = known(key)) return node;
    auto make = [of = checkpoint()->checkpoint, spec = spec_] { return of->deepspeed_files(spec); };
    auto source = std::make_shared<FileSetSource>(job()->tree().recent_sets(), std::move(make));
    return intern(
        std::make_shared<WholeSetDir>(job(), checkpoint(), std::move(key), std::move(source)));
  }
  if (name != "megatron" || !checkpoint()->checkpoint->is_megatron_tree()) return Errno{ENOENT};
  if (NodeRef node = known(key)) return node;
  PTC_TRY(auto tree, as_fs(checkpoint()->checkpoint->megatron_tree()));
  return intern(
      std::make_shared<MegatronDir>(job(), checkpoint(), std::move(key), spec_, *std::move(tree)));
}

FsResult<std::vector<DirEntry>> LayoutDir::entries() {
  std::vector<DirEntry> result{entry("rank", S_IFDIR), entry("deepspeed", S_IFDIR)};
  if (checkpoint()->checkpoint->is_megatron_tree()) result.push_back(entry("megatron", S_IFDIR));
  return result;
}

FsResult<struct stat> RanksDir::attributes() {
  struct stat stat = checkpoint()->attributes(S_IFDIR | 0755, path());
  stat.st_nlink = 2 + spec_.sizes.world_size();
  return stat;
}

FsResult<NodeRef> RanksDir::find(const std::string& name) {
  std::optional<uint64_t> rank = parse_rank(name);
  if (!rank || *rank >= spec_.sizes.world_size()) return Errno{ENOENT};
  std::string key = child_key(name);
  if (NodeRef node = known(key)) return node;
  FileSetSourceRef source = rank_files_of(*job(), *checkpoint(), spec_, *rank);
  return intern(std::make_shared<RankDir>(job(), checkpoint(), std::move(key), std::move(source),
                                          spec_, *rank));
}

FsResult<std::vector<DirEntry>> RanksDir::entries() {
  std::vector<DirEntry> result;
  for (uint64_t rank = 0; rank < spec_.sizes.world_size(); ++rank) {
    result.push_back(entry(std::to_string(rank), S_IFDIR));
  }
  return result;
}

FsResult<NodeRef> RankDir::find(const std::string& name) {
  if (name != "tensors") {
    FsResult<NodeRef> file = FileSetDir::find(name);
    if (file.has_value() || name != SourcesFile::kName) return file;
    return intern(std::make_shared<SourcesFile>(checkpoint(), child_key(name), source()));
  }
  std::string key = child_key(name);
  if (NodeRef node = known(key)) return node;
  auto make = [of = checkpoint()->checkpoint, spec = spec_, rank = rank_] {
    return of->rank_tensors(spec, rank);
  };
  auto source = std::make_shared<FileSetSource>(job()->tree().recent_sets(), std::move(make));
  return intern(
      std::make_shared<WholeSetDir>(job(), checkpoint(), std::move(key), std::move(source)));
}

FsResult<std::vector<DirEntry>> RankDir::entries() {
  PTC_TRY(auto files, FileSetDir::entries());
  std::erase_if(files, [](const DirEntry& entry) { return entry.name == "tensors"; });
  files.push_back(entry("tensors", S_IFDIR));
  return files;
}

}  // namespace ptc
