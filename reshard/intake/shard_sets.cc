// Shards of one file: which belong together, and whether all are there.
#include <algorithm>
#include <charconv>
#include <map>

#include "reshard/checkpoint/shard_index.h"
#include "reshard/intake/tree_format.h"
#include "store/base/file_kind.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json", kShardEnding = ".safetensors";

/// "model-00002-of-00007.safetensors": 2 of 7, of "model".
struct ShardNumber {
  std::string_view set;
  unsigned number = 0, of = 0;
};
std::optional<ShardNumber> shard_number_of(std::string_view path) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kDigits = 5, kTail = 1 + kDigits + kOf.size() + kDigits;
  if (!path.ends_with(kShardEnding)) return std::nullopt;
  path.remove_suffix(kShardEnding.size());
  if (path.size() < kTail) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kTail);
  ShardNumber shard{path.substr(0, path.size() - kTail)};
  auto read = [&](size_t at, unsigned& into) {
    const char *begin = tail.data() + at, *end = begin + kDigits;
    const auto [last, error] = std::from_chars(begin, end, into);
    return error == std::errc() && last == end;
  };
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf || !read(1, shard.number) ||
      !read(1 + kDigits + kOf.size(), shard.of) || shard.number < 1 || shard.number > shard.of)
    return std::nullopt;
  return shard;
}

using FilesByPath = std::map<std::pair<uint64_t, std::string>, Found*>;
FilesByPath files_by_path(std::vector<Found>& found) {
  FilesByPath by_path;
  for (Found& file : found) by_path[{file.rank, file.path}] = &file;
  return by_path;
}

/// Two nodes may have the same index.
Result<> mark_shard(const Found& index, std::vector<std::string> tensors, Found& shard) {
  if (shard.set_index == index.source() && shard.promised == tensors) return ok();
  if (!shard.set.empty())
    return invalid_argument("{} is a shard of two sets, of {} and of {}: remove one index",
                            shard.source(), shard.set_index, index.source());
  shard.set = index.path.substr(0, index.path.size() - std::string_view(".index.json").size());
  shard.set_index = index.source();
  shard.promised = std::move(tensors);
  return ok();
}

/// Marks the shards of sets with an index on this node. Those that an index names and are not among
/// `found` become what it asks of other nodes.
Result<> find_index_sets(int dir_fd, std::vector<Found>& found) {
  const FilesByPath by_path = files_by_path(found);
  for (Found& index : found) {
    if (index.node != nullptr || !index.path.ends_with(kIndexSuffix)) continue;
    PTC_TRY(auto text, read_text_file(dir_fd, index.source(), kMaxShardIndexBytes, FileKind::kOwn));
    auto parsed = parse_shard_index(text);
    if (parsed.has_error()) return std::move(parsed).error().with_context(index.source());
    index.index = true;
    index.asked.clear();
    const std::string directory = index.path.substr(0, index.path.rfind('/') + 1);
    for (auto& [name, tensors] : parsed.value()) {
      const std::string path = directory + name;
      const auto shard = by_path.find({index.rank, path});
      if (shard == by_path.end()) {
        index.asked.emplace(path, std::move(tensors));
        continue;
      }
      PTC_TRY(mark_shard(index, std::move(tensors), *shard->second));
    }
  }
  return ok();
}

/// With the files of all nodes: marks what the indexes on any ask of others. kInvalidArgument: a
/// shard is nowhere, or of two sets.
Result<> join_index_sets(std::vector<Found>& found) {
  const FilesByPath by_path = files_by_path(found);
  for (Found& index : found) {
    for (auto& [path, tensors] : index.asked) {
      const auto shard = by_path.find({index.rank, path});
      if (shard == by_path.end())
        return invalid_argument("{} names the shard {}, which is missing", index.source(), path);
      PTC_TRY(mark_shard(index, std::move(tensors), *shard->second));
    }
    index.asked.clear();
  }
  return ok();
}

/// Compares each index with its shards. A tensor that the index lacks is welcome: who loads a set
/// loads all that its shards hold.
Result<> check_index_sets(const std::vector<Found>& found) {
  std::map<std::pair<std::string_view, std::string_view>, const Found*>
      holder;  // index, tensor → shard
  for (const Found& shard : found)
    if (!shard.set_index.empty())
      for (const TensorEntry& tensor : shard.tensors)
        if (auto [it, is_new] = holder.try_emplace({shard.set_index, tensor.name}, &shard); !is_new)
          return invalid_argument("tensor {} is there twice, in {} and in {}",
                                  ptc::quoted(tensor.name), it->second->source(), shard.source());
  for (const Found& shard : found) {
    for (const std::string& tensor : shard.promised) {
      auto it = holder.find({shard.set_index, tensor});
      if (it != holder.end() && it->second == &shard) continue;
      return invalid_argument(
          "{} says that tensor {} is in {}, {}", shard.set_index, ptc::quoted(tensor),
          shard.source(),
          it == holder.end() ? "but no shard has it" : "but it is in " + it->second->source());
    }
  }
  return ok();
}

/// Shards without an index say by their names how many there are ("model-00002-of-00007"). Each
/// rank may have written one. Those of PyTorch's HuggingFaceStorageWriter ("shard-…") have parts of
/// tensors, and say so inside.
Result<> check_numbered_shards(const std::vector<Found>& found) {
  std::map<std::pair<std::string_view, unsigned>, std::map<unsigned, const Found*>> sets;
  for (const Found& file : found) {
    const std::string_view path = file.path;
    if (!file.set_index.empty() || path.substr(path.rfind('/') + 1).starts_with("shard-")) continue;
    if (const auto shard = shard_number_of(path))
      sets[{shard->set, shard->of}].try_emplace(shard->number, &file);
  }
  for (const auto& [set, shards] : sets) {
    if (shards.size() == set.second) continue;
    unsigned missing = 1;
    while (shards.contains(missing)) ++missing;
    return invalid_argument(
        "{} is one of {} shards by its name, and {}-{:05d}-of-{:05d}.safetensors is missing",
        shards.begin()->second->source(), set.second, set.first, missing, set.second);
  }
  return ok();
}

class SafetensorsSets final : public TreeFormat {
 public:
  std::string_view name() const override { return "sets of safetensors"; }

  Result<> find_sets(int dir_fd, std::vector<Found>& found) const override {
    return find_index_sets(dir_fd, found);
  }

  bool shows(const Found& file) const override {
    return file.at.find('/') == file.at.npos && file.at.ends_with(kShardEnding);
  }
  Result<> join_sets(std::vector<Found>& found) const override { return join_index_sets(found); }
  Result<> check_names(const std::vector<Found>& found) const override {
    return check_numbered_shards(found);
  }

  bool reads(const std::vector<Found>& found) const override {
    return std::any_of(found.begin(), found.end(), holds_tensors);
  }
  Result<> read(const FileReader& files, std::vector<Found>& found, Executor& executor,
                std::stop_token stop) const override {
    for (Found& file : found) file.has_tensors = holds_tensors(file);
    return read_files(files.dir_fd(), found, false, executor, std::move(stop));
  }

  Result<> check_whole(const std::vector<Found>& found) const override {
    return check_index_sets(found);
  }

 private:
  static bool holds_tensors(const Found& file) {
    return file.path.ends_with(kShardEnding) || !file.set.empty();
  }
};

}  // namespace

const TreeFormat& safetensors_sets() {
  static const SafetensorsSets sets;
  return sets;
}

}  // namespace ptc
