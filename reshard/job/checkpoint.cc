#include "reshard/job/checkpoint.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <map>
#include <set>
#include <unordered_set>

#include "store/base/json.h"
#include "store/codec/npy.h"
#include "store/codec/safetensors.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

bool is_npy(std::string_view path) { return path.ends_with(".npy"); }

// A file name as one component of a path under model/.
std::string escape_slashes(std::string_view path) {
  std::string escaped;
  for (char c : path) c == '/' ? escaped += "%2F" : escaped += c;
  return escaped;
}

}  // namespace

Checkpoint::Checkpoint(Manifest manifest, std::string headers, Transport* transport)
    : manifest_(std::move(manifest)), headers_(std::move(headers)), transport_(transport) {
  // Where two files have a tensor of the same name, the model's file comes first: model.safetensors
  // before optim.safetensors. The others' tensors go under model/<file>/.
  const std::vector<TensorInfo>& tensors = model().tensors();
  std::unordered_map<std::string_view, uint32_t> owner;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    auto [it, fresh] = owner.try_emplace(tensors[t].name, t);
    if (!fresh && tensors[t].file.starts_with("model") &&
        !tensors[it->second].file.starts_with("model"))
      it->second = t;
  }
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    primary_.push_back(owner.at(tensors[t].name) == t);
    std::string prefix = primary_[t] ? "" : escape_slashes(tensors[t].file) + "/";
    Result<std::string> path = tensor_path(tensors[t].name);
    PTC_CHECK(path.has_value());  // commit() refuses names without a path
    model_paths_.push_back(prefix + path.value());
  }
  build_meta_json();
}

void Checkpoint::build_meta_json() {
  json::object meta{{"format", "ptc-checkpoint/1"},
                    {"name", manifest_.name},
                    {"time", time_text(manifest_.time_ns)},
                    {"family", model().rules().family()},
                    {"written_as", manifest_.written_spec.name()},
                    {"checksum", "ptc-linear-1"}};
  if (manifest_.consumed) meta["consumed"] = *manifest_.consumed;
  json::array tensors;
  for (uint32_t t = 0; t < model().tensors().size(); ++t) {
    const TensorInfo& tensor = model().tensors()[t];
    json::array shape;
    for (uint64_t extent : tensor.shape) shape.push_back(extent);
    tensors.push_back(json::object{{"name", tensor.name},
                                   {"file", tensor.file},
                                   {"dtype", dtype_name(tensor.dtype)},
                                   {"shape", std::move(shape)},
                                   {"checksum", manifest_.checksums[t].to_hex()},
                                   {"path", "model/" + model_paths_[t]}});
  }
  meta["tensors"] = std::move(tensors);
  json::array files;
  for (const WrittenFile& file : manifest_.files) {
    json::object object{{"rank", file.rank}, {"path", file.path}, {"bytes", file.bytes}};
    if (!file.has_tensors) object["checksum"] = file.checksum.to_hex();
    files.push_back(std::move(object));
  }
  meta["files"] = std::move(files);
  meta_json_ = pretty_json(meta);
}

std::shared_ptr<const StoredState> Checkpoint::stored() const {
  std::lock_guard lock(mutex_);
  return stored_;
}

void Checkpoint::replace_stored(std::shared_ptr<const StoredState> stored) {
  std::lock_guard lock(mutex_);
  stored_ = std::move(stored);
}

void Checkpoint::let_go() {
  removed_ = true;
  const std::shared_ptr<const StoredState> before = stored();
  std::vector<StoredImage> images = before->images;
  for (StoredImage& image : images) image.image = nullptr;
  Result<std::shared_ptr<const StoredState>> bare = make_stored(before->spec, std::move(images));
  if (bare.has_value()) replace_stored(std::move(bare).value());
}

std::string Checkpoint::file_of(uint32_t tensor, const LayoutSpec& spec,
                                const StateCoords& state) const {
  const std::string& file = model().tensors()[tensor].file;
  // An .npy is named after its tensor, and that may be local to the stage.
  if (!is_npy(file) ||
      (spec.naming == Naming::kGlobal && manifest_.written_spec.naming == Naming::kGlobal))
    return file;
  Result<std::string> path = tensor_path(model().local_name(tensor, spec, state.pp));
  return path.has_value() ? path.value() : file;
}

Result<Checkpoint::HeldByName> Checkpoint::held_by_name(const LayoutSpec& spec,
                                                        const StateCoords& state) const {
  PTC_TRY(auto held, model().hold(spec, state));
  HeldByName by_name;
  for (Model::Held& part : held) {
    std::string file = file_of(part.tensor, spec, state);
    std::string name = is_npy(file) ? "" : model().local_name(part.tensor, spec, state.pp);
    by_name.emplace(file + '\0' + name, std::move(part));
  }
  return by_name;
}

Result<ImageLayout> Checkpoint::written_layout(uint32_t file_index, const HeldByName& held) const {
  const WrittenFile& file = manifest_.files[file_index];
  const std::string& group = file.set.empty() ? file.path : file.set;

  ImageLayout layout;
  layout.bytes = file.bytes;
  if (file.header_offset > headers_.size() || file.header_bytes > headers_.size() - file.header_offset)
    return make_error(Code::kCorrupt, "headers.bin of checkpoint {} is too short", name());
  layout.header = headers_.substr(file.header_offset, file.header_bytes);

  std::vector<TensorEntry> entries;
  if (is_npy(group)) {
    auto it = held.find(group + '\0');
    std::optional<DType> dtype;
    if (it != held.end()) dtype = model().tensors()[it->second.tensor].dtype;
    PTC_TRY(auto entry, parse_npy(as_bytes(layout.header), file.bytes, dtype));
    entries.push_back(std::move(entry));
  } else {
    PTC_TRY(auto header, parse_safetensors(as_bytes(layout.header), file.bytes));
    entries = std::move(header.tensors);
  }
  for (const TensorEntry& entry : entries) {
    auto it = held.find(group + '\0' + entry.name);
    if (it == held.end() || it->second.part.local_shape != entry.shape)
      return make_error(Code::kCorrupt, "{}: tensor '{}' is not the one in the manifest", file.path,
                        entry.name);
    layout.arrays.push_back({it->second.tensor, entry.offset, it->second.part});
  }
  for (uint32_t i = 0; i < manifest_.padding.size(); ++i) {
    const Padding& pad = manifest_.padding[i];
    if (pad.file != file_index) continue;
    for (size_t a = 0, count = layout.arrays.size(); a < count; ++a) {
      if (layout.arrays[a].tensor != pad.tensor) continue;
      ArraySlot slot = layout.arrays[a];
      slot.tensor = model().tensors().size() + i;
      slot.part.pieces = {{Box::whole(pad.local.extent), pad.local.offset}};
      slot.part.flat.reset();
      layout.arrays.push_back(std::move(slot));
    }
  }
  return layout;
}

Result<StateFile> Checkpoint::compose(const std::string& path, std::vector<Model::Held> held,
                                      const LayoutSpec& spec, const StateCoords& state) const {
  StateFile file;
  file.path = path;
  if (is_npy(path)) {
    if (held.size() != 1)
      return make_error(Code::kInternal, "{} would have to hold {} tensors", path, held.size());
    const Model::Held& part = held.front();
    const TensorInfo& tensor = model().tensors()[part.tensor];
    file.layout.header = write_npy_header(tensor.dtype, part.part.local_shape);
    PTC_TRY(auto bytes, array_bytes(part.part.local_shape, tensor.dtype));
    file.layout.bytes = file.layout.header.size() + bytes;
    file.layout.arrays.push_back({part.tensor, file.layout.header.size(), part.part});
    return file;
  }
  std::vector<TensorEntry> entries;
  std::unordered_map<std::string, Model::Held*> by_name;
  for (Model::Held& part : held) {
    TensorEntry entry;
    entry.name = model().local_name(part.tensor, spec, state.pp);
    entry.dtype = model().tensors()[part.tensor].dtype;
    entry.shape = part.part.local_shape;
    by_name.emplace(entry.name, &part);
    entries.push_back(std::move(entry));
  }
  PTC_TRY(file.layout.header, write_safetensors_header(entries, {{"format", "pt"}}));
  file.layout.bytes = file.layout.header.size();
  for (const TensorEntry& entry : entries) {
    Model::Held* part = by_name.at(entry.name);
    file.layout.bytes = std::max(file.layout.bytes, entry.offset + entry.bytes);
    file.layout.arrays.push_back({part->tensor, entry.offset, std::move(part->part)});
  }
  return file;
}

uint32_t Checkpoint::owner_of(const LayoutSpec& spec, StateCoords state,
                              const ImageLayout& layout) const {
  const bool cut = std::any_of(layout.arrays.begin(), layout.arrays.end(), [&](const ArraySlot& slot) {
    return slot.tensor < model().tensors().size() && model().is_cut_over_dp(slot.tensor, spec);
  });
  if (!cut) state.dp = 0;
  return state_index(spec, state);
}

Result<std::vector<StateFile>> Checkpoint::state_files(const LayoutSpec& spec,
                                                       const StateCoords& state) const {
  std::vector<StateFile> files;
  const bool as_written = state_key(spec) == state_key(manifest_.written_spec);
  std::unordered_set<std::string> done;
  if (as_written) {
    PTC_TRY(auto by_name, held_by_name(manifest_.written_spec, state));
    for (uint32_t i = 0; i < manifest_.files.size(); ++i) {
      const WrittenFile& file = manifest_.files[i];
      if (!file.has_tensors || !file.set.empty()) continue;
      const uint32_t owner = manifest_.owner_of(file);
      StateCoords holder = state_at(manifest_.written_spec, owner);
      if (!file.dp_cut) holder.dp = state.dp;
      if (holder != state) continue;
      PTC_TRY(auto layout, written_layout(i, by_name));
      files.push_back({file.path, std::move(layout), owner});
      done.insert(file.path);
    }
  }
  PTC_TRY(auto held, model().hold(spec, state));
  std::map<std::string, std::vector<Model::Held>> groups;
  for (Model::Held& part : held) {
    std::string path = file_of(part.tensor, spec, state);
    if (!done.contains(path)) groups[path].push_back(std::move(part));
  }
  for (auto& [path, parts] : groups) {
    PTC_TRY(auto file, compose(path, std::move(parts), spec, state));
    file.owner = owner_of(spec, state, file.layout);
    files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const StateFile& a, const StateFile& b) { return a.path < b.path; });
  return files;
}

ImageLayout Checkpoint::padding_layout() const {
  ImageLayout layout;
  for (uint32_t i = 0; i < manifest_.padding.size(); ++i) {
    const Padding& pad = manifest_.padding[i];
    layout.arrays.push_back({static_cast<uint32_t>(model().tensors().size() + i), layout.bytes,
                             SubTensor::whole(pad.local.extent)});
    layout.bytes += pad.local.volume() * dtype_bits(model().tensors()[pad.tensor].dtype) / 8;
  }
  return layout;
}

Result<std::vector<StateFile>> Checkpoint::target_images(const LayoutSpec& spec) const {
  std::vector<StateFile> targets;
  if (!manifest_.padding.empty() && state_key(spec) != state_key(manifest_.written_spec))
    targets.push_back({"", padding_layout()});
  std::map<std::pair<uint32_t, std::string>, size_t> target_of;  // by owner and path
  for (uint32_t state = 0; state < state_count(spec); ++state) {
    PTC_TRY(auto files, state_files(spec, state_at(spec, state)));
    for (StateFile& file : files) {
      auto [target, is_new] = target_of.try_emplace({file.owner, file.path}, targets.size());
      if (is_new) targets.push_back(std::move(file));
      targets[target->second].states.push_back(state);
    }
  }
  std::sort(targets.begin(), targets.end(), [](const StateFile& a, const StateFile& b) {
    return std::tie(a.owner, a.path) < std::tie(b.owner, b.path);
  });
  return targets;
}

Result<std::shared_ptr<const StoredState>> Checkpoint::make_stored(
    const LayoutSpec& spec, std::vector<StoredImage> images) const {
  auto stored = std::make_shared<StoredState>();
  stored->spec = spec;
  std::sort(images.begin(), images.end(), [](const StoredImage& a, const StoredImage& b) {
    return std::tie(a.state, a.path, a.written, a.node) <
           std::tie(b.state, b.path, b.written, b.node);
  });
  for (const StoredImage& image : images) stored->nodes.push_back(image.node);
  std::sort(stored->nodes.begin(), stored->nodes.end());
  stored->nodes.erase(std::unique(stored->nodes.begin(), stored->nodes.end()), stored->nodes.end());
  stored->here = stored->nodes.size();
  uint32_t files_state = UINT32_MAX, held_state = UINT32_MAX;
  std::unordered_map<std::string, ImageLayout> files;  // of files_state
  HeldByName held;                                     // of held_state
  for (const StoredImage& image : images) {
    ImageLayout layout;
    if (image.written >= 0) {
      if (static_cast<size_t>(image.written) >= manifest_.files.size())
        return make_error(Code::kCorrupt, "checkpoint {}: image {} is of no file", name(), image.id);
      const WrittenFile& file = manifest_.files[image.written];
      if (!file.has_tensors) {
        layout.bytes = file.bytes;
      } else if (held_state != image.state) {
        PTC_TRY(held, held_by_name(manifest_.written_spec,
                                   state_at(manifest_.written_spec, image.state)));
        held_state = image.state;
      }
      if (file.has_tensors) {
        PTC_TRY(layout, written_layout(image.written, held));
      }
    } else if (image.path.empty()) {
      layout = padding_layout();
    } else {
      if (files_state != image.state) {
        PTC_TRY(auto list, state_files(spec, state_at(spec, image.state)));
        files.clear();
        for (StateFile& file : list) files.emplace(file.path, std::move(file.layout));
        files_state = image.state;
      }
      auto file = files.find(image.path);
      if (file == files.end())
        return make_error(Code::kCorrupt, "checkpoint {}: image {} is of no file", name(), image.id);
      layout = file->second;  // a copy: other nodes may have the same
    }
    if (image.image == nullptr) {
      layout.arrays.clear();
      layout.header.clear();
    }
    layout.node = std::lower_bound(stored->nodes.begin(), stored->nodes.end(), image.node) -
                  stored->nodes.begin();
    if (image.image != nullptr && image.image->is_here()) stored->here = layout.node;
    stored->layouts.push_back(std::move(layout));
  }
  stored->images = std::move(images);
  stored->index = std::make_unique<SourceIndex>(stored->layouts, manifest_.element_bits());
  return std::shared_ptr<const StoredState>(std::move(stored));
}

std::vector<std::string> Checkpoint::lost_tensors() const {
  std::shared_ptr<const StoredState> now = stored();
  std::vector<std::string> lost;
  if (std::all_of(now->images.begin(), now->images.end(),
                  [](const StoredImage& image) { return image.image != nullptr; }))
    return lost;
  for (uint32_t t = 0; t < model().tensors().size(); ++t)
    if (now->index->missing(t, {Box::whole(model().tensors()[t].shape)}) > 0)
      lost.push_back(model().tensors()[t].name);
  return lost;
}

}  // namespace ptc
