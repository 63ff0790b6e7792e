// DeepSpeed's checkpoints among the files that are committed: what its engine saves (ZeRO 1, 2 and
// 3), and the universal folders that its ds_to_universal.py makes of that.
//   <tag>/mp_rank_00_model_states.pt
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_optim_states.pt        (or bf16_zero_…, fp16_zero_…)
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_model_states.pt        (stage 3, in the first's place)
//   <tag>_universal/zero/<parameter>/<fp32, exp_avg, …>.pt    (beside the model's)
#include <algorithm>
#include <set>
#include <utility>

#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/intake/dcp_files.h"
#include "reshard/intake/deepspeed_reader.h"
#include "reshard/intake/tree_format.h"

namespace ptc {
namespace {

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
      if (auto done = read_deepspeed_tree(files, with_state, true, executor, std::move(stop));
          done.has_error())
        return done.error().code() == Code::kInvalidArgument ? ok() : std::move(done);
      found = std::move(with_state);
      return ok();
    }
    return read_deepspeed_tree(files, found, false, executor, std::move(stop));
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
