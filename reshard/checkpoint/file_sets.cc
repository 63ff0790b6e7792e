// The files that can be read out of a checkpoint: model/, hf/, dcp/, rank/<r>/ and
// rank/<r>/tensors/.
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <unordered_set>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/checkpoint/dcp_tree.h"
#include "reshard/checkpoint/dcp_values.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/codec/npy.h"
#include "store/codec/safetensors.h"
#include "store/codec/tensor_path.h"
#include "store/tensor/stream_copy.h"

namespace ptc {
namespace {

// Shards of hf/ are as large as the Hugging Face tools make them.
constexpr uint64_t kHfShardBytes = 5'000'000'000;

// Beside what it tells of.
constexpr const char* kLeftOut = "LEFT_OUT.txt";

// Who wrote this (tools/python) has each section of a state in a file, and all else in here.
constexpr const char* kSections = "ptc.json";

// While a content lives, the checkpoint is in use.
struct InUse {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<int> token;
};

class StoredContent final : public FileContent {
 public:
  StoredContent(ImageRef image, InUse in_use)
      : image_(std::move(image)), in_use_(std::move(in_use)) {}
  uint64_t bytes() const override { return image_->bytes(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    PTC_TRY(auto source, image_->host_bytes());
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
  explicit TextContent(std::shared_ptr<const std::string> text) : text_(std::move(text)) {}
  uint64_t bytes() const override { return text_->size(); }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    std::memcpy(out.data(), text_->data() + offset, out.size());
    return ok();
  }

 private:
  const std::shared_ptr<const std::string> text_;
};

class GatheredContent final : public FileContent {
 public:
  GatheredContent(GatherProgram program, Transport* transport, InUse in_use)
      : program_(std::move(program)), transport_(transport), in_use_(std::move(in_use)) {}
  uint64_t bytes() const override { return program_.bytes(); }
  const GatherProgram* program() const override { return &program_; }
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

/// Where the bytes of a file are to be had in a stored state.
struct Source {
  ImageRef image;         // that is the file; or null:
  GatherProgram program;  // of what it is gathered
  std::string elsewhere;  // other nodes that some of it is on
};
using FindSource = std::function<Result<Source>(const StoredState&)>;

/// Nodes that did not answer a moment ago.
std::set<std::string> absent_nodes(RemoteFiles& files) {
  MutexLock lock(files.mutex);
  const auto now = RemoteFiles::Clock::now();
  std::erase_if(files.absent, [&](const auto& one) { return one.second < now; });
  std::set<std::string> nodes;
  for (const auto& [node, until] : files.absent) nodes.insert(node);
  return nodes;
}

/// `stored` as it is when what lies on these nodes is lost.
Result<std::shared_ptr<const StoredState>> stored_without(
    const Checkpoint& checkpoint, RemoteFiles& files,
    const std::shared_ptr<const StoredState>& stored, const std::set<std::string>& nodes) {
  MutexLock making(files.making_rest);
  {
    MutexLock lock(files.mutex);
    if (files.rest != nullptr && files.rest->of == stored && files.rest->without == nodes)
      return files.rest->stored;
  }
  std::vector<StoredImage> images = stored->images;
  for (StoredImage& image : images)
    if (nodes.contains(image.node)) image.image = nullptr;
  PTC_TRY(auto rest, checkpoint.make_stored(stored->spec, std::move(images)));
  MutexLock lock(files.mutex);
  if (files.stored == stored)
    files.rest = std::make_shared<const RemoteFiles::Rest>(stored, nodes, rest);
  return rest;
}

/// Some of it is on other nodes. Where one of them does not answer, or not soon, and others have
/// the same bytes, these are asked. When nobody has it any more where it was (bytes were moved), it
/// is looked for where the checkpoint's bytes lie by then: they are the same.
class RemoteContent final : public FileContent {
 public:
  RemoteContent(FindSource find, std::shared_ptr<const StoredState> stored, GatherProgram program,
                Transport* transport, InUse in_use, std::shared_ptr<RemoteFiles> files,
                std::string nodes)
      : find_(std::move(find)),
        transport_(transport),
        in_use_(std::move(in_use)),
        files_(std::move(files)),
        nodes_(std::move(nodes)),
        stored_(std::move(stored)),
        program_(std::make_shared<const GatherProgram>(std::move(program))) {}
  uint64_t bytes() const override { return now().program->bytes(); }
  std::string other_nodes() const override { return nodes_; }
  Result<> read(uint64_t offset, std::span<std::byte> out) const override {
    const auto asked = RemoteFiles::Clock::now();
    for (bool others = true;;) {  // there may be some to ask
      const Now seen = now();
      std::set<std::string> absent;
      Result<> got = seen.program->read(*transport_, offset, out,
                                        others ? kLate : Transport::kUsualSilence, absent);
      if (got.has_value() || got.error().code() != Code::kUnavailable) return got;
      if (others) {
        PTC_TRY(others, turn_to_others(seen, absent));
        if (others || !seen.given_up) continue;
      }
      if (RemoteFiles::Clock::now() - asked > kPatience) {
        give_up(seen.stored);
        return got;
      }
      PTC_TRY(bool newer,
              look_again(seen.stored, seen.given_up ? std::chrono::milliseconds(0) : kPause));
      if (seen.given_up && !newer) return got;
      others = newer;
    }
  }

 private:
  static constexpr std::chrono::seconds kPatience{
      15};  // longer than until a node is known to be away, as a rule
  static constexpr std::chrono::milliseconds kPause{200};
  static constexpr std::chrono::milliseconds kLate{
      1000};  // an answer, where another node could give it
  static constexpr std::chrono::seconds kAvoided{10};  // a node that did not answer
  struct Now {
    std::shared_ptr<const StoredState> stored;
    std::shared_ptr<const GatherProgram> program;
    bool given_up;
  };
  Now now() const {
    MutexLock lock(mutex_);
    return {stored_, program_, given_up_ == stored_};
  }
  /// Whether there is another program to try than `seen`, without what lies on these nodes and
  /// others that do not answer. If not, all of them are asked once more.
  Result<bool> turn_to_others(const Now& seen, const std::set<std::string>& absent) const {
    if (absent.empty()) return false;
    {
      MutexLock lock(files_->mutex);
      for (const std::string& node : absent)
        files_->absent[node] = RemoteFiles::Clock::now() + kAvoided;
    }
    PTC_TRY(auto rest,
            stored_without(*in_use_.checkpoint, *files_, seen.stored, absent_nodes(*files_)));
    Result<Source> source = find_(*rest);
    const bool found = source.has_value();
    if (!found) source = find_(*seen.stored);
    if (source.has_error()) return std::move(source).error();
    MutexLock lock(mutex_);
    if (program_ != seen.program || stored_ != seen.stored)
      return true;  // another reader has turned already
    program_ = std::make_shared<const GatherProgram>(std::move(source.value().program));
    return found;
  }
  /// Whether it is known by now, or after `pause`, that bytes lie elsewhere than `seen` says.
  Result<bool> look_again(const std::shared_ptr<const StoredState>& seen,
                          std::chrono::milliseconds pause) const {
    std::shared_ptr<const StoredState> newer;
    {
      MutexLock lock(files_->mutex);
      files_->replaced.wait_for(files_->mutex, pause, [&]() PTC_REQUIRES(files_->mutex) {
        return files_->stored != seen;
      });
      newer = files_->stored;
    }
    if (newer == seen) return false;
    PTC_TRY(auto source, find_(*newer));
    MutexLock lock(mutex_);
    stored_ = std::move(newer);
    program_ = std::make_shared<const GatherProgram>(std::move(source.program));
    return true;
  }
  /// Until it lies elsewhere, reads fail at once.
  void give_up(std::shared_ptr<const StoredState> seen) const {
    MutexLock lock(mutex_);
    given_up_ = std::move(seen);
  }

  const FindSource find_;
  Transport* const transport_;
  const InUse in_use_;
  const std::shared_ptr<RemoteFiles> files_;
  const std::string nodes_;  // when it was opened
  mutable Mutex mutex_;
  mutable std::shared_ptr<const StoredState> given_up_ PTC_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const StoredState> stored_ PTC_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const GatherProgram> program_
      PTC_GUARDED_BY(mutex_);  // made for it, or for what of it answers
};

}  // namespace

/// Turns descriptions of files into contents, from where the bytes lie at that moment.
class ContentSource {
 public:
  explicit ContentSource(std::shared_ptr<const Checkpoint> checkpoint)
      : checkpoint_(std::move(checkpoint)) {}

  const Checkpoint& checkpoint() const { return *checkpoint_; }

  Result<FileContentRef> open(FindSource find) const {
    std::shared_ptr<const StoredState> stored;
    std::shared_ptr<RemoteFiles> files;
    {
      MutexLock lock(checkpoint_->mutex_);
      stored = checkpoint_->stored_;
      files = checkpoint_->remote_files_;
    }
    InUse in_use{checkpoint_, checkpoint_->open_token_};
    PTC_TRY(auto source, find(*stored));
    if (!source.elsewhere.empty() && files != nullptr) {
      if (const std::set<std::string> absent = absent_nodes(*files); !absent.empty()) {
        PTC_TRY(auto rest, stored_without(*checkpoint_, *files, stored, absent));
        if (Result<Source> other = find(*rest); other.has_value())
          source = std::move(other).value();
      }
    }
    Transport* transport = checkpoint_->transport_;
    if (source.image != nullptr && source.image->has_host_bytes())
      return FileContentRef(
          std::make_shared<StoredContent>(std::move(source.image), std::move(in_use)));
    if (!source.elsewhere.empty() && files != nullptr)
      return FileContentRef(std::make_shared<RemoteContent>(
          std::move(find), std::move(stored), std::move(source.program), transport,
          std::move(in_use), std::move(files), std::move(source.elsewhere)));
    return FileContentRef(
        std::make_shared<GatheredContent>(std::move(source.program), transport, std::move(in_use)));
  }

  Result<FileContentRef> open_gathered(std::shared_ptr<const ImageLayout> layout) const {
    return open([layout = std::move(layout), &checkpoint = *checkpoint_](
                    const StoredState& stored) { return gather(checkpoint, stored, *layout); });
  }

  static Result<Source> gather(const Checkpoint& checkpoint, const StoredState& stored,
                               const ImageLayout& layout) {
    PTC_TRY(check_tensors(checkpoint, layout));
    ImageLayout here = layout;
    here.node = stored.here;  // what is here is read here
    Result<std::vector<Transfer>> transfers = stored.index().plan_image(here);
    if (transfers.has_error()) return lost(checkpoint);
    std::set<std::string_view> elsewhere;
    for (const Transfer& one : transfers.value())
      if (const Image& image = *stored.images[one.source_image].image; !image.is_here())
        elsewhere.insert(image.node());
    return Source{nullptr,
                  GatherProgram(layout.literals, layout.bytes, std::move(transfers).value(),
                                stored.image_refs()),
                  fmt::format("{}", fmt::join(elsewhere, ", "))};
  }

  /// kCorrupt: some tensor of it is known to be wrong in all copies.
  static Result<> check_tensors(const Checkpoint& checkpoint, const ImageLayout& layout) {
    const std::shared_ptr<const KnownDamage> damage = checkpoint.damage();
    if (damage == nullptr) return ok();
    for (const ArraySlot& slot : layout.arrays)
      if (damage->has_tensor(slot.tensor))
        return damaged(checkpoint, checkpoint.manifest().tensor_name(slot.tensor));
    return ok();
  }
  static bool is_damaged(const Checkpoint& checkpoint, const StoredImage& image) {
    const std::shared_ptr<const KnownDamage> damage = checkpoint.damage();
    return damage != nullptr && damage->has_image(image.id);
  }

  static Source whole(const ImageRef& image) {
    Transfer all;
    all.copy.run_bytes = image->bytes();
    std::vector<Transfer> transfers;
    if (image->bytes() > 0) transfers.push_back(all);
    return Source{image, GatherProgram("", image->bytes(), std::move(transfers), {image}),
                  image->is_here() ? std::string() : image->node()};
  }

  /// A file without tensors, as its rank wrote it; `index` into Manifest::files.
  static Result<Source> written(const Checkpoint& checkpoint, const StoredState& stored,
                                uint32_t index) {
    const WrittenFile& file = checkpoint.manifest().files[index];
    if (const auto damage = checkpoint.damage(); damage != nullptr && damage->has_file(index))
      return damaged(checkpoint, fmt::format("{} of rank {}", file.path, file.rank));
    const int64_t image = stored.find_other(index);
    if (image >= 0 && stored.images[image].image != nullptr)
      return whole(stored.images[image].image);
    return make_error(Code::kCorrupt, "checkpoint {}: {} of rank {} is lost", checkpoint.name(),
                      file.path, file.rank);
  }

 private:
  static Error damaged(const Checkpoint& checkpoint, std::string_view what) {
    return make_error(
        Code::kCorrupt,
        "checkpoint {}: {} is not what was committed, and no copy within reach has it "
        "right (ptc verify)",
        checkpoint.name(), what);
  }
  static Error lost(const Checkpoint& checkpoint) {
    return make_error(Code::kCorrupt, "{}",
                      checkpoint.loss().value_or(fmt::format(
                          "checkpoint {} has lost a tensor of this file", checkpoint.name())));
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
    added_.insert(entry.path);
    entries_.push_back(std::move(entry));
    files_.push_back({kind, 0, nullptr, std::move(open)});
  }
  bool has(const std::string& path) const { return added_.contains(path); }  // until finish()
  void finish() {
    added_ = {};
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
    const auto open_now = [&] {
      return file.open ? file.open(source_) : open_npy(file, entries_[index].bytes);
    };
    Result<FileContentRef> content = open_now();
    // The node that has it may have come a moment ago.
    if (content.has_error() && content.error().code() == Code::kCorrupt &&
        source_.checkpoint().catch_up())
      content = open_now();
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
  Result<> add_npy(std::string path, uint32_t tensor,
                   std::unique_ptr<const SubTensor> part = nullptr) {
    const TensorInfo& info = source_.checkpoint().model().tensors()[tensor];
    const Shape& shape = part != nullptr ? part->local_shape : info.shape;
    PTC_TRY(auto bytes, array_bytes(shape, info.dtype));
    bool unknown_to_numpy = dtype_npy_descr(info.dtype).find('V') != std::string_view::npos;
    entries_.push_back({std::move(path), npy_header_bytes(info.dtype, shape) + bytes,
                        unknown_to_numpy ? std::string(dtype_name(info.dtype)) : std::string(),
                        source_.checkpoint().rights_of(tensor)});
    files_.push_back({Kind::kComputed, tensor, std::move(part), nullptr});
    return ok();
  }

  void add_other(uint32_t index) {
    const WrittenFile& file = source_.checkpoint().manifest().files[index];
    if (has(file.path)) return;
    add({file.path, file.bytes, "", source_.checkpoint().manifest().rights_of(file)}, Kind::kImage,
        [index](const ContentSource& source) {
          return source.open([index, &checkpoint = source.checkpoint()](const StoredState& stored) {
            return ContentSource::written(checkpoint, stored, index);
          });
        });
  }

  void add_text(std::string path, std::string text, const ReadRights& rights) {
    add_text(std::move(path), std::make_shared<const std::string>(std::move(text)), rights);
  }
  void add_text(std::string path, std::shared_ptr<const std::string> text,
                const ReadRights& rights) {
    const uint64_t bytes = text->size();
    add({std::move(path), bytes, "", rights}, Kind::kComputed,
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
    auto layout = std::make_shared<ImageLayout>();
    std::string header = write_npy_header(info.dtype, part.local_shape);
    layout->arrays.push_back({file.tensor, header.size(), part});
    layout->literals = std::move(header);
    layout->bytes = bytes;
    return source_.open_gathered(std::move(layout));
  }

  ContentSource source_;
  DType last_dtype_ = DType::kF32;
  Shape last_shape_;
  uint64_t last_header_bytes_ = 0;
  std::vector<File> files_;  // of entries(), in the same order
  std::unordered_set<std::string> added_;
};

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
  return cached(fmt::format("{}/{}", spec.name(), global_rank), [&]() -> Result<FileSetRef> {
    const RankCoords coords = spec.coords(global_rank);
    const StateCoords state = state_of(spec, coords);
    PTC_TRY(auto files, state_files(spec, state));
    const std::string key = state_key(spec);
    auto set = std::make_shared<DescribedSet>(fmt::format("{}/{}", key, state_index(spec, state)),
                                              shared_from_this());
    for (size_t i = 0; i < files->size(); ++i) {
      const StateFile& file = (*files)[i];
      FileSet::Entry entry{file.path, file.layout.bytes, "", facts_->rights_in(file.path)};
      if (file.path.ends_with(".npy")) {
        DType dtype = model().tensors()[file.layout.arrays.front().tensor].dtype;
        if (dtype_npy_descr(dtype).find('V') != std::string_view::npos)
          entry.dtype = dtype_name(dtype);
      }
      set->add(
          std::move(entry), DescribedSet::Kind::kImage,
          [this, files, i, key](const ContentSource& source) -> Result<FileContentRef> {
            return source.open([this, files, i, key](const StoredState& now) -> Result<Source> {
              const auto& [path, layout, owner, states] = (*files)[i];
              int64_t image = state_key(now.spec) == key ? now.find(owner, path) : -1;
              PTC_TRY(ContentSource::check_tensors(*this, layout));
              // A lost image may hold nothing that others do not hold too.
              if (image >= 0 && now.images[image].image &&
                  !ContentSource::is_damaged(*this, now.images[image]))
                return ContentSource::whole(now.images[image].image);
              return ContentSource::gather(*this, now, layout);
            });
          });
    }
    for (uint32_t file : other_files(coords)) set->add_other(file);
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
  return results_->get<TextsByDirectory>(key("values of dcp"), [&]() -> Result<Values> {
    PTC_TRY(const auto tables, tables_of_dcp());
    auto values = std::make_shared<TextsByDirectory>();
    for (const auto& [directory, of_files] : tables) {
      PTC_TRY(auto text, dcp_values_file(of_files));
      if (!text.empty()) values->emplace(directory, std::move(text));
    }
    return Values(std::move(values));
  });
}

Result<std::optional<Checkpoint::MegatronTree>> Checkpoint::megatron_tree() const {
  if (!is_megatron_tree()) return std::optional<MegatronTree>();
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
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (!facts_->primary[t] || model().is_optimizer_state(t)) continue;
      PTC_TRY(auto bytes, array_bytes(tensors[t].shape, tensors[t].dtype));
      if (!adapter && shard_bytes > 0 && shard_bytes + bytes > kHfShardBytes) {
        shards.emplace_back();
        shard_bytes = 0;
      }
      shards.back().push_back({t, SubTensor::whole(tensors[t].shape)});
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
      PTC_TRY(auto file, compose(path, std::move(shards[i]), LayoutSpec(), StateCoords(),
                                 /*laid_out=*/nullptr, &own));
      const uint64_t bytes = file.layout.bytes;
      set->add({path, bytes, "", rights.value_or(ReadRights{manifest().uid, manifest().gid})},
               DescribedSet::Kind::kComputed,
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
    const auto make = [&]() -> Result<DcpTree> {
      PTC_TRY(const auto files, state_files(LayoutSpec(), StateCoords()));
      DcpSources sources;
      PTC_TRY(sources.tables, tables_of_dcp());
      for (const WrittenFile& file : manifest().files) {
        sources.sections = sources.sections || (!file.has_tensors && file.path == kSections);
        if (!file.has_tensors || !file.set.empty() || sources.outlines.contains(file.path))
          continue;
        PTC_TRY(const FileOutline outline, outline_of(file));
        sources.outlines.emplace(file.path, outline.text);
      }
      PTC_TRY(auto tree, make_dcp_tree(*files, model(), sources));
      if (sources.sections)
        tree.left_out += fmt::format("values that are no tensors: {} of each rank\n", kSections);
      return tree;
    };
    Result<DcpTree> tree = make();
    // What cannot be made must not keep the checkpoint from being listed and removed.
    if (tree.has_error()) {
      set->add_text(kLeftOut, "Nothing is here: " + tree.error().message() + "\n", rights);
      return FileSetRef(std::move(set));
    }
    for (DcpTree::File& file : tree.value().files)
      set->add({file.name, file.layout.bytes, "", rights}, DescribedSet::Kind::kComputed,
               [layout = std::make_shared<const ImageLayout>(std::move(file.layout))](
                   const ContentSource& source) { return source.open_gathered(layout); });
    set->add_text(".metadata", std::move(tree.value().metadata), rights);
    if (!tree.value().left_out.empty())
      set->add_text(kLeftOut,
                    "Not in this directory, but in model/ or layouts/ of the checkpoint:\n" +
                        tree.value().left_out,
                    rights);
    set->finish();
    return FileSetRef(std::move(set));
  });
}

}  // namespace ptc
