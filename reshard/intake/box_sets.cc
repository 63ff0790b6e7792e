#include "reshard/intake/box_sets.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "reshard/checkpoint/shard_boxes.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kSetName = "model.safetensors";
constexpr std::string_view kShardName = "shard-";  // what the writer calls the files of its ranks

std::string directory_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

bool begins_elsewhere(const Box& box) {
  return std::any_of(box.offset.begin(), box.offset.end(),
                     [](uint64_t offset) { return offset > 0; });
}

bool is_shard(const Found& file) {
  return std::string_view(file.path).substr(directory_of(file.path).size()).starts_with(kShardName);
}

/// Whether the files hold parts of tensors.
bool are_shards(const std::vector<Found*>& files) {
  std::unordered_set<std::string_view> names;
  for (const Found* file : files) {
    if (is_shard(*file)) return true;
    if (std::any_of(file->boxes.begin(), file->boxes.end(), begins_elsewhere)) return true;
    for (const TensorEntry& tensor : file->tensors)
      if (!names.insert(tensor.name).second) return true;
  }
  return false;
}

}  // namespace

Result<> find_box_sets(std::vector<Found>& found) {
  std::map<std::pair<uint64_t, std::string>, std::vector<Found*>> groups;
  std::set<std::pair<uint64_t, std::string_view>> paths;
  for (Found& file : found) {
    paths.emplace(file.rank, file.path);
    if (file.boxes.empty()) continue;
    if (!file.set.empty()) {
      if (std::any_of(file.boxes.begin(), file.boxes.end(), begins_elsewhere))
        return invalid_argument(
            "{} holds parts of tensors (DCP_SHARDING_INFO), and {} says it has all of them: remove "
            "the "
            "index",
            file.source(), file.set_index);
      file.boxes.clear();
      file.said.clear();
      continue;
    }
    if (file.spread() && !is_shard(file)) continue;
    file.said.clear();
    groups[{file.rank, directory_of(file.path)}].push_back(&file);
  }
  for (auto& [where, files] : groups) {
    if (!are_shards(files)) {
      for (Found* file : files) file->boxes.clear();
      continue;
    }
    const std::string set = where.second + std::string(kSetName);
    if (paths.contains({where.first, set}))
      return invalid_argument("{} is a shard of {}, which is there too: remove one",
                              files.front()->source(), set);
    for (Found* file : files) file->set = set;
  }
  return ok();
}

Result<> settle_spread(const Model::Inferred& inferred, std::vector<Found>& found) {
  const std::vector<TensorInfo>& tensors = inferred.model.tensors();
  std::vector<std::vector<Box>> boxes(tensors.size());
  for (Found& file : found) {
    const std::string& path = file.set.empty() ? file.path : file.set;
    if (!file.has_tensors || !inferred.cut_otherwise.contains(path)) {
      if (file.spread()) file.boxes.clear();
      continue;
    }
    if (!file.spread() && !file.tensors.empty())
      return invalid_argument(
          "{} does not say which parts of its tensors it has (DCP_SHARDING_INFO), as those of "
          "other ranks do, and these are not cut as the layout says",
          file.source());
    file.set = file.path;
    for (size_t i = 0; i < file.tensors.size(); ++i)
      boxes[file.model_tensor[i]].push_back(file.boxes[i]);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (boxes[i].empty()) continue;
    auto all = union_of_boxes(std::move(boxes[i]));
    if (all.has_error())
      return std::move(all).error().with_context(
          fmt::format("{}: tensor {}", tensors[i].file, ptc::quoted(tensors[i].name)));
    const Box whole = Box::whole(tensors[i].shape);
    if (all.value() == whole || whole.empty()) continue;
    return invalid_argument("{}: tensor {} is {}, and all ranks together have {} of it",
                            tensors[i].file, ptc::quoted(tensors[i].name),
                            tensors[i].shape.to_string(),
                            all.value().empty() ? "nothing" : all.value().to_string());
  }
  return ok();
}

bool KeptBoxes::adds(const Found& file) {
  bool any = false;
  for (size_t i = 0; i < file.boxes.size(); ++i)
    if (!file.boxes[i].empty()) any |= boxes_[file.model_tensor[i]].insert(file.boxes[i]).second;
  return any;
}

}  // namespace ptc
