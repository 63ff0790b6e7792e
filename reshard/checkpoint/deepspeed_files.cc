// layouts/<layout>/deepspeed/: names of DeepSpeed's to programs.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/checkpoint/deepspeed_folder.h"
#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/checkpoint/described_set.h"
#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/torch_contents.h"

namespace ptc {
namespace {

/// What intake/deepspeed_reader.cc calls the model's file.
constexpr std::string_view kDeepSpeedModel = "model_states.pt";
constexpr std::string_view kUniversalOptimizer = "/zero/optimizer_state.pt";

/// "b" of "a/b/" and "a/b".
std::string last_component(std::string_view path) {
  if (path.ends_with('/')) path.remove_suffix(1);
  return std::string(path.substr(path.rfind('/') + 1));
}

/// What a universal folder has of its own.
struct KeptOfDeepSpeed {
  std::string tag;
  std::vector<std::pair<std::string, uint32_t>> models;  // by name below the tag
  std::optional<uint32_t> optimizer;
};

/// Of `others`, files that are kept as they were. intake/deepspeed_reader.cc took the folder's name
/// from what it has read. So where there is such a file, one with a folder may be another save's.
KeptOfDeepSpeed kept_of_deepspeed(const Manifest& manifest, const std::vector<uint32_t>& others) {
  bool has_model = false, has_flat = false;  // that were read
  for (const WrittenFile& file : manifest.files) {
    const auto said = deepspeed_name(file.path);
    const bool has_folder = !said || !said->folder.empty();
    has_flat = has_flat || (!has_folder && said->kind == DeepSpeedName::Kind::kZero);
    has_model = has_model || file.path == kDeepSpeedModel ||
                (!has_folder && (said->kind == DeepSpeedName::Kind::kModel ||
                                 said->kind == DeepSpeedName::Kind::kZeroModel));
  }
  KeptOfDeepSpeed kept;
  std::map<std::string, std::vector<std::pair<std::string, uint32_t>>> models;  // by folder
  std::map<std::string, uint32_t> optimizers;
  for (const uint32_t file : others) {
    const std::string& path = manifest.files[file].path;
    const auto said = deepspeed_name(path);
    if (said && said->kind == DeepSpeedName::Kind::kModel)
      models[std::string(said->folder)].emplace_back(path.substr(said->folder.size()), file);
    if (path == kDeepSpeedModel) models[""].emplace_back("mp_rank_00_model_states.pt", file);
    if (("/" + path).ends_with(kUniversalOptimizer))
      optimizers.emplace(path.substr(0, path.size() + 1 - kUniversalOptimizer.size()), file);
  }
  // Of several folders nobody says here which counts.
  const auto take = [&](auto& all, bool read, auto& taken) {
    const auto found = read || all.contains("") ? all.find("") : all.begin();
    if (found == all.end() || (found->first != "" && all.size() > 1)) return;
    taken = found->second;
    if (found->first != "") kept.tag = last_component(found->first);
  };
  take(models, has_model, kept.models);
  take(optimizers, has_flat, kept.optimizer);
  return kept;
}

}  // namespace

Result<> Checkpoint::read_deepspeed_model(DeepSpeedSources& sources) const {
  const auto written =
      std::find_if(manifest().files.begin(), manifest().files.end(), [](const WrittenFile& file) {
        return file.has_tensors && file.set.empty() && file.path == kDeepSpeedModel;
      });
  if (written == manifest().files.end()) return ok();
  PTC_TRY(const auto files, state_files(LayoutSpec(), StateCoords()));
  for (const StateFile& file : *files) {
    if (file.path != kDeepSpeedModel) continue;
    PTC_TRY(const FileOutline outline, outline_of(*written));
    PTC_TRY(auto contents, torch_contents(file.layout.literals, file.layout.bytes, outline.text));
    std::unordered_map<std::string_view, uint32_t> by_name;
    for (const ArraySlot& slot : file.layout.arrays)
      if (slot.tensor < model().tensors().size())
        by_name.emplace(model().tensors()[slot.tensor].name, slot.tensor);
    for (const TorchContents::Tensor& tensor : contents.tensors) {
      const auto known = by_name.find(tensor.name);
      if (tensor.path.size() < 2 || tensor.path[0].key != "module" || known == by_name.end())
        continue;
      sources.module_names.emplace(known->second, torch_name(std::span(tensor.path).subspan(1)));
    }
    for (DcpNewValue& value : contents.values)
      sources.model_values.emplace_back(torch_path_text(value.path), std::move(value.archive));
  }
  return ok();
}

Result<FileSetRef> Checkpoint::deepspeed_files(const LayoutSpec& spec) const {
  // DeepSpeed counts ranks that share sequences or experts as data-parallel ones.
  const DeepSpeedRanks ranks{spec.sizes.tp * spec.sizes.pp,
                             spec.sizes.dp * spec.sharing(false).cp * spec.sharing(false).ep};
  const std::string set_key =
      fmt::format("deepspeed/{}/{}", ranks.model_parallel, ranks.data_parallel);
  return cached(set_key, [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>(set_key, shared_from_this());
    const ReadRights& rights = rights_of_all();
    const KeptOfDeepSpeed kept = kept_of_deepspeed(manifest(), other_files(RankCoords()));
    const auto& models = kept.models;
    std::shared_ptr<const DeepSpeedFolder> folder;
    const auto make = [&]() -> Result<> {
      DeepSpeedSources sources;
      sources.parameters = parameters();
      PTC_TRY(sources.tables, tables_of_dcp());
      PTC_TRY(read_deepspeed_model(sources));
      PTC_TRY(const auto megatron, megatron_tree());
      if (megatron) sources.iteration = megatron->iteration;
      sources.tag = kept.tag;
      sources.has_models = !models.empty();
      PTC_TRY(folder, DeepSpeedFolder::make(model(), sources, ranks));
      return ok();
    };
    // What cannot be made must not keep the checkpoint from being listed and removed.
    if (Result<> made = make(); made.has_error()) {
      set->add_text(kLeftOut, "Nothing is here: " + made.error().message() + "\n", rights);
      return FileSetRef(std::move(set));
    }
    const std::string top = folder->tag() + "/";
    for (const DeepSpeedFolder::File& file : folder->files()) {
      const ReadRights& own =
          file.tensor == DeepSpeedFolder::kNone ? rights : rights_of(file.tensor);
      set->add(
          {top + file.path, file.bytes, "", own},
          [folder, &file](const ContentSource& source) -> Result<FileContentRef> {
            PTC_TRY(auto layout, folder->lay_out(file));
            return source.open_gathered(std::make_shared<const ImageLayout>(std::move(layout)));
          });
    }
    for (const auto& [name, file] : models) {
      set->add_other(file, top + name, rights);
      set->add_other(file, top + "zero_pp_rank_0_" + name, rights);
    }
    for (uint32_t rank = 0; models.empty() && rank < ranks.model_parallel; ++rank)
      for (const char* stage : {"", "zero_pp_rank_0_"})
        set->add_text(fmt::format("{}{}mp_rank_{:02}_model_states.pt", top, stage, rank),
                      folder->model_states(), rights);
    const std::string of_optimizer = folder->tag() + std::string(kUniversalOptimizer);
    if (kept.optimizer) {
      set->add_other(*kept.optimizer, of_optimizer, rights);
    } else {
      set->add({of_optimizer, folder->optimizer_state().bytes, "", rights},
               [folder](const ContentSource& source) {
                 return source.open_gathered(
                     std::shared_ptr<const ImageLayout>(folder, &folder->optimizer_state()));
               });
    }
    set->add_text("latest_universal", folder->tag(), rights);
    if (!folder->left_out().empty())
      set->add_text(kLeftOut, "Not in this directory:\n" + folder->left_out(), rights);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

}  // namespace ptc
