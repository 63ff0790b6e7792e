#include "reshard/intake/flat_files.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/intake/tree_format.h"

namespace ptc {
namespace {

constexpr std::string_view kWhereRanksGo =
    "put the files of each into rank/0/, rank/1/ …, or, if a single process wrote both, into "
    "rank/0/";

std::string named(const Found& file, const std::string& here) {
  const std::string& node = file.node != nullptr ? file.node->node : here;
  return node.empty() ? file.source() : fmt::format("{} on node {}", file.source(), node);
}

Error of_several_ranks(const Found& one, const Found& other, const std::string& here) {
  return invalid_argument("{} and {} may be of several ranks: {}", named(one, here),
                          named(other, here), kWhereRanksGo);
}

/// "model-00002-of-00007.safetensors": 2 of 7, of "model-of-.safetensors".
struct NumberedFile {
  std::string set;
  unsigned number = 0, of = 0;
};
std::optional<NumberedFile> numbered_file(std::string_view path) {
  constexpr std::string_view kOf = "-of-", kDigits = "0123456789";
  const size_t middle = path.rfind(kOf);
  if (middle == path.npos || middle < path.rfind('/') + 1) return std::nullopt;
  const size_t before = path.find_last_not_of(kDigits, middle - 1);
  const size_t after = path.find_first_not_of(kDigits, middle + kOf.size());
  if (before == path.npos || (path[before] != '-' && path[before] != '_') || after == path.npos ||
      path[after] != '.')
    return std::nullopt;
  auto read = [](std::string_view text, unsigned& into) {
    const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), into);
    return !text.empty() && error == std::errc();
  };
  NumberedFile file;
  file.set = fmt::format("{}{}{}", path.substr(0, before), kOf, path.substr(after));
  if (!read(path.substr(before + 1, middle - before - 1), file.number) ||
      !read(path.substr(middle + kOf.size(), after - middle - kOf.size()), file.of))
    return std::nullopt;
  return file;
}

/// Files that an index, what they say of their parts, or their numbers make one.
struct FileSet {
  std::string name;
  const Found* first = nullptr;
  unsigned of = 0;  // by their numbers
  std::set<unsigned> numbers;
  std::set<const FilesElsewhere*> nodes;  // null: here
};

bool includes(const std::set<const FilesElsewhere*>& all,
              const std::set<const FilesElsewhere*>& some) {
  return std::includes(all.begin(), all.end(), some.begin(), some.end(), all.key_comp());
}

std::pair<std::string, std::string> set_key(const Found& file) {
  if (!file.set.empty()) return {file.set, file.set_index};
  if (const auto numbered = numbered_file(file.path))
    return {numbered->set, std::to_string(numbered->of)};
  return {file.path, ""};
}

/// Whether tensors of a process are in it, be they those of the checkpoint or not. `unread_torch`:
/// torch's files on this node have not been read; of another node's without tensors either these
/// are known, or it has others with tensors.
bool has_weights(const Found& file, bool unread_torch) {
  if (file.has_tensors || !file.tensors.empty()) return !file.tensors.empty();
  if (tree_of_part(file.path) != nullptr || is_named_for_tensors(file.path)) return true;
  return unread_torch && file.node == nullptr && may_be_torch(file.path);
}

std::string_view folder_in(std::string_view path) { return path.substr(0, path.rfind('/') + 1); }

/// Up to its rank/<r>/, if it is below one; of the outermost: "step1/" of "step1/rank/0/w.pt".
std::optional<std::string_view> before_rank(std::string_view path) {
  constexpr std::string_view kRank = "rank/", kDigits = "0123456789";
  for (size_t at = path.find(kRank); at != path.npos; at = path.find(kRank, at + 1)) {
    if (at > 0 && path[at - 1] != '/') continue;
    const size_t number = at + kRank.size(), end = path.find_first_not_of(kDigits, number);
    if (end != number && end != path.npos && path[end] == '/') return path.substr(0, at);
  }
  return std::nullopt;
}

/// Parameters of flat files that are no parts, by directory and name.
class Parameters {
 public:
  struct Held {
    const Found* file;
    size_t position;
  };
  /// Who had it before; null: nobody.
  const Held* add(const Found& file, size_t position) {
    const auto [known, is_new] =
        held_[folder_in(file.path)].try_emplace(file.tensors[position].name, Held{&file, position});
    return is_new ? nullptr : &known->second;
  }

 private:
  std::map<std::string_view, std::unordered_map<std::string_view, Held>> held_;
};

/// Calls with each parameter that two files have.
template <class Check>
Result<> for_each_twice(const std::vector<Found>& found, const Check& check) {
  Parameters parameters;
  for (const Found& file : found) {
    if (!in_place_of_ranks(file) || !file.has_tensors || !file.boxes.empty()) continue;
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const Parameters::Held* other = parameters.add(file, i);
      if (other == nullptr) continue;
      PTC_TRY(check(*other->file, other->position, file, i));
    }
  }
  return ok();
}

}  // namespace

bool in_place_of_ranks(const Found& file) {
  return !file.at.empty() && !file.at.starts_with("rank/");
}

bool is_flat(const std::vector<Found>& found) {
  return std::any_of(found.begin(), found.end(), in_place_of_ranks) &&
         find_tree([&](const TreeFormat& tree) { return tree.says_ranks(found); }) == nullptr;
}

Result<> check_places(const std::vector<Found>& found, const std::string& here) {
  const auto flat = std::find_if(found.begin(), found.end(), in_place_of_ranks);
  if (flat == found.end()) return ok();
  const std::string top = flat->at.substr(0, flat->at.find('/'));
  const std::string& node = flat->node != nullptr ? flat->node->node : here;
  const std::string where = node.empty() ? "" : " on node " + node;
  const auto ranked = std::find_if_not(found.begin(), found.end(), in_place_of_ranks);
  if (ranked != found.end())
    return invalid_argument(
        "'{}'{} is not under rank/<r>/, and {} is: a process' files belong into rank/0/, rank/1/ … "
        "on whatever node (a single process: rank/0/)",
        top, where, named(*ranked, here));
  const auto shows = [](const Found& file) {
    return find_tree([&](const TreeFormat& tree) { return tree.shows(file); }) != nullptr;
  };
  if (std::any_of(found.begin(), found.end(), shows)) return ok();
  return invalid_argument(
      "'{}'{} is not under rank/<r>/: a process' files belong into rank/0/, rank/1/ … (a single "
      "process: rank/0/)",
      top, where);
}

Result<> check_one_process(const std::vector<Found>& found, bool flat, const std::string& here) {
  std::map<std::pair<std::string, std::string>, FileSet> sets;
  std::vector<const Found*> weights;
  std::set<const FilesElsewhere*> nodes;  // with files that no other says are of one save
  const bool unread_torch = !torch_files_count(found);
  for (const Found& file : found) {
    if (!in_place_of_ranks(file) || !has_weights(file, unread_torch)) continue;
    weights.push_back(&file);
    auto key = set_key(file);
    FileSet& set = sets[key];
    if (set.first == nullptr) set.first = &file;
    set.name = std::move(key.first);
    set.nodes.insert(file.node);
    if (!file.told) nodes.insert(file.node);
    if (!file.has_tensors || !file.set.empty()) continue;
    if (const auto numbered = numbered_file(file.path)) {
      set.of = numbered->of;
      set.numbers.insert(numbered->number);
    }
  }
  std::map<std::string, const Found*> kinds;  // names but for their numbers
  for (const auto& [key, set] : sets) {
    const std::string& path = set.first->path;
    // An array's name is its file's.
    if (!flat || !set.first->has_tensors || is_one_array(path) || path.find('/') != path.npos)
      continue;
    const auto [other, is_new] = kinds.try_emplace(without_numbers(set.name), set.first);
    if (!is_new) return of_several_ranks(*other->second, *set.first, here);
  }
  const bool bound = std::any_of(
      sets.begin(), sets.end(), [&](const auto& set) { return includes(set.second.nodes, nodes); });
  if (!bound && nodes.size() > 1) {
    const Found& one = *sets.begin()->second.first;
    const auto& with_it = sets.begin()->second.nodes;
    const auto other = std::find_if(weights.begin(), weights.end(), [&](const Found* file) {
      return !file->told && !with_it.contains(file->node);
    });
    return of_several_ranks(one, **other, here);
  }
  if (!flat) return ok();
  for (const Found* file : weights) {
    const auto before = before_rank(file->path);
    if (before && !is_one_array(file->path))
      return invalid_argument(
          "{} is of a rank, by its name, and a checkpoint's rank/ is right in its directory: "
          "commit "
          "{}rank/ as one of its own, with no files beside it but a layout.json",
          named(*file, here), *before);
  }
  for (const auto& [key, set] : sets) {
    if (set.numbers.size() == set.of) continue;
    unsigned missing = 1;
    while (set.numbers.contains(missing)) ++missing;
    return invalid_argument("{} is one of {} files by its name, and number {} is missing",
                            named(*set.first, here), set.of, missing);
  }
  return for_each_twice(
      found, [&](const Found& one, size_t i, const Found& other, size_t j) -> Result<> {
        if (one.tensors[i].shape == other.tensors[j].shape) return ok();
        return invalid_argument("{} is {} in {} and {} in {}: they may be of several ranks: {}",
                                one.tensors[i].name, one.tensors[i].shape.to_string(),
                                named(one, here), other.tensors[j].shape.to_string(),
                                named(other, here), kWhereRanksGo);
      });
}

Result<> check_same_values(const std::vector<Found>& found, const std::string& here) {
  auto sum_of = [](const Found& file, size_t position) {
    Checksum all;
    for (const Checksum& sum : file.sums[position]) all += sum;
    return all;
  };
  return for_each_twice(
      found, [&](const Found& one, size_t i, const Found& other, size_t j) -> Result<> {
        // A copy of another type is no rank's part.
        if (one.tensors[i].dtype != other.tensors[j].dtype || sum_of(one, i) == sum_of(other, j))
          return ok();
        return invalid_argument(
            "{} has other values in {} than in {}: they may be of several ranks: {}",
            one.tensors[i].name, named(other, here), named(one, here), kWhereRanksGo);
      });
}

}  // namespace ptc
