// The files that can be read out of a checkpoint: model/, hf/, rank/<r>/ and rank/<r>/tensors/.
#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <unordered_set>

#include "reshard/job/checkpoint.h"
#include "store/base/json.h"
#include "store/codec/npy.h"
#include "store/codec/safetensors.h"
#include "store/codec/tensor_path.h"
#include "store/tensor/stream_copy.h"

namespace ptc {
namespace {

// Shards of hf/ are as large as the Hugging Face tools make them.
constexpr uint64_t kHfShardBytes = 5'000'000'000;

// Holds the checkpoint's open token: while a content lives, the checkpoint is in use.
struct InUse {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<int> token;
};

class ImageContent final : public FileContent {
 public:
  ImageContent(ImageRef image, InUse in_use) : image_(std::move(image)), in_use_(std::move(in_use)) {}
  uint64_t bytes() const override { return image_->bytes(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    PTC_TRY(auto source, image_->map());
    std::memcpy(out.data(), source.data() + offset, out.size());
    return ok();
  }
  ImageRef image() const override { return image_; }

 private:
  ImageRef image_;
  InUse in_use_;
};

class TextContent final : public FileContent {
 public:
  explicit TextContent(std::string text) : text_(std::move(text)) {}
  uint64_t bytes() const override { return text_.size(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    std::memcpy(out.data(), text_.data() + offset, out.size());
    return ok();
  }

 private:
  std::string text_;
};

class GatheredContent final : public FileContent {
 public:
  GatheredContent(GatherProgram program, Transport* transport, InUse in_use)
      : program_(std::move(program)), transport_(transport), in_use_(std::move(in_use)) {}
  uint64_t bytes() const override { return program_.bytes(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    return program_.read(*transport_, offset, out);
  }
  Result<> read_past_caches(uint64_t offset, std::span<std::byte> out) const override {
    return program_.read_in_windows(
        *transport_, offset, offset + out.size(),
        [&](uint64_t at, std::span<const std::byte> window) -> Result<> {
          stream_copy(out.data() + (at - offset), window.data(), window.size());
          return ok();
        });
  }

 private:
  GatherProgram program_;
  Transport* transport_;
  InUse in_use_;
};

}  // namespace

/// Turns descriptions of files into contents, from where the bytes lie at that moment.
class ContentSource {
 public:
  explicit ContentSource(std::shared_ptr<const Checkpoint> checkpoint)
      : checkpoint_(std::move(checkpoint)) {}

  const Checkpoint& checkpoint() const { return *checkpoint_; }

  Result<FileContentRef> gather(const ImageLayout& layout) const {
    std::shared_ptr<const StoredState> stored = checkpoint_->stored();
    ImageLayout here = layout;
    here.node = stored->here;  // what is here is read here
    Result<std::vector<Transfer>> transfers = stored->index().plan_image(here);
    if (transfers.has_error()) return lost();
    return FileContentRef(std::make_shared<GatheredContent>(
        GatherProgram(layout.header, layout.bytes, std::move(transfers).value(),
                      stored->image_refs()),
        checkpoint_->transport_, in_use()));
  }

  Result<FileContentRef> whole(const StoredState& stored, size_t index) const {
    const ImageRef& image = stored.images[index].image;
    if (image->is_here()) return FileContentRef(std::make_shared<ImageContent>(image, in_use()));
    Transfer all;
    all.copy.run_bytes = image->bytes();
    std::vector<Transfer> transfers;
    if (image->bytes() > 0) transfers.push_back(all);
    return FileContentRef(std::make_shared<GatheredContent>(
        GatherProgram("", image->bytes(), std::move(transfers), {image}), checkpoint_->transport_,
        in_use()));
  }

  /// A file without tensors, as its rank wrote it; `index` into Manifest::files.
  Result<FileContentRef> written(uint32_t index) const {
    std::shared_ptr<const StoredState> stored = checkpoint_->stored();
    const int64_t image = stored->find_other(index);
    if (image >= 0 && stored->images[image].image != nullptr) return whole(*stored, image);
    const WrittenFile& file = checkpoint_->manifest().files[index];
    return make_error(Code::kCorrupt, "checkpoint {}: {} of rank {} is lost", checkpoint_->name(),
                      file.path, file.rank);
  }

 private:
  InUse in_use() const { return {checkpoint_, checkpoint_->open_token_}; }
  Error lost() const {
    std::vector<std::string> tensors = checkpoint_->lost_tensors();
    return make_error(Code::kCorrupt, "checkpoint {}: {} tensors are lost, {} among them",
                      checkpoint_->name(), tensors.size(),
                      tensors.empty() ? "one of this file" : tensors.front());
  }
  std::shared_ptr<const Checkpoint> checkpoint_;
};

namespace {

/// A set of which each file is described by its layout when it is opened.
class DescribedSet : public FileSet {
 public:
  using Open = std::function<Result<FileContentRef>(const ContentSource&)>;
  enum class Kind : uint8_t {
    kComputed,
    kImage,  // stored, perhaps: under the layout in force, and on this node
  };

  DescribedSet(std::string key, std::shared_ptr<const Checkpoint> checkpoint)
      : FileSet(std::move(key)), source_(std::move(checkpoint)) {}

  void add(Entry entry, Kind kind, Open open) {
    entries_.push_back(std::move(entry));
    files_.push_back({kind, 0, nullptr, std::move(open)});
  }
  bool has(std::string_view path) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const Entry& entry) { return entry.path == path; });
  }
  void finish() {
    std::vector<uint32_t> order(entries_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return entries_[a].path < entries_[b].path; });
    std::vector<Entry> entries;
    std::vector<File> files;
    entries.reserve(order.size());
    files.reserve(order.size());
    for (uint32_t i : order) {
      entries.push_back(std::move(entries_[i]));
      files.push_back(std::move(files_[i]));
    }
    entries_ = std::move(entries);
    files_ = std::move(files);
  }
  Result<FileContentRef> open(size_t index) const override {
    const File& file = files_[index];
    Result<FileContentRef> content = file.open ? file.open(source_) : open_npy(file, entries_[index].bytes);
    if (content.has_error() && source_.checkpoint().removed())
      return make_error(Code::kNotFound, "checkpoint {} was removed", source_.checkpoint().name());
    return content;
  }
  bool is_stored(size_t index) const override {
    if (files_[index].kind == Kind::kComputed) return false;
    auto content = open(index);
    return content && content.value()->image() != nullptr;
  }

  /// Adds a tensor, or its part, as one .npy. There may be very many of them.
  Result<> add_npy(std::string path, uint32_t tensor, std::unique_ptr<const SubTensor> part = nullptr) {
    const TensorInfo& info = source_.checkpoint().model().tensors()[tensor];
    const Shape& shape = part != nullptr ? part->local_shape : info.shape;
    PTC_TRY(auto bytes, array_bytes(shape, info.dtype));
    bool unknown_to_numpy = dtype_npy_descr(info.dtype).find('V') != std::string_view::npos;
    entries_.push_back({std::move(path), npy_header_bytes(info.dtype, shape) + bytes,
                        unknown_to_numpy ? std::string(dtype_name(info.dtype)) : std::string()});
    files_.push_back({Kind::kComputed, tensor, std::move(part), nullptr});
    return ok();
  }

  void add_other(uint32_t index) {
    const WrittenFile& file = source_.checkpoint().manifest().files[index];
    if (has(file.path)) return;
    add({file.path, file.bytes, ""}, Kind::kImage,
        [index](const ContentSource& source) { return source.written(index); });
  }

  void add_text(std::string path, std::string text) {
    uint64_t bytes = text.size();
    add({std::move(path), bytes, ""}, Kind::kComputed,
        [text = std::move(text)](const ContentSource&) -> Result<FileContentRef> {
          return FileContentRef(std::make_shared<TextContent>(text));
        });
  }

 private:
  struct File {
    Kind kind;
    uint32_t tensor;                        // of an .npy
    std::unique_ptr<const SubTensor> part;  // null: all of it
    Open open;                              // of anything else
  };

  /// Tensors of a model have few shapes, and neighbours often the same.
  uint64_t npy_header_bytes(DType dtype, const Shape& shape) {
    if (last_header_bytes_ == 0 || dtype != last_dtype_ || !(shape == last_shape_)) {
      last_dtype_ = dtype;
      last_shape_ = shape;
      last_header_bytes_ = write_npy_header(dtype, shape).size();
    }
    return last_header_bytes_;
  }

  Result<FileContentRef> open_npy(const File& file, uint64_t bytes) const {
    const TensorInfo& info = source_.checkpoint().model().tensors()[file.tensor];
    const SubTensor part = file.part != nullptr ? *file.part : SubTensor::whole(info.shape);
    ImageLayout layout;
    layout.header = write_npy_header(info.dtype, part.local_shape);
    layout.bytes = bytes;
    layout.arrays.push_back({file.tensor, layout.header.size(), part});
    return source_.gather(layout);
  }

  ContentSource source_;
  DType last_dtype_ = DType::kF32;
  Shape last_shape_;
  uint64_t last_header_bytes_ = 0;
  std::vector<File> files_;  // of entries(), in the same order
};

}  // namespace

Result<FileSetRef> Checkpoint::cached(const std::string& key,
                                      const std::function<Result<FileSetRef>()>& build) const {
  {
    std::lock_guard lock(mutex_);
    auto it = file_sets_.find(key);
    if (it != file_sets_.end())
      if (FileSetRef set = it->second.lock()) return set;
  }
  PTC_TRY(auto set, build());
  std::lock_guard lock(mutex_);
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
    PTC_TRY(auto held, model().hold(spec, state));
    for (Model::Held& part : held) {
      PTC_TRY(auto path, tensor_path(model().local_name(part.tensor, spec, state.pp)));
      if (!facts_->primary[part.tensor]) {
        const std::string& model_path = facts_->model_paths[part.tensor];
        path = model_path.substr(0, model_path.find('/') + 1) + path;
      }
      PTC_TRY(set->add_npy(std::move(path), part.tensor,
                           std::make_unique<const SubTensor>(std::move(part.part))));
    }
    set->finish();
    return FileSetRef(std::move(set));
  });
}

Result<FileSetRef> Checkpoint::rank_files(const LayoutSpec& spec, uint64_t global_rank) const {
  return cached(fmt::format("{}/{}", spec.name(), global_rank), [&]() -> Result<FileSetRef> {
    const RankCoords coords = spec.coords(global_rank);
    const StateCoords state = state_of(spec, coords);
    PTC_TRY(auto files, state_files(spec, state));
    const std::string key = state_key(spec);
    auto set = std::make_shared<DescribedSet>(fmt::format("{}/{}", key, state_index(spec, state)),
                                              shared_from_this());
    for (size_t i = 0; i < files->size(); ++i) {
      const StateFile& file = (*files)[i];
      FileSet::Entry entry{file.path, file.layout.bytes, ""};
      if (file.path.ends_with(".npy")) {
        DType dtype = model().tensors()[file.layout.arrays.front().tensor].dtype;
        if (dtype_npy_descr(dtype).find('V') != std::string_view::npos)
          entry.dtype = dtype_name(dtype);
      }
      set->add(std::move(entry), DescribedSet::Kind::kImage,
               [this, files, i, key](const ContentSource& source) -> Result<FileContentRef> {
                 const auto& [path, layout, owner, states] = (*files)[i];
                 std::shared_ptr<const StoredState> now = stored();
                 int64_t image = state_key(now->spec) == key ? now->find(owner, path) : -1;
                 // A lost image may hold nothing that others do not hold too.
                 return image >= 0 && now->images[image].image ? source.whole(*now, image)
                                                               : source.gather(layout);
               });
    }
    for (uint32_t file : other_files(coords)) set->add_other(file);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

std::vector<uint32_t> Checkpoint::other_files(const RankCoords& coords) const {
  // The rank with the same coordinates, else rank 0 of that stage, else rank 0.
  const ParallelConfig& sizes = manifest().written_spec.sizes;
  std::vector<uint64_t> candidates;
  auto add = [&](const RankCoords& c) {
    if (c.tp < sizes.tp && c.pp < sizes.pp && c.dp < sizes.dp && c.ep < sizes.ep && c.cp < sizes.cp)
      candidates.push_back(manifest().written_spec.order.global_rank(sizes, c));
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

Result<FileSetRef> Checkpoint::hf_files() const {
  return cached("hf", [&]() -> Result<FileSetRef> {
    auto set = std::make_shared<DescribedSet>("hf", shared_from_this());
    const std::vector<TensorInfo>& tensors = model().tensors();
    std::vector<std::vector<Model::Held>> shards(1);
    uint64_t shard_bytes = 0, total_bytes = 0;
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (!facts_->primary[t] || !model().is_parameter(t)) continue;
      PTC_TRY(auto bytes, array_bytes(tensors[t].shape, tensors[t].dtype));
      if (shard_bytes > 0 && shard_bytes + bytes > kHfShardBytes) {
        shards.emplace_back();
        shard_bytes = 0;
      }
      shards.back().push_back({t, SubTensor::whole(tensors[t].shape)});
      shard_bytes += bytes;
      total_bytes += bytes;
    }
    json::object weight_map;
    for (size_t i = 0; i < shards.size(); ++i) {
      std::string path = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
      for (const Model::Held& part : shards[i]) weight_map[tensors[part.tensor].name] = path;
      PTC_TRY(auto file, compose(path, std::move(shards[i]), LayoutSpec(), StateCoords()));
      set->add({path, file.layout.bytes, ""}, DescribedSet::Kind::kComputed,
               [layout = std::move(file.layout)](const ContentSource& source) {
                 return source.gather(layout);
               });
    }
    set->add_text("model.safetensors.index.json",
                  json::serialize(json::object{
                      {"metadata", json::object{{"total_size", total_bytes}}},
                      {"weight_map", std::move(weight_map)}}) + "\n");
    for (uint32_t file : other_files(RankCoords())) set->add_other(file);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

}  // namespace ptc
