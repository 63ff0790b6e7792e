// The files that can be read out of a checkpoint: model/, hf/, dcp/, rank/<r>/ and
// rank/<r>/tensors/.
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <memory>
#include <set>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/dcp_tree.h"
#include "reshard/checkpoint/dcp_values.h"
#include "reshard/checkpoint/described_set.h"
#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/codec/safetensors.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

// Shards of hf/ are as large as the Hugging Face tools make them.
constexpr uint64_t kHfShardBytes = 5'000'000'000;

// Who wrote this (tools/python) has each section of a state in a file, and all else in here.
constexpr const char* kSections = "ptc.json";

}  // namespace

Result<FileSetRef> Checkpoint::cached(const std::string& key,
                                      const std::function<Result<FileSetRef>()>& build) const {
  {
    MutexLock lock(mutex_);
    auto it = file_sets_.find(key);
    if (it != file_sets_.end())
      if (FileSetRef set = it->second.lock()) return set;
  }
  PTC_TRY(auto set, build());
  MutexLock lock(mutex_);
  if (file_sets_.size() >= clean_sets_at_) {
    std::erase_if(file_sets_, [](const auto& known) { return known.second.expired(); });
    clean_sets_at_ = 2 * file_sets_.size() + kFewSets;
  }
  std::weak_ptr<const FileSet>& slot = file_sets_[key];
  if (FileSetRef other = slot.lock()) return other;
  slot = set;
  return set;
}

Result<FileSetRef> Checkpoint::model_files() const {
  return cached("model", [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>("model", shared_from_this());
    for (uint32_t t = 0; t < model().tensors().size(); ++t) {
      PTC_TRY(set->add_npy(facts_->model_paths[t], t));
    }
    set->finish();
    return FileSetRef(std::move(set));
  });
}

Result<FileSetRef> Checkpoint::rank_tensors(const LayoutSpec& spec, uint64_t global_rank) const {
  const StateCoords state = state_of(spec, spec.coords(global_rank));
  const std::string set_key =
      fmt::format("{}/{}/tensors", state_key(spec), state_index(spec, state));
  return cached(set_key, [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>(set_key, shared_from_this());
    PTC_TRY(auto held, hold(spec, state));
    PTC_TRY(const auto model, model_under(spec));
    for (Model::Held& part : held) {
      PTC_TRY(auto path, tensor_path(model->local_name(part.tensor, spec, state.pp)));
      if (!facts_->primary[part.tensor]) {
        const std::string& model_path = facts_->model_paths[part.tensor];
        path = model_path.substr(0, model_path.find('/') + 1) + path;
      }
      PTC_TRY(set->add_npy(std::move(path), part.tensor,
                           std::make_unique<const SubTensor>(*part.part)));
    }
    set->finish();
    return FileSetRef(std::move(set));
  });
}

Result<FileSetRef> Checkpoint::rank_files(const LayoutSpec& spec, uint64_t global_rank) const {
  const RankCoords coords = spec.coords(global_rank);
  const StateCoords state = state_of(spec, coords);
  const std::vector<uint32_t> others = other_files(coords);
  // Ranks of one state that get the other files of the same rank, too, have one set.
  const std::string others_of =
      others.empty() ? "" : std::to_string(manifest().files[others.front()].rank);
  const std::string name =
      fmt::format("{}/{}/{}", spec.name(), state_index(spec, state), others_of);
  return cached(name, [&]() -> Result<FileSetRef> {
    PTC_TRY(auto files, state_files(spec, state));
    const auto key = std::make_shared<const std::string>(state_key(spec));
    auto set = std::make_shared<DescribedSet>(fmt::format("{}/{}", *key, state_index(spec, state)),
                                              shared_from_this());
    for (size_t i = 0; i < files->size(); ++i) {
      const StateFile& file = (*files)[i];
      set->add_memory(file.layout.literals.bytes() + file.layout.arrays.size() * sizeof(ArraySlot));
      FileSet::Entry entry{file.path, file.layout.bytes, "", facts_->rights_in(file.path)};
      if (is_one_array(file.path)) {
        DType dtype = model().tensors()[file.layout.arrays.front().tensor].dtype;
        if (dtype_npy_descr(dtype).find('V') != std::string_view::npos)
          entry.dtype = dtype_name(dtype);
      }
      const auto find_image = [this, files, i, key](const StoredState& now) -> Result<ImageRef> {
        const StateFile& one = (*files)[i];
        PTC_TRY(ContentSource::check_tensors(*this, one.layout));
        const int64_t image = state_key(now.spec) == *key ? now.find(one.owner, one.path) : -1;
        // A lost image may hold nothing that others do not hold too.
        if (image < 0 || ContentSource::is_damaged(*this, now.images[image])) return ImageRef();
        return now.images[image].image;
      };
      set->add_stored(std::move(entry), find_image, [this, files, i](const StoredState& now) {
        return ContentSource::gather(*this, now, (*files)[i].layout);
      });
    }
    for (uint32_t file : others) set->add_other(file);
    PTC_TRY(const auto values, values_of_dcp());
    for (const auto& [directory, text] : *values) {
      const std::string path = directory + std::string(kDcpValuesFile);
      const std::shared_ptr<const std::string> shared(values, &text);
      if (!set->has(path)) set->add_text(path, shared, facts_->rights_in(path));
    }
    set->finish();
    return FileSetRef(std::move(set));
  });
}

Result<std::map<std::string, std::vector<DcpTable>>> Checkpoint::tables_of_dcp() const {
  std::map<std::string, std::vector<DcpTable>> tables;
  for (const WrittenFile& file : manifest().files) {
    if (!file.has_tensors || file.set.empty() || &format_of(file.path, true) != &dcp_format())
      continue;
    PTC_TRY(const FileOutline outline, outline_of(file));
    PTC_TRY(auto table, parse_dcp_table(outline.text, outline.file_bytes));
    tables[file.path.substr(0, file.path.rfind('/') + 1)].push_back(std::move(table));
  }
  return tables;
}

Result<std::shared_ptr<const Checkpoint::TextsByDirectory>> Checkpoint::values_of_dcp() const {
  using Values = std::shared_ptr<const TextsByDirectory>;
  // Of what is empty no file set would hold the result, and each rank's would make it again.
  static const Values none = std::make_shared<TextsByDirectory>();
  if (has_no_dcp_values_) return none;
  PTC_TRY(auto found,
          results_->get<TextsByDirectory>(key("values of dcp"), [&]() -> Result<Values> {
            PTC_TRY(const auto tables, tables_of_dcp());
            auto values = std::make_shared<TextsByDirectory>();
            for (const auto& [directory, of_files] : tables) {
              PTC_TRY(auto text, dcp_values_file(of_files));
              if (!text.empty()) values->emplace(directory, std::move(text));
            }
            return Values(std::move(values));
          }));
  has_no_dcp_values_ = found->empty();
  return found;
}

Result<std::optional<Checkpoint::MegatronTree>> Checkpoint::megatron_tree() const {
  if (!is_megatron_tree()) return std::optional<MegatronTree>();
  if (!facts_->megatron_directory)
    return std::optional(
        MegatronTree{{}, megatron_iteration_of(*facts_->torch_dist_directory), true});
  MegatronTree tree{*facts_->megatron_directory, {}};
  const std::string path = tree.in_rank + std::string(kMegatronFile);
  for (const WrittenFile& file : manifest().files) {
    if (file.path != path || !file.has_tensors) continue;
    PTC_TRY(const FileOutline outline, outline_of(file));
    PTC_TRY(const WrittenTorchFileRef written, WrittenTorchFile::read(outline));
    const auto& megatron = written->model().megatron;
    if (megatron && megatron->iteration.value_or(-1) >= 0)
      tree.iteration = static_cast<uint64_t>(*megatron->iteration);
    break;  // all are of one
  }
  return std::optional(std::move(tree));
}

std::vector<uint32_t> Checkpoint::other_files(const RankCoords& coords) const {
  // The rank with the same coordinates, else rank 0 of that stage, else rank 0.
  const LayoutSpec& written = manifest().written_spec;
  std::vector<uint64_t> candidates;
  auto add = [&](const RankCoords& c) {
    if (const auto rank = written.order.rank_at(written.sizes, c)) candidates.push_back(*rank);
  };
  add(coords);
  add(RankCoords{.pp = coords.pp});
  add(RankCoords{});
  std::vector<uint32_t> files;
  for (uint64_t rank : candidates) {
    for (uint32_t i = 0; i < manifest().files.size(); ++i)
      if (manifest().files[i].rank == rank && !manifest().files[i].has_tensors) files.push_back(i);
    if (!files.empty()) break;
  }
  return files;
}

namespace {

/// For who has hf/ alone. Empty: nothing is missing but optimizer state, which is never in it.
std::string left_out_text(const std::vector<CheckpointFacts::LeftOut>& left_out) {
  std::string text;
  for (const CheckpointFacts::LeftOut& one : left_out)
    if (one.same_names)
      text += fmt::format(
          "{} tensors of {}: tensors of other files have these names, and other values\n",
          one.tensors, one.file);
  return text.empty()
             ? ""
             : "Not in this directory, but in model/ and layouts/ of the checkpoint:\n" + text;
}

}  // namespace

Result<FileSetRef> Checkpoint::hf_files() const {
  return cached("hf", [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>("hf", shared_from_this());
    const std::vector<TensorInfo>& tensors = model().tensors();
    // PEFT looks for one file of this name.
    const bool adapter =
        std::any_of(manifest().files.begin(), manifest().files.end(),
                    [](const WrittenFile& file) { return file.path == "adapter_config.json"; });
    std::vector<std::vector<Model::Held>> shards(1);
    uint64_t shard_bytes = 0, total_bytes = 0;
    for (const uint32_t t : parameters()) {
      PTC_TRY(auto bytes, array_bytes(tensors[t].shape, tensors[t].dtype));
      if (!adapter && shard_bytes > 0 && shard_bytes + bytes > kHfShardBytes) {
        shards.emplace_back();
        shard_bytes = 0;
      }
      shards.back().push_back({t, tensors[t].whole()});
      shard_bytes += bytes;
      total_bytes += bytes;
    }
    // As who loads the model has them, whatever it was wrapped in when it was saved.
    std::vector<std::string> names;
    for (const std::vector<Model::Held>& shard : shards)
      for (const Model::Held& part : shard) names.push_back(tensors[part.tensor].name);
    if (!adapter) names = model().rules().without_wrappers(std::move(names));
    json::object weight_map;
    std::optional<ReadRights> rights_of_all;
    auto next_name = names.begin();
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string path = adapter             ? "adapter_model.safetensors"
                               : shards.size() > 1 ? fmt::format("model-{:05}-of-{:05}.safetensors",
                                                                 i + 1, shards.size())
                                                   : "model.safetensors";
      std::optional<ReadRights> rights;
      const std::vector<std::string> own(next_name, next_name + std::ssize(shards[i]));
      next_name += std::ssize(shards[i]);
      for (const std::string& name : own) weight_map[name] = path;
      for (const Model::Held& part : shards[i]) {
        const ReadRights& of_tensor = facts_->rights_of(part.tensor);
        rights = rights ? rights->narrowed_to(of_tensor) : of_tensor;
      }
      if (rights) rights_of_all = rights_of_all ? rights_of_all->narrowed_to(*rights) : *rights;
      PTC_TRY(auto file, compose(path, std::move(shards[i]), LayoutSpec(), StateCoords(), &own));
      const uint64_t bytes = file.layout.bytes;
      set->add({path, bytes, "", rights.value_or(ReadRights{manifest().uid, manifest().gid})},
               [layout = std::make_shared<const ImageLayout>(std::move(file.layout))](
                   const ContentSource& source) { return source.open_gathered(layout); });
    }
    constexpr std::string_view kIndex = "model.safetensors.index.json";
    if (shards.size() > 1)
      set->add_text(
          std::string(kIndex),
          json::serialize(json::object{{"metadata", json::object{{"total_size", total_bytes}}},
                                       {"weight_map", std::move(weight_map)}}) +
              "\n",
          rights_of_all.value_or(ReadRights{manifest().uid, manifest().gid}));
    if (std::string missing = left_out_text(left_out()); !missing.empty())
      set->add_text(kLeftOut, std::move(missing),
                    rights_of_all.value_or(ReadRights{manifest().uid, manifest().gid}));
    for (uint32_t file : other_files(RankCoords()))
      if (manifest().files[file].path != kIndex) set->add_other(file);  // it is of other files
    set->finish();
    return FileSetRef(std::move(set));
  });
}

Result<FileSetRef> Checkpoint::dcp_files() const {
  return cached("dcp", [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>("dcp", shared_from_this());
    // Names, values and tensors of all files stand side by side in these.
    const ReadRights& rights = rights_of_all();
    std::set<std::string> directories;  // that dcp.save wrote
    for (const WrittenFile& file : manifest().files)
      if (file.has_tensors && file.path.ends_with(kDcpEnding))
        directories.insert(file.path.substr(0, file.path.rfind('/') + 1));
    DcpSources sources;
    StateFilesRef files;
    const auto find = [&]() -> Result<> {
      PTC_TRY(files, state_files(LayoutSpec(), StateCoords()));
      PTC_TRY(sources.tables, tables_of_dcp());
      for (const WrittenFile& file : manifest().files) {
        sources.sections = sources.sections || (!file.has_tensors && file.path == kSections);
        if (!file.has_tensors || !file.set.empty() || sources.outlines.contains(file.path))
          continue;
        PTC_TRY(const FileOutline outline, outline_of(file));
        sources.outlines.emplace(file.path, outline.text);
      }
      return ok();
    };
    std::string left_out;
    const auto add_tree = [&](std::span<const StateFile> of_files,
                              const std::string& directory) -> Result<> {
      DcpSources own = sources;
      if (!directory.empty())
        std::erase_if(own.tables, [&](const auto& table) { return table.first != directory; });
      PTC_TRY(DcpTree tree, make_dcp_tree(of_files, model(), own));
      for (DcpTree::File& file : tree.files)
        set->add({directory + file.name, file.layout.bytes, "", rights},
                 [layout = std::make_shared<const ImageLayout>(std::move(file.layout))](
                     const ContentSource& source) { return source.open_gathered(layout); });
      set->add_text(directory + ".metadata", std::move(tree.metadata), rights);
      if (directory.empty()) left_out = std::move(tree.left_out);
      return ok();
    };
    const auto add_trees = [&]() -> Result<> {
      PTC_TRY(find());
      PTC_TRY(add_tree(*files, ""));
      // And each of several as it was, for who looks for them: Trainer, of FSDP.
      if (directories.size() < 2) return ok();
      for (const std::string& directory : directories) {
        if (directory.empty()) continue;
        std::vector<StateFile> of_directory;
        for (const StateFile& file : *files)
          if (file.path.substr(0, file.path.rfind('/') + 1) == directory)
            of_directory.push_back(file);
        PTC_TRY(add_tree(of_directory, directory));
      }
      return ok();
    };
    // What cannot be made must not keep the checkpoint from being listed and removed.
    if (Result<> added = add_trees(); added.has_error()) {
      set = std::make_shared<DescribedSet>("dcp", shared_from_this());
      set->add_text(kLeftOut, "Nothing is here: " + added.error().message() + "\n", rights);
      return FileSetRef(std::move(set));
    }
    if (sources.sections)
      left_out += fmt::format("values that are no tensors: {} of each rank\n", kSections);
    for (const auto& [directory, tables] : sources.tables)
      for (const DcpTable& table : tables)
        for (const auto& [name, content] : table.beside) {
          const std::string path = (directories.size() == 1 ? "" : directory) + name;
          if (!set->has(path)) set->add_text(path, content, rights);
        }
    // Megatron looks for its metadata.json and common.pt beside it, Trainer for its state beside
    // the directories.
    for (const uint32_t file : other_files(RankCoords())) {
      const std::string& path = manifest().files[file].path;
      const std::string top = directories.size() == 1 ? *directories.begin() : "";
      if (directories.empty() || !path.starts_with(top)) continue;
      const std::string name = path.substr(top.size());
      if (name != kLeftOut && !set->has(name)) set->add_other(file, name, rights);
    }
    if (!left_out.empty())
      set->add_text(
          kLeftOut,
          "Not in this directory, but in model/ or layouts/ of the checkpoint:\n" + left_out,
          rights);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

}  // namespace ptc
