// DeepSpeed's checkpoints among the files that are committed: what its engine saves (ZeRO 1, 2 and
// 3), and the universal folders that its ds_to_universal.py makes of that.
//   <tag>/mp_rank_00_model_states.pt
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_optim_states.pt        (or bf16_zero_…, fp16_zero_…)
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_model_states.pt        (stage 3, in the first's place)
//   <tag>_universal/zero/<parameter>/<fp32, exp_avg, …>.pt    (beside the model's)
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/intake/dcp_files.h"
#include "reshard/intake/deepspeed_reader.h"
#include "reshard/intake/tree_format.h"
#include "store/base/json.h"

namespace ptc {
namespace {

using DeepSpeedKind = DeepSpeedName::Kind;

constexpr std::string_view kOptimizerState = "zero/optimizer_state.pt";  // of a universal folder

/// Of several folders beside each other the one that `latest` names, as DeepSpeed loads. nullopt:
/// there are not several, or no such file.
Result<std::optional<std::string>> latest_folder(const FileReader& files,
                                                 const std::vector<Found>& found) {
  std::set<std::string_view> folders, above;
  for (const Found& file : found)
    if (const auto name = deepspeed_name(file.path); name && folders.insert(name->folder).second) {
      std::string_view folder = name->folder;
      if (!folder.empty()) folder.remove_suffix(1);
      above.insert(folder.substr(0, folder.rfind('/') + 1));
    }
  if (folders.size() < 2 || above.size() > 1 || folders.contains("")) return std::nullopt;
  for (const std::string_view file_name : {"latest", "latest_universal"}) {
    const std::string path = std::string(*above.begin()) + std::string(file_name);
    const Found* first = nullptr;
    std::string folder;
    for (const Found& file : found) {
      constexpr uint64_t kMostBytes = 4096;
      if (file.path != path || file.version.bytes > kMostBytes) continue;
      PTC_TRY(std::string text, files.text_of(file));
      text.erase(text.find_last_not_of(" \t\r\n") + 1);
      text.erase(0, text.find_first_not_of(" \t\r\n"));
      text = fmt::format("{}{}/", *above.begin(), text);
      if (first != nullptr && text != folder)
        return invalid_argument("{} and {} name different directories", first->source(),
                                file.source());
      if (!folders.contains(text))
        return invalid_argument("{} names {}, and there is no checkpoint of DeepSpeed's in it",
                                file.source(), ptc::quoted(text));
      first = &file;
      folder = std::move(text);
    }
    if (first != nullptr) return std::optional(std::move(folder));
  }
  return std::nullopt;
}

/// `folder`: of several the one that counts.
Result<DeepSpeedTree> collect_tree(std::vector<Found>& found,
                                   const std::optional<std::string>& folder) {
  DeepSpeedTree tree;
  const Found* first = nullptr;
  const auto cut_unsaid = [](const Found& file) {
    return invalid_argument(
        "{} is of a model that is cut over several ranks (tensor or pipeline parallel), and its "
        "flat state does not say how: {}",
        file.source(), kMakeUniversal);
  };
  for (Found& file : found) {
    const auto name = deepspeed_name(file.path);
    if (folder && file.path == *folder + std::string(kOptimizerState)) tree.optimizer = &file;
    if (!name || (folder && name->folder != *folder)) continue;
    if (name->kind == DeepSpeedKind::kExpert)
      return invalid_argument(
          "{} has experts of DeepSpeed's MoE, whose files are not put together: save the module's "
          "state_dict() in files of your own (tools/python/README.md)",
          file.source());
    if (first == nullptr) {
      first = &file;
      tree.folder = name->folder;
    }
    if (name->folder != tree.folder)
      return invalid_argument(
          "{} and {} are of two checkpoints of DeepSpeed's: move one away, or have a file 'latest' "
          "beside their directories that names one",
          first->source(), file.source());
    const auto add = [&](auto& files, auto&& key) -> Result<> {
      const auto [known, is_new] = files.try_emplace(key, &file);
      if (is_new) return ok();
      return invalid_argument("{} and {} are the same file of one checkpoint: remove one",
                              known->second->source(), file.source());
    };
    if (name->kind == DeepSpeedKind::kUniversal) {
      PTC_TRY(add(tree.universal[std::string(name->parameter)], std::string(name->state)));
    } else if (name->kind == DeepSpeedKind::kModel) {
      PTC_TRY(add(tree.models, name->mp));
    } else if (name->mp > 0 && name->kind == DeepSpeedKind::kZero) {
      return cut_unsaid(file);
    } else if (name->mp > 0) {
      tree.again.push_back(&file);
    } else {
      PTC_TRY(add(name->kind == DeepSpeedKind::kZero ? tree.zero : tree.zero_models, name->dp));
    }
  }
  const bool has_again = !tree.universal.empty() && !tree.models.empty() && tree.zero.empty();
  if (!has_again && !tree.again.empty()) return cut_unsaid(*tree.again.front());
  if (has_again)
    for (const auto& [dp, file] : std::exchange(tree.zero_models, {})) tree.again.push_back(file);
  if (!tree.zero.empty() && !tree.universal.empty())
    return invalid_argument("{} is beside a universal zero/, which has the same: remove one",
                            tree.zero.begin()->second->source());
  if (folder && !tree.universal.empty() && tree.optimizer == nullptr)
    return invalid_argument("{}{} is missing", *folder, kOptimizerState);
  return tree;
}

class DeepSpeedTrees final : public TreeFormat {
 public:
  std::string_view name() const override { return "DeepSpeed's folders"; }

  bool is_there(const NamesThere& names, bool /*beside_others*/) const override {
    return std::any_of(names.top().begin(), names.top().end(), [&](const std::string& name) {
      if (deepspeed_name(name)) return true;
      const auto below = names.in(name);
      return below && std::any_of(below->begin(), below->end(), [&](const std::string& file) {
               return deepspeed_name(name + "/" + file).has_value();
             });
    });
  }

  bool shows(const Found& file) const override {
    return std::count(file.at.begin(), file.at.end(), '/') <= 1 &&
           deepspeed_name(file.at).has_value();
  }
  bool says_ranks(const std::vector<Found>& found) const override { return reads_all(found); }
  /// Every rank has all of it, and the first wrote it.
  std::optional<LayoutSpec> layout(bool /*said*/, const std::vector<Found>& found) const override {
    if (!reads_all(found)) return std::nullopt;
    LayoutSpec spec;
    const auto is_own = [](const Found& file) { return !file.at.empty(); };
    if (std::any_of(found.begin(), found.end(), is_own)) return spec;
    uint64_t ranks = 1;
    for (const Found& file : found) ranks = std::max(ranks, file.rank + 1);
    spec.sizes.dp = static_cast<uint32_t>(ranks);
    return spec;
  }

  bool reads(const std::vector<Found>& found) const override {
    return reads_all(found) || reads_beside_model(found);
  }
  Result<> read(const FileReader& files, std::vector<Found>& found, Executor& executor,
                std::stop_token stop) const override {
    if (!reads_all(found)) {
      PTC_TRY(safetensors_sets().read(files, found, executor, stop));
      // What cannot be put together is kept as it is: the model is there without it.
      std::vector<Found> with_state = found;
      const auto read = [&]() -> Result<> {
        PTC_TRY(auto tree, collect_tree(with_state, std::nullopt));
        return read_deepspeed_tree(files, std::move(tree), with_state, true, executor,
                                   std::move(stop));
      };
      if (auto done = read(); done.has_error())
        return done.error().code() == Code::kInvalidArgument ? ok() : std::move(done);
      found = std::move(with_state);
      return ok();
    }
    PTC_TRY(const auto folder, latest_folder(files, found));
    PTC_TRY(auto tree, collect_tree(found, folder));
    return read_deepspeed_tree(files, std::move(tree), found, false, executor, std::move(stop));
  }

 private:
  /// Whether there is optimizer state of DeepSpeed's, all of it the first rank's, beside files of
  /// safetensors with the model: what Hugging Face's Trainer leaves.
  static bool reads_beside_model(const std::vector<Found>& found) {
    bool any_model = false, any_state = false;
    for (const Found& file : found) {
      const auto name = deepspeed_name(file.path);
      const bool of_model = file.path.ends_with(".safetensors") || !file.set.empty();
      if (!name && !of_model) continue;
      if (file.rank != 0) return false;
      any_model = any_model || of_model;
      any_state = any_state || (name && name->kind == DeepSpeedName::Kind::kZero);
      if (name && name->kind == DeepSpeedName::Kind::kUniversal) return false;
    }
    return any_model && any_state;
  }
  /// Whether there is optimizer state of DeepSpeed's among the files, or, where a framework put its
  /// files for all ranks at once, a model of it.
  static bool reads_all(const std::vector<Found>& found) {
    if (!torch_files_count(found) || std::any_of(found.begin(), found.end(), is_dcp_metadata))
      return false;
    std::set<std::string_view> models, universal;
    for (const Found& file : found) {
      const auto name = deepspeed_name(file.path);
      if (!name) continue;
      if (name->kind == DeepSpeedName::Kind::kZero || name->kind == DeepSpeedName::Kind::kZeroModel)
        return true;
      if (name->kind == DeepSpeedName::Kind::kModel && !file.at.empty()) return true;
      if (name->kind == DeepSpeedName::Kind::kModel) models.insert(name->folder);
      if (name->kind == DeepSpeedName::Kind::kUniversal && name->state == "fp32")
        universal.insert(name->folder);
    }
    return std::any_of(universal.begin(), universal.end(),
                       [&](std::string_view folder) { return models.contains(folder); });
  }
};

}  // namespace

const TreeFormat& deepspeed_trees() {
  static const DeepSpeedTrees trees;
  return trees;
}

}  // namespace ptc
