#include "reshard/checkpoint/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/megatron_buckets.h"
#include "reshard/checkpoint/shard_boxes.h"
#include "reshard/ptc/model_facts.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/utf8.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

/// Of all files of a layout, in memory as long as it is known where everything is in them.
constexpr uint64_t kMostLayoutLiteralBytes = uint64_t{4} << 30;

bool is_within(const Box& box, const Shape& shape) {
  return box.axes() == shape.size() && (box.empty() || intersect(box, Box::whole(shape)) == box);
}

}  // namespace

struct Checkpoint::OfSpec {
  OfSpec(std::shared_ptr<const Model> model_under, const Manifest& manifest, const LayoutSpec& spec)
      : model(std::move(model_under)),
        holdings(*model, spec),
        as_written(state_key(spec) == state_key(manifest.written_spec)),
        files(as_written ? state_count(spec) : 0) {
    for (uint32_t i = 0; i < manifest.files.size() && as_written; ++i)
      if (manifest.files[i].has_tensors && manifest.files[i].set.empty())
        files[manifest.owner_of(manifest.files[i])].push_back(i);
  }

  const std::shared_ptr<const Model> model;
  const Model::Holdings holdings;
  const bool as_written;
  std::vector<std::vector<uint32_t>> files;  // as written, by owner
};

Result<std::shared_ptr<const Model>> Checkpoint::model_under(const LayoutSpec& spec) const {
  if (!spec.rules) return manifest().model;
  return results_->get<Model>(key("model under").add(spec.rules.text()),
                              [&] { return manifest().model_under(spec); });
}

std::shared_ptr<const std::vector<std::string>> Checkpoint::contradictions_under(
    const LayoutSpec& spec) const {
  constexpr size_t kMost = 4, kMostBytes = 512;
  {
    MutexLock lock(mutex_);
    if (contradicted_.sentences != nullptr && contradicted_.by == spec.rules)
      return contradicted_.sentences;
  }
  auto few = std::make_shared<std::vector<std::string>>();
  // Where these rules do not fit it, the layout says so.
  if (const auto model = model_under(spec)) {
    std::vector<std::string> all = contradictions(*model.value());
    for (std::string& what : all)
      if (few->size() < kMost) few->push_back(printable(what, kMostBytes));
    if (all.size() > kMost) few->push_back(fmt::format("and {} more", all.size() - kMost));
  }
  MutexLock lock(mutex_);
  contradicted_ = {spec.rules, few};
  return few;
}

Result<> Checkpoint::check_facts_under(const LayoutSpec& spec) const {
  if (spec.sizes.pp == 1 && spec.sizes.ep == 1) return ok();
  const std::shared_ptr<const StoredState> now = stored();
  if (same_stages_and_experts(spec, manifest().written_spec) ||
      (now != nullptr && same_stages_and_experts(spec, now->spec)))
    return ok();
  std::shared_ptr<const DoubtfulFacts> facts;
  {
    MutexLock lock(mutex_);
    if (doubtful_.by == spec.rules) facts = doubtful_.facts;
  }
  if (facts == nullptr) {
    PTC_TRY(const auto model, model_under(spec));
    facts = std::make_shared<const DoubtfulFacts>(*model);
    MutexLock lock(mutex_);
    doubtful_ = {spec.rules, facts};
  }
  return facts->check(spec);
}

Result<std::shared_ptr<const Checkpoint::OfSpec>> Checkpoint::of_spec(
    const LayoutSpec& spec) const {
  auto make = [&]() -> Result<std::shared_ptr<const OfSpec>> {
    PTC_TRY(auto model, model_under(spec));
    return std::make_shared<const OfSpec>(std::move(model), manifest(), spec);
  };
  PTC_TRY(auto made, results_->get<OfSpec>(key("of spec").add(key_text(spec)), make));
  MutexLock lock(mutex_);
  return last_of_spec_ = std::move(made);
}

Result<std::vector<Model::Held>> Checkpoint::hold(const LayoutSpec& spec,
                                                  const StateCoords& state) const {
  PTC_TRY(const auto all, of_spec(spec));
  return all->holdings.of(state);
}

std::shared_ptr<const StoredState> Checkpoint::stored() const {
  MutexLock lock(mutex_);
  return stored_;
}

void Checkpoint::set_readable(std::shared_ptr<const StoredState> readable) {
  readable_ = std::move(readable);
  if (remote_files_ == nullptr) return;
  MutexLock remote_lock(remote_files_->mutex);
  remote_files_->stored = readable_;
  remote_files_->rest.reset();
  remote_files_->replaced.notify_all();
}

std::shared_ptr<const StoredState> Checkpoint::without_wrong_copies(
    const std::shared_ptr<const StoredState>& stored, const KnownDamage* damage) const {
  if (stored == nullptr || damage == nullptr || damage->copies.empty()) return stored;
  std::vector<StoredImage> images = stored->images;
  for (StoredImage& image : images)
    if (damage->has_copy(image.id)) image.image = nullptr;
  auto readable = make_stored(stored->spec, std::move(images));
  return readable.has_value() ? std::move(readable).value() : stored;
}

void Checkpoint::replace_stored(std::shared_ptr<const StoredState> stored) {
  MutexLock replacing(replacing_);
  auto readable = without_wrong_copies(stored, damage().get());
  MutexLock lock(mutex_);
  stored_ = std::move(stored);
  set_readable(std::move(readable));
}

bool Checkpoint::replace_damage(const KnownDamage& damage) {
  MutexLock replacing(replacing_);
  const std::shared_ptr<const KnownDamage> before = this->damage();
  if (before == nullptr ? damage.none() : *before == damage) return false;
  const bool same_copies = (before == nullptr ? KnownDamage() : *before).copies == damage.copies;
  auto readable = same_copies ? nullptr : without_wrong_copies(stored(), &damage);
  MutexLock lock(mutex_);
  damage_ = damage.none() ? nullptr : std::make_shared<const KnownDamage>(damage);
  if (readable != nullptr && !removed_) set_readable(std::move(readable));
  return true;
}

std::shared_ptr<const KnownDamage> Checkpoint::damage() const {
  MutexLock lock(mutex_);
  return damage_;
}

void Checkpoint::let_go() {
  removed_ = true;
  const std::shared_ptr<const StoredState> before = stored();
  std::vector<StoredImage> images = before->images;
  for (StoredImage& image : images) image.image = nullptr;
  Result<std::shared_ptr<const StoredState>> bare = make_stored(before->spec, std::move(images));
  std::shared_ptr<const RemoteFiles>
      last;  // with the images of its stored state: it goes without the lock
  MutexLock lock(mutex_);
  last = std::move(remote_files_);
  if (bare.has_value()) stored_ = readable_ = std::move(bare).value();
}

std::weak_ptr<RemoteFiles> Checkpoint::remote_files() const {
  MutexLock lock(mutex_);
  return remote_files_;
}

std::string Checkpoint::file_of(const Model& model, uint32_t tensor, const LayoutSpec& spec,
                                const StateCoords& state) const {
  const std::string& file = model.tensors()[tensor].file;
  // An .npy is named after its tensor, and that may be local to the stage.
  if (!is_one_array(file) ||
      (spec.naming == Naming::kGlobal && manifest().written_spec.naming == Naming::kGlobal))
    return file;
  Result<std::string> path = tensor_path(model.local_name(tensor, spec, state.pp));
  return path.has_value() ? path.value() : file;
}

Result<Checkpoint::HeldByName> Checkpoint::held_by_name(const OfSpec& of_spec,
                                                        const StateCoords& state) const {
  const LayoutSpec& spec = of_spec.holdings.spec();
  const Model& model = *of_spec.model;
  PTC_TRY(auto held, of_spec.holdings.of(state));
  HeldByName by_name;
  for (Model::Held& part : held) {
    std::string file = file_of(model, part.tensor, spec, state);
    std::string name = is_one_array(file) ? "" : model.local_name(part.tensor, spec, state.pp);
    by_name.emplace(file + '\0' + name, std::move(part));
  }
  return by_name;
}

Result<ImageLayout> Checkpoint::written_layout(uint32_t file_index, const HeldByName& held) const {
  const WrittenFile& file = manifest().files[file_index];
  const std::string& group = file.set.empty() ? file.path : file.set;

  ImageLayout layout;
  layout.bytes = file.bytes;
  PTC_TRY(const FileOutline outline, outline_of(file));
  std::optional<DType> declared;
  if (is_one_array(group)) {
    const auto it = held.find(group + '\0');
    if (it != held.end()) declared = model().tensors()[it->second.tensor].dtype;
  }
  PTC_TRY(auto found,
          format_of(file.path, !file.set.empty()).tensors(outline, file.path, declared));
  layout.literals = std::move(found.literals);
  layout.gaps_are_others = found.gaps_are_others;
  for (size_t i = 0; i < found.tensors.size(); ++i) {
    const TensorEntry& entry = found.tensors[i];
    auto it = held.find(group + '\0' + (is_one_array(group) ? std::string() : entry.name));
    const bool known =
        it != held.end() &&
        (file.boxes ? i < found.boxes.size() &&
                          is_within(found.boxes[i], model().tensors()[it->second.tensor].shape)
                    : it->second.part->local_shape == entry.shape);
    if (!known)
      return make_error(Code::kCorrupt, "{}: tensor '{}' is not the one in the manifest", file.path,
                        entry.name);
    layout.arrays.push_back({it->second.tensor, entry.offset,
                             file.boxes ? SharedPart(box_alone(found.boxes[i])) : it->second.part});
  }
  for (uint32_t i = 0; i < manifest().padding.size(); ++i) {
    const Padding& pad = manifest().padding[i];
    if (pad.file != file_index) continue;
    for (size_t a = 0, count = layout.arrays.size(); a < count; ++a) {
      if (layout.arrays[a].tensor != pad.tensor) continue;
      ArraySlot slot = layout.arrays[a];
      slot.tensor = model().tensors().size() + i;
      slot.part = {slot.part->local_shape, {{Box::whole(pad.local.extent), pad.local.offset}}};
      layout.arrays.push_back(std::move(slot));
    }
  }
  if (!found.same_as.empty()) sort_arrays(layout.arrays.own());
  return layout;
}

std::optional<ImageLayout> Checkpoint::stored_layout(uint32_t file_index) const {
  const std::shared_ptr<const StoredState> now = stored();
  if (now == nullptr || state_key(now->spec) != state_key(manifest().written_spec)) return {};
  const WrittenFile& file = manifest().files[file_index];
  const int64_t image = now->find(manifest().owner_of(file), file.path);
  if (image < 0) return {};
  ImageLayout layout = now->held->with_lost()[image];
  layout.node = 0;
  layout.memory = {};
  return layout;
}

Result<FileOutline> Checkpoint::outline_of(const WrittenFile& file) const {
  if (file.header_offset > facts_->headers.size() ||
      file.header_bytes > facts_->headers.size() - file.header_offset)
    return make_error(Code::kCorrupt, "headers.bin of checkpoint {} is too short", name());
  return FileOutline{
      std::string_view(facts_->headers).substr(file.header_offset, file.header_bytes), file.bytes};
}

Result<std::shared_ptr<const std::vector<int32_t>>> Checkpoint::first_writers() const {
  using Writers = std::shared_ptr<const std::vector<int32_t>>;
  return results_->get<std::vector<int32_t>>(key("first writers"), [&]() -> Result<Writers> {
    auto writers = std::make_shared<std::vector<int32_t>>(model().tensors().size(), -1);
    const LayoutSpec& spec = manifest().written_spec;
    // Ranks that differ in tp or dp alone have the same tensors.
    std::set<std::tuple<std::string_view, uint64_t, uint64_t>> seen;
    PTC_TRY(const auto of_this, of_spec(spec));
    for (size_t i = 0; i < manifest().files.size(); ++i) {
      const WrittenFile& file = manifest().files[i];
      if (!file.has_tensors || !file.set.empty()) continue;
      const StateCoords state = state_of(spec, spec.coords(file.rank));
      if (!seen.emplace(file.path, state.pp, state.ep).second) continue;
      PTC_TRY(const auto held, of_this->holdings.of(state));
      for (const Model::Held& part : held) {
        int32_t& writer = (*writers)[part.tensor];
        if (writer < 0 && model().tensors()[part.tensor].file == file.path)
          writer = static_cast<int32_t>(i);
      }
    }
    return Writers(std::move(writers));
  });
}

Result<std::vector<FileOutline>> Checkpoint::written_like(
    const std::string& path, const StateCoords& state, const std::vector<Model::Held>& held) const {
  const LayoutSpec& spec = manifest().written_spec;
  const WrittenFile* best = nullptr;
  StateCoords best_at;
  std::pair<bool, bool> best_order;
  for (const WrittenFile& file : manifest().files) {
    if (!file.has_tensors || !file.set.empty() || file.path != path) continue;
    const StateCoords at = state_of(spec, spec.coords(file.rank));
    const std::pair<bool, bool> order{at.pp != state.pp, at != state};
    if (best != nullptr && order >= best_order) continue;
    best = &file;
    best_at = at;
    best_order = order;
  }
  std::vector<FileOutline> outlines;
  if (best == nullptr) return outlines;
  PTC_TRY(outlines.emplace_back(), outline_of(*best));
  PTC_TRY(const auto writers, first_writers());
  PTC_TRY(const auto in_best, hold(spec, best_at));
  std::vector<bool> has(model().tensors().size());
  for (const Model::Held& part : in_best) has[part.tensor] = true;
  std::set<int32_t> others;
  for (const Model::Held& part : held)
    if (const int32_t writer = (*writers)[part.tensor]; !has[part.tensor] && writer >= 0)
      others.insert(writer);
  for (const int32_t other : others) {
    const WrittenFile& file = manifest().files[static_cast<size_t>(other)];
    if (&file == best) continue;
    PTC_TRY(outlines.emplace_back(), outline_of(file));
  }
  return outlines;
}

Result<> Checkpoint::check_literals(const LayoutSpec& spec) const {
  if (state_key(spec) == state_key(manifest().written_spec)) return ok();
  std::map<std::string_view, uint64_t> most;  // by path
  for (const WrittenFile& file : manifest().files) {
    if (!file.has_tensors || !file.set.empty() || !keeps_values(file.path)) continue;
    uint64_t& bytes = most[file.path];
    bytes = std::max(bytes, file.header_bytes);
  }
  if (most.empty()) return ok();
  PTC_TRY(const auto model, model_under(spec));
  bool by_dp = spec.optimizer == OptimizerCut::kReplicated;  // or the states are
  for (uint32_t t = 0; t < model->tensors().size() && !by_dp; ++t)
    by_dp = model->is_cut_over_dp(t, spec);
  const uint64_t files = by_dp ? state_count(spec) : state_count(spec) / spec.dp_parts();
  for (const auto& [path, bytes] : most)
    if (bytes > kMostLayoutLiteralBytes / files)
      return invalid_argument(
          "{} bytes of {} are beside its tensors (values that are no tensors), and under layout {} "
          "each of {} files has as many: at most {} are kept of all together",
          bytes, path, spec.name(), files, kMostLayoutLiteralBytes);
  return ok();
}

/// Megatron compares these with its own before it loads a file.
Result<std::vector<NewArgument>> Checkpoint::arguments_of(const std::string& path,
                                                          const LayoutSpec& spec) const {
  std::vector<NewArgument> arguments;
  PTC_TRY(const auto model, model_under(spec));
  const std::vector<TensorInfo>& tensors = model->tensors();
  const auto of_file = [&](const TensorInfo& tensor) {
    return tensor.by_stage && tensor.file == path;
  };
  if (std::none_of(tensors.begin(), tensors.end(), of_file)) return arguments;
  arguments.push_back({"tensor_model_parallel_size", spec.sizes.tp});
  arguments.push_back({"pipeline_model_parallel_size", spec.sizes.pp});
  arguments.push_back({"expert_model_parallel_size", spec.sizes.ep});
  arguments.push_back({"expert_tensor_parallel_size", spec.sizes.expert_tp()});
  arguments.push_back(
      {std::string(kDataParallelArgument), int64_t{spec.sizes.dp} * spec.sizes.cp * spec.sizes.ep});
  // Of one stretch of layers these are None.
  std::optional<int64_t> vpp, in_each;
  if (spec.vpp > 1) vpp = spec.vpp;
  if (spec.vpp > 1 && spec.stages.empty() && model->layers() % spec.chunks() == 0)
    in_each = model->layers() / spec.chunks();
  arguments.push_back({"virtual_pipeline_model_parallel_size", vpp});
  arguments.push_back({"num_layers_per_virtual_pipeline_stage", in_each});
  const auto embedding = std::find_if(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    return of_file(tensor) && tensor.name.ends_with("embedding.word_embeddings.weight");
  });
  if (embedding == tensors.end()) return arguments;
  LayoutSpec of_tp = spec;
  of_tp.optimizer = OptimizerCut::kReplicated;
  PTC_TRY(const auto part,
          model->slice(static_cast<uint32_t>(embedding - tensors.begin()), of_tp, StateCoords()));
  if (part && !part->local_shape.empty())
    arguments.push_back(
        {"padded_vocab_size", static_cast<int64_t>(part->local_shape[0] * spec.sizes.tp)});
  return arguments;
}

/// Numbers for parts of tensors, the same for those with the same bytes.
std::vector<uint64_t> Checkpoint::contents_of(const std::vector<Model::Held>& held) const {
  std::vector<uint64_t> numbers(held.size());
  std::unordered_map<uint64_t, std::vector<size_t>> by_sum;
  for (size_t i = 0; i < held.size(); ++i) {
    numbers[i] = i;
    const TensorInfo& tensor = model().tensors()[held[i].tensor];
    const Checksum& sum = manifest().checksums[held[i].tensor];
    std::vector<size_t>& others = by_sum[sum.lane[0]];
    for (const size_t other : others) {
      const TensorInfo& like = model().tensors()[held[other].tensor];
      if (manifest().checksums[held[other].tensor] == sum && like.dtype == tensor.dtype &&
          like.shape == tensor.shape && held[other].part == held[i].part)
        numbers[i] = other;
    }
    if (numbers[i] == i) others.push_back(i);
  }
  return numbers;
}

Result<FileLayoutRef> Checkpoint::lay_out(const std::string& path,
                                          const std::vector<Model::Held>& held,
                                          const LayoutSpec& spec, const StateCoords& state,
                                          const std::vector<std::string>* names) const {
  PTC_TRY(const auto model, model_under(spec));
  std::deque<std::string> local_names;
  const auto name_of = [&](size_t i) -> std::string_view {
    const uint32_t tensor = held[i].tensor;
    if (names != nullptr) return (*names)[i];
    if (model->keeps_name(tensor, spec)) return model->tensors()[tensor].name;
    return local_names.emplace_back(model->local_name(tensor, spec, state.pp));
  };
  const bool in_known_order = names == nullptr && model->keeps_names(spec);
  std::vector<NewArray> arrays;
  arrays.reserve(held.size());
  for (size_t i = 0; i < held.size(); ++i) {
    const TensorInfo& tensor = model->tensors()[held[i].tensor];
    NewArray& array =
        arrays.emplace_back(in_known_order ? std::string_view(tensor.name) : name_of(i),
                            tensor.dtype, &held[i].part->local_shape, i);
    if (in_known_order) array.place = facts_->name_places()[held[i].tensor];
  }
  std::vector<FileOutline> like;
  std::vector<NewArgument> arguments;
  if (keeps_values(path)) {
    PTC_TRY(like, written_like(path, state, held));
    PTC_TRY(arguments, arguments_of(path, spec));
    const std::vector<uint64_t> contents = contents_of(held);
    for (size_t i = 0; i < arrays.size(); ++i) arrays[i].content = contents[i];
  }
  auto made = format_of(path, false).lay_out(arrays, like, arguments);
  if (made.has_error()) return std::move(made).error().with_context(path);
  return std::make_shared<const FileLayout>(std::move(made).value());
}

Result<FileLayoutRef> Checkpoint::shared_layout(const std::string& path,
                                                const std::vector<Model::Held>& held,
                                                const LayoutSpec& spec,
                                                const StateCoords& state) const {
  PTC_TRY(const auto model, model_under(spec));
  std::vector<uint64_t> arrays;
  arrays.reserve(held.size() * 3);
  const bool keep_names = model->keeps_names(spec) ||
                          std::all_of(held.begin(), held.end(), [&](const Model::Held& part) {
                            return model->keeps_name(part.tensor, spec);
                          });
  for (const Model::Held& part : held) {
    const Shape& shape = part.part->local_shape;
    arrays.push_back(uint64_t{part.tensor} << 8 | shape.size());
    arrays.insert(arrays.end(), shape.begin(), shape.end());
  }
  ResultKey of_arrays =
      key("file layout")
          .add(path)
          .add({reinterpret_cast<const char*>(arrays.data()), arrays.size() * sizeof(uint64_t)});
  if (!keep_names) of_arrays.add(key_text(spec)).add(state.pp);
  return results_->get<FileLayout>(of_arrays,
                                   [&] { return lay_out(path, held, spec, state, nullptr); });
}

Result<StateFile> Checkpoint::compose(const std::string& path, std::vector<Model::Held> held,
                                      const LayoutSpec& spec, const StateCoords& state,
                                      const std::vector<std::string>* names) const {
  StateFile file;
  file.path = path;
  // Files of torch's have values of their ranks beside their tensors, and of an .npy there is
  // little to share.
  const bool shares = names == nullptr && !keeps_values(path) && !is_one_array(path);
  PTC_TRY(file.laid_out, shares ? shared_layout(path, held, spec, state)
                                : lay_out(path, held, spec, state, names));
  const FileLayout& layout = *file.laid_out;
  file.layout.literals = layout.literals;
  file.layout.bytes = layout.bytes;
  std::vector<ArraySlot> slots;
  slots.reserve(held.size());
  for (size_t place = 0; place < held.size(); ++place) {
    const size_t i = layout.order.empty() ? place : layout.order[place];
    slots.push_back({held[i].tensor, layout.offsets[i], std::move(held[i].part)});
  }
  sort_arrays(slots);
  file.layout.arrays = std::move(slots);
  if (!shares) file.laid_out = nullptr;
  return file;
}

uint32_t Checkpoint::owner_of(const Model& model, const LayoutSpec& spec, StateCoords state,
                              const std::vector<Model::Held>& held) {
  const auto is_cut = [&](const Model::Held& part) {
    return model.is_cut_over_dp(part.tensor, spec);
  };
  const bool cut =
      spec.optimizer != OptimizerCut::kReplicated && std::any_of(held.begin(), held.end(), is_cut);
  if (!cut) state.dp = 0;
  return state_index(spec, state);
}

Result<StateFilesRef> Checkpoint::state_files(const LayoutSpec& spec,
                                              const StateCoords& state) const {
  const ResultKey of_state = key("state files").add(key_text(spec)).add(state_index(spec, state));
  return results_->get<std::vector<StateFile>>(of_state, [&]() -> Result<StateFilesRef> {
    std::vector<StateFile> files;
    if (const StateFilesRef all =
            results_->known<std::vector<StateFile>>(key("target images").add(key_text(spec)))) {
      const uint32_t number = state_index(spec, state);
      StateCoords first = state;  // whose what is not cut over dp is
      first.dp = 0;
      for (const uint32_t owner : std::set{state_index(spec, first), number}) {
        auto file = std::partition_point(all->begin(), all->end(),
                                         [&](const StateFile& one) { return one.owner < owner; });
        for (; file != all->end() && file->owner == owner; ++file)
          if (std::binary_search(file->states.begin(), file->states.end(), number))
            files.push_back(*file);
      }
    } else {
      PTC_TRY(const auto of_this, of_spec(spec));
      PTC_TRY(files, make_state_files(*of_this, state));
    }
    std::sort(files.begin(), files.end(),
              [](const StateFile& a, const StateFile& b) { return a.path < b.path; });
    return std::make_shared<const std::vector<StateFile>>(std::move(files));
  });
}

Result<StateFilesRef> Checkpoint::target_images(const LayoutSpec& spec) const {
  return results_->get<std::vector<StateFile>>(
      key("target images").add(key_text(spec)), [&]() -> Result<StateFilesRef> {
        PTC_TRY(auto files, make_target_images(spec));
        return std::make_shared<const std::vector<StateFile>>(std::move(files));
      });
}

Result<std::vector<StateFile>> Checkpoint::make_state_files(const OfSpec& of_spec,
                                                            const StateCoords& state,
                                                            const KnownFiles& known) const {
  const LayoutSpec& spec = of_spec.holdings.spec();
  std::vector<StateFile> files;
  std::unordered_set<std::string> done;
  if (of_spec.as_written) {
    const uint32_t number = state_index(spec, state);
    StateCoords first = state;  // what is not cut over dp is its
    first.dp = 0;
    std::vector<uint32_t> written = of_spec.files[number];
    if (state.dp > 0) {
      std::erase_if(written, [&](uint32_t i) { return !manifest().files[i].dp_cut; });
      for (const uint32_t i : of_spec.files[state_index(spec, first)])
        if (!manifest().files[i].dp_cut) written.push_back(i);
      std::sort(written.begin(), written.end());
    }
    HeldByName by_name;
    for (const uint32_t i : written) {
      const WrittenFile& file = manifest().files[i];
      const uint32_t owner = manifest().owner_of(file);
      files.push_back({file.path, {}, owner});
      if (!known.contains({owner, file.path})) {
        if (std::optional<ImageLayout> stored = stored_layout(i)) {
          files.back().layout = *std::move(stored);
        } else {
          if (by_name.empty()) {
            PTC_TRY(by_name, held_by_name(of_spec, state));
          }
          PTC_TRY(files.back().layout, written_layout(i, by_name));
        }
      }
      done.insert(file.path);
    }
  }
  PTC_TRY(auto held, of_spec.holdings.of(state));
  std::map<std::string, std::vector<Model::Held>> groups;
  struct Group {
    bool is_known = false;
    std::vector<Model::Held>* parts = nullptr;  // null: of a file that is done
  };
  std::vector<Group> of_file(of_spec.model->files());
  for (Model::Held& part : held) {
    Group& group = of_file[of_spec.model->file_number(part.tensor)];
    if (!group.is_known) {
      std::string path = file_of(*of_spec.model, part.tensor, spec, state);
      group.parts = done.contains(path) ? nullptr : &groups[std::move(path)];
      // What is one array has a path of its own.
      group.is_known = !is_one_array(of_spec.model->tensors()[part.tensor].file);
    }
    if (group.parts != nullptr) group.parts->push_back(std::move(part));
  }
  for (auto& [path, parts] : groups) {
    const uint32_t owner = owner_of(*of_spec.model, spec, state, parts);
    StateFile file{path};
    if (!known.contains({owner, path})) {
      PTC_TRY(file, compose(path, std::move(parts), spec, state));
    }
    file.owner = owner;
    files.push_back(std::move(file));
  }
  return files;
}

ImageLayout Checkpoint::padding_layout() const {
  ImageLayout layout;
  for (uint32_t i = 0; i < manifest().padding.size(); ++i) {
    const Padding& pad = manifest().padding[i];
    layout.arrays.push_back({static_cast<uint32_t>(model().tensors().size() + i), layout.bytes,
                             SubTensor::whole(pad.local.extent)});
    layout.bytes += pad.local.volume() * dtype_bits(model().tensors()[pad.tensor].dtype) / 8;
  }
  return layout;
}

Result<std::vector<StateFile>> Checkpoint::make_target_images(const LayoutSpec& spec) const {
  PTC_TRY(check_literals(spec));
  std::shared_ptr<const std::vector<int32_t>> writers;  // held: each of torch's files asks
  if (std::any_of(manifest().files.begin(), manifest().files.end(), [](const WrittenFile& file) {
        return file.has_tensors && file.set.empty() && keeps_values(file.path);
      })) {
    PTC_TRY(writers, first_writers());
  }
  std::vector<StateFile> targets;
  if (!manifest().padding.empty() && state_key(spec) != state_key(manifest().written_spec))
    targets.push_back({"", padding_layout()});
  KnownFiles target_of;
  PTC_TRY(const auto of_this, of_spec(spec));
  for (uint32_t state = 0; state < state_count(spec); ++state) {
    PTC_TRY(auto files, make_state_files(*of_this, state_at(spec, state), target_of));
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

Result<std::vector<ImageLayout>> Checkpoint::make_layouts(
    const LayoutSpec& spec, const std::vector<StoredImage>& images,
    const std::vector<std::string>& nodes) const {
  std::vector<ImageLayout> layouts;
  layouts.reserve(images.size());
  uint32_t held_state = UINT32_MAX;
  HeldByName held;  // of held_state
  std::shared_ptr<const OfSpec> as_written;
  StateFilesRef targets;
  for (size_t i = 0; i < images.size(); ++i) {
    const StoredImage& image = images[i];
    ImageLayout layout;
    if (i > 0 && image.written >= 0 && image.written == images[i - 1].written &&
        image.state == images[i - 1].state) {
      layout = layouts.back();  // in another memory
    } else if (image.written >= 0) {
      if (static_cast<size_t>(image.written) >= manifest().files.size())
        return make_error(Code::kCorrupt, "checkpoint {}: image {} is of no file", name(),
                          printable(image.id, 100));
      const WrittenFile& file = manifest().files[image.written];
      if (file.has_tensors && image.state >= state_count(manifest().written_spec))
        return make_error(Code::kCorrupt, "checkpoint {}: image {} is of state {}, and {} has {}",
                          name(), printable(image.id, 100), image.state,
                          manifest().written_spec.name(), state_count(manifest().written_spec));
      if (!file.has_tensors) {
        layout.bytes = file.bytes;
      } else if (held_state != image.state) {
        if (as_written == nullptr) {
          PTC_TRY(as_written, of_spec(manifest().written_spec));
        }
        PTC_TRY(held, held_by_name(*as_written, state_at(manifest().written_spec, image.state)));
        held_state = image.state;
      }
      if (file.has_tensors) {
        PTC_TRY(layout, written_layout(image.written, held));
      }
    } else if (image.path.empty()) {
      layout = padding_layout();
    } else {
      if (targets == nullptr) {
        PTC_TRY(targets, target_images(spec));
      }
      const auto file =
          std::partition_point(targets->begin(), targets->end(), [&](const StateFile& one) {
            return std::tie(one.owner, one.path) < std::tie(image.state, image.path);
          });
      if (file == targets->end() || file->owner != image.state || file->path != image.path)
        return make_error(Code::kCorrupt, "checkpoint {}: image {} is of no file", name(),
                          printable(image.id, 100));
      layout = file->layout;  // a copy: other nodes may have the same
    }
    layout.node = std::lower_bound(nodes.begin(), nodes.end(), image.node) - nodes.begin();
    layout.memory = image.memory;
    layouts.push_back(std::move(layout));
  }
  return layouts;
}

Result<std::shared_ptr<const StoredState>> Checkpoint::make_stored(
    const LayoutSpec& spec, std::vector<StoredImage> images) const {
  auto stored = std::make_shared<StoredState>();
  stored->spec = spec;
  std::sort(images.begin(), images.end(), [](const StoredImage& a, const StoredImage& b) {
    return std::tie(a.state, a.path, a.written, a.node, a.memory, a.id) <
           std::tie(b.state, b.path, b.written, b.node, b.memory, b.id);
  });
  std::vector<std::string>& nodes = stored->nodes;
  for (const StoredImage& image : images) nodes.push_back(image.node);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  stored->here = nodes.size();

  ResultKey with_lost = key("layouts").add(key_text(spec)),
            within_reach = key("layouts within reach").add(key_text(spec));
  for (const StoredImage& image : images) {
    for (ResultKey* of_images : {&with_lost, &within_reach})
      of_images->add(image.state)
          .add(image.path)
          .add(static_cast<uint32_t>(image.written))
          .add(image.node)
          .add(image.memory.to_string());
    within_reach.add(image.image != nullptr ? 1 : 0);
    if (image.image != nullptr && image.image->is_here())
      stored->here = std::lower_bound(nodes.begin(), nodes.end(), image.node) - nodes.begin();
  }
  auto all_layouts = [&]() -> Result<std::shared_ptr<const std::vector<ImageLayout>>> {
    PTC_TRY(auto layouts, make_layouts(spec, images, nodes));
    return std::make_shared<const std::vector<ImageLayout>>(std::move(layouts));
  };
  auto layouts_within_reach = [&]() -> Result<std::shared_ptr<const StoredLayouts>> {
    PTC_TRY(auto whole, results_->get<std::vector<ImageLayout>>(with_lost, all_layouts));
    std::vector<ImageLayout> layouts = *whole;
    for (size_t i = 0; i < images.size(); ++i) {
      if (images[i].image != nullptr) continue;
      layouts[i].arrays.clear();
      layouts[i].literals = {};
    }
    auto names = [facts = facts_](uint32_t tensor) {
      return ptc::quoted(facts->manifest.tensor_name(tensor));
    };
    return std::make_shared<const StoredLayouts>(std::move(layouts), manifest().element_bits(),
                                                 within_reach.digest(), whole, std::move(names));
  };
  PTC_TRY(stored->held, results_->get<StoredLayouts>(within_reach, layouts_within_reach));
  stored->images = std::move(images);
  return std::shared_ptr<const StoredState>(std::move(stored));
}

std::vector<std::string> Checkpoint::lost_tensors() const {
  std::shared_ptr<const StoredState> now = stored();
  std::vector<std::string> lost;
  if (std::all_of(now->images.begin(), now->images.end(),
                  [](const StoredImage& image) { return image.image != nullptr; }))
    return lost;
  for (uint32_t t = 0; t < model().tensors().size(); ++t)
    if (now->index().missing(t, {Box::whole(model().tensors()[t].shape)}) > 0)
      lost.push_back(model().tensors()[t].name);
  return lost;
}

std::optional<std::string> Checkpoint::loss() const {
  const std::vector<std::string> lost = lost_tensors();
  if (lost.empty()) return std::nullopt;
  std::set<std::string_view> away;  // nodes that have what is not within reach
  const std::shared_ptr<const StoredState> now = stored();
  for (const StoredImage& image : now->images)
    if (image.image == nullptr && !image.missing && !image.node.empty()) away.insert(image.node);
  return fmt::format(
      "checkpoint {} has lost {} tensor{}{}{}", name(), lost.size(), lost.size() == 1 ? "" : "s",
      is_open_to_all() ? fmt::format(", {} among them", lost.front()) : "",
      away.empty() ? ""
                   : fmt::format(": they are on {}, which {} away", fmt::join(away, ", "),
                                 away.size() == 1 ? "is" : "are"));
}

}  // namespace ptc
