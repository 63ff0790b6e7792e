#include "store/codec/dcp_metadata.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "store/base/json.h"
#include "store/codec/pickle.h"
#include "store/codec/pickle_walk.h"
#include "store/codec/safetensors.h"
#include "store/codec/torch_file.h"
#include "store/tensor/box_overlap.h"

namespace ptc {
namespace {

class DcpParser {
 public:
  explicit DcpParser(const Pickle& pickle) : pickle_(pickle), walk_(pickle) {}

  Result<DcpMetadata> run() {
    const PickleId root = pickle_.root();
    if (!is_class(root, "Metadata"))
      return invalid_argument("it is not the metadata of a distributed checkpoint, but {}",
                              pickle_.describe(root));
    PTC_TRY(const auto tensors, attribute(root, "state_dict_metadata"));
    PTC_TRY(const auto items, attribute(root, "storage_data"));
    PTC_TRY(const auto paths, attribute(root, "planner_data"));
    PTC_TRY(const auto version, attribute(root, "version"));
    if (!tensors || !pickle_.is(*tensors, Kind::kDict))
      return invalid_argument("its state_dict_metadata is missing");
    if (!items || !pickle_.is(*items, Kind::kDict))
      return invalid_argument("its storage_data is missing");
    if (version && pickle_.is(*version, Kind::kText))
      metadata_.version = pickle_.text(*version).substr(0, 100);
    PTC_TRY(walk_.for_pairs(*tensors,
                            [&](PickleId name, PickleId value) { return add_value(name, value); }));
    PTC_TRY(walk_.for_pairs(*items,
                            [&](PickleId index, PickleId info) { return add_item(index, info); }));
    if (paths && pickle_.is(*paths, Kind::kDict)) {
      PTC_TRY(walk_.for_pairs(*paths,
                              [&](PickleId name, PickleId path) { return add_path(name, path); }));
    }
    for (DcpTensor& tensor : metadata_.tensors) {
      auto checked = check_tensor(tensor);
      if (!checked)
        return std::move(checked).error().with_context(
            fmt::format("tensor {}", quoted(tensor.name)));
    }
    for (const DcpValue& value : metadata_.values)
      if (value.item.file == DcpItem::kNone)
        return invalid_argument("value {}: nobody says in which file it is", quoted(value.name));
    PTC_TRY(check_items());
    return std::move(metadata_);
  }

 private:
  using Kind = PickleKind;
  struct Named {
    bool is_tensor;
    uint32_t number;
  };

  /// Whether it is an object of a class of torch.distributed.checkpoint.
  bool is_class(PickleId id, std::string_view name) {
    if (!pickle_.is(id, Kind::kObject) || !pickle_.is(pickle_.called(id), Kind::kGlobal))
      return false;
    return pickle_.name(pickle_.called(id)) == name &&
           pickle_.module(pickle_.called(id)).starts_with("torch.distributed.");
  }

  /// Calls f(key, value) for the attributes that an object was given.
  template <class F>
  Result<> for_attributes(PickleId object, F&& f) {
    return walk_.for_states(object, [&](PickleId state) -> Result<> {
      if (!pickle_.is(state, Kind::kDict)) return ok();
      return walk_.for_pairs(state, [&](PickleId key, PickleId value) -> Result<> {
        if (pickle_.is(key, Kind::kText)) f(pickle_.text(key), value);
        return ok();
      });
    });
  }
  Result<std::optional<PickleId>> attribute(PickleId object, std::string_view name) {
    std::optional<PickleId> found;
    PTC_TRY(for_attributes(object, [&](std::string_view key, PickleId value) {
      if (key == name) found = value;
    }));
    return found;
  }
  std::optional<uint64_t> count_of(PickleId id) {
    if (!pickle_.is(id, Kind::kInt) || pickle_.integer(id) < 0) return {};
    return static_cast<uint64_t>(pickle_.integer(id));
  }
  Result<> charge(uint64_t bytes) {
    taken_ += bytes;
    if (taken_ > most())
      return invalid_argument(
          "what it says takes more memory than metadata of {} bytes may: it uses few values very "
          "often",
          pickle_.length_bytes());
    return ok();
  }
  uint64_t most() const {
    const uint64_t all = pickle_.length_bytes() * 36, values = pickle_.memory_bytes();
    return (all > values ? all - values : 0) + (1 << 20);
  }

  Result<> add_value(PickleId name_id, PickleId value) {
    if (!pickle_.is(name_id, Kind::kText))
      return invalid_argument("a name in it is {}", pickle_.describe(name_id));
    const std::string_view name = pickle_.text(name_id);
    PTC_TRY(walk_.count_text(name));
    const bool is_tensor = is_class(value, "TensorStorageMetadata");
    if (!is_tensor && !is_class(value, "BytesStorageMetadata"))
      return invalid_argument("value {}: it is neither a tensor nor bytes, but {}", quoted(name),
                              pickle_.describe(value));
    PTC_TRY(charge(3 * (is_tensor ? sizeof(DcpTensor) : sizeof(DcpValue)) + 2 * name.size() + 130));
    const Named named{is_tensor, static_cast<uint32_t>(is_tensor ? metadata_.tensors.size()
                                                                 : metadata_.values.size())};
    if (!names_.try_emplace(name, named).second)
      return invalid_argument("value {}: it is there twice", quoted(name));
    if (!is_tensor) return metadata_.values.push_back({std::string(name), {}, {}}), ok();
    DcpTensor& tensor = metadata_.tensors.emplace_back();
    tensor.name = name;
    auto added = add_tensor(value, tensor);
    if (!added)
      return std::move(added).error().with_context(fmt::format("tensor {}", quoted(name)));
    return ok();
  }

  Result<> add_tensor(PickleId value, DcpTensor& tensor) {
    PTC_TRY(const auto properties, attribute(value, "properties"));
    PTC_TRY(const auto size, attribute(value, "size"));
    PTC_TRY(const auto chunks, attribute(value, "chunks"));
    std::optional<PickleId> type;
    if (properties && pickle_.is(*properties, Kind::kObject)) {
      PTC_TRY(walk_.for_states(*properties, [&](PickleId state) -> Result<> {
        if (pickle_.is(state, Kind::kTuple) && pickle_.tuple_size(state) > 0)
          type = pickle_.element(state, 0);
        return ok();
      }));
      if (!type) {
        PTC_TRY(type, attribute(*properties, "dtype"));
      }
    }
    if (!type) return invalid_argument("nobody says of what type it is");
    const auto dtype = torch_dtype(pickle_, *type);
    if (!dtype) return invalid_argument("its type is not supported: {}", pickle_.describe(*type));
    tensor.dtype = *dtype;
    PTC_TRY(tensor.shape, dims(size, "size"));
    PTC_TRY(array_bytes(tensor.shape, tensor.dtype));
    if (!chunks || !pickle_.is(*chunks, Kind::kList))
      return invalid_argument("its list of chunks is missing");
    size_t count = 0;
    for (Pickle::Changes changes = pickle_.changes(*chunks); changes.more(); changes.next()) {
      PTC_TRY(walk_.count());
      count += (*changes).count;
    }
    // With what check_tensor() and check_items() take of each.
    PTC_TRY(charge(count * (sizeof(DcpChunk) + sizeof(Box*) + 2 * sizeof(uint32_t) + 24)));
    tensor.chunks.reserve(count);
    return walk_.for_items(*chunks, [&](PickleId chunk) -> Result<> {
      std::optional<PickleId> offsets, sizes;
      if (!pickle_.is(chunk, Kind::kObject))
        return invalid_argument("a chunk of it is {}", pickle_.describe(chunk));
      PTC_TRY(for_attributes(chunk, [&](std::string_view key, PickleId attribute) {
        if (key == "offsets") offsets = attribute;
        else if (key == "sizes") sizes = attribute;
      }));
      Box box;
      PTC_TRY(box.offset, dims(offsets, "offsets"));
      PTC_TRY(box.extent, dims(sizes, "sizes"));
      if (box.offset.size() != tensor.shape.size() || box.extent.size() != tensor.shape.size())
        return invalid_argument("a chunk of it has {} axes, the tensor {}", box.extent.size(),
                                tensor.shape.size());
      for (size_t axis = 0; axis < box.axes(); ++axis) {
        if (box.offset[axis] > tensor.shape[axis] ||
            box.extent[axis] > tensor.shape[axis] - box.offset[axis])
          return invalid_argument("its chunk {} is not within {}", box.to_string(),
                                  tensor.shape.to_string());
      }
      tensor.chunks.push_back({box, {}});
      return ok();
    });
  }

  Result<Dims> dims(std::optional<PickleId> id, std::string_view what) {
    if (!id) return invalid_argument("its {} are missing", what);
    PTC_TRY(auto dims, torch_dims(pickle_, *id));
    if (!dims) return invalid_argument("its {} are {}", what, pickle_.describe(*id));
    return *dims;
  }

  Result<> add_item(PickleId index, PickleId info) {
    if (!is_class(index, "MetadataIndex") || !is_class(info, "_StorageInfo"))
      return invalid_argument("its storage_data has {} for {}", pickle_.describe(info),
                              pickle_.describe(index));
    std::optional<PickleId> fqn, offset, hint, path, begin, length, transforms;
    PTC_TRY(for_attributes(index, [&](std::string_view key, PickleId value) {
      if (key == "fqn") fqn = value;
      else if (key == "offset") offset = value;
      else if (key == "index") hint = value;
    }));
    PTC_TRY(for_attributes(info, [&](std::string_view key, PickleId value) {
      if (key == "relative_path") path = value;
      else if (key == "offset") begin = value;
      else if (key == "length") length = value;
      else if (key == "transform_descriptors") transforms = value;
    }));
    if (!fqn || !pickle_.is(*fqn, Kind::kText))
      return invalid_argument("its storage_data has an entry without a name");
    const std::string_view name = pickle_.text(*fqn);
    auto error = [&](std::string_view what) {
      return invalid_argument("value {}: {}", quoted(name), what);
    };
    DcpItem item;
    const auto offset_bytes = begin ? count_of(*begin) : std::nullopt,
               length_bytes = length ? count_of(*length) : std::nullopt;
    if (!path || !pickle_.is(*path, Kind::kText) || !offset_bytes || !length_bytes)
      return error("where it is stored is not said as torch does");
    if (transforms && !pickle_.is(*transforms, Kind::kNone))
      return error(
          "a storage extension has transformed its bytes, which cannot be read by offsets");
    item.offset = *offset_bytes;
    item.length = *length_bytes;
    if (item.offset > INT64_MAX - item.length) return error("it would end beyond 2^63 bytes");
    PTC_TRY(item.file, file(*path));

    if (name.data() != last_name_.data() || name.size() != last_name_.size()) {
      PTC_TRY(walk_.count_text(name));
      const auto found = names_.find(name);
      if (found == names_.end()) return error("it is stored, but not described");
      last_name_ = name;
      last_ = found->second;
    }
    DcpItem* target = nullptr;
    if (!last_.is_tensor) {
      target = &metadata_.values[last_.number].item;
    } else {
      if (!offset) return error("it is stored without saying which chunk of it");
      auto place = dims(offset, "offset");
      if (!place) return error(place.error().message());
      PTC_TRY(target, find_chunk(metadata_.tensors[last_.number], place.value(),
                                 hint ? count_of(*hint) : std::nullopt));
      if (target == nullptr)
        return error(
            fmt::format("a chunk at {} is stored, but not described", place.value().to_string()));
    }
    if (target->file != DcpItem::kNone) return error("it, or a chunk of it, is stored twice");
    *target = item;
    return ok();
  }

  /// The chunk that begins there, rather one that is not empty; nullptr: none does.
  Result<DcpItem*> find_chunk(DcpTensor& tensor, const Dims& offset, std::optional<uint64_t> hint) {
    std::vector<DcpChunk>& chunks = tensor.chunks;
    if (hint && *hint < chunks.size() && chunks[*hint].box.offset == offset)
      return &chunks[*hint].item;
    auto& table = tables_[last_.number];
    if (table.empty()) {
      PTC_TRY(charge(chunks.size() * 120));
      for (const bool empty : {false, true}) {
        for (uint32_t i = 0; i < chunks.size(); ++i)
          if (chunks[i].box.empty() == empty)
            table.try_emplace(chunks[i].box.offset.to_string(), i);
      }
    }
    const auto found = table.find(offset.to_string());
    return found == table.end() ? nullptr : &chunks[found->second].item;
  }

  Result<uint32_t> file(PickleId id) {
    if (id == last_file_id_) return last_file_;
    const std::string_view name = pickle_.text(id);
    if (name.empty() || name.size() > 255 || name == "." || name == ".." ||
        name.find('/') != std::string_view::npos || name.find('\0') != std::string_view::npos)
      return invalid_argument("{} is no name of a file in the checkpoint's directory",
                              quoted(name));
    const auto [found, is_new] =
        files_.try_emplace(name, static_cast<uint32_t>(metadata_.files.size()));
    if (is_new) {
      PTC_TRY(charge(3 * sizeof(std::string) + name.size() + 100));
      metadata_.files.emplace_back(name);
    }
    last_file_id_ = id;
    return last_file_ = found->second;
  }

  Result<> add_path(PickleId name_id, PickleId path) {
    if (!pickle_.is(name_id, Kind::kText) || !pickle_.is(path, Kind::kTuple)) return ok();
    PTC_TRY(walk_.count_text(pickle_.text(name_id)));
    const auto found = names_.find(pickle_.text(name_id));
    if (found == names_.end()) return ok();
    std::vector<TorchStep>& steps = found->second.is_tensor
                                        ? metadata_.tensors[found->second.number].path
                                        : metadata_.values[found->second.number].path;
    steps.clear();
    for (size_t i = 0; i < pickle_.tuple_size(path); ++i) {
      const PickleId step = pickle_.element(path, i);
      PTC_TRY(walk_.count());
      PTC_TRY(charge(3 * sizeof(TorchStep)));
      if (pickle_.is(step, Kind::kText)) {
        PTC_TRY(charge(pickle_.text(step).size()));
        steps.push_back({TorchStep::Kind::kKey, std::string(pickle_.text(step)), 0});
      } else if (const auto index = count_of(step)) {
        steps.push_back({TorchStep::Kind::kListIndex, {}, static_cast<int64_t>(*index)});
      } else {
        return invalid_argument("value {}: a step of its path is {}", quoted(pickle_.text(name_id)),
                                pickle_.describe(step));
      }
    }
    return ok();
  }

  Result<> check_tensor(const DcpTensor& tensor) {
    std::vector<const Box*> boxes;
    uint64_t elements = 0;
    const uint64_t item_bytes = dtype_bits(tensor.dtype) / 8;
    for (const DcpChunk& chunk : tensor.chunks) {
      const uint64_t volume = chunk.box.volume();
      if (volume == 0) continue;
      if (chunk.item.file == DcpItem::kNone)
        return invalid_argument("nobody says in which file its chunk {} is", chunk.box.to_string());
      if (chunk.item.length / item_bytes < volume)
        return invalid_argument("its chunk {} has {} bytes in {}, too few for {} elements",
                                chunk.box.to_string(), chunk.item.length,
                                quoted(metadata_.files[chunk.item.file]), volume);
      if (__builtin_add_overflow(elements, volume, &elements))
        return invalid_argument("its chunks overlap");
      boxes.push_back(&chunk.box);
    }
    PTC_TRY(auto overlap,
            find_overlap(boxes, [this](uint64_t steps) { return walk_.count(steps); }));
    if (overlap)
      return invalid_argument("its chunks {} and {} overlap", boxes[overlap->first]->to_string(),
                              boxes[overlap->second]->to_string());
    PTC_TRY(auto all, num_elements(tensor.shape));
    if (elements != all)
      return invalid_argument("its chunks hold {} of its {} elements", elements, all);
    return ok();
  }

  Result<> check_items() {
    struct Span {
      uint32_t file;
      uint64_t offset, end;
    };
    std::vector<Span> spans;
    size_t count = metadata_.values.size();
    for (const DcpTensor& tensor : metadata_.tensors) count += tensor.chunks.size();
    spans.reserve(count);
    auto add = [&](const DcpItem& item) {
      if (item.file != DcpItem::kNone && item.length > 0)
        spans.push_back({item.file, item.offset, item.offset + item.length});
    };
    for (const DcpTensor& tensor : metadata_.tensors)
      for (const DcpChunk& chunk : tensor.chunks) add(chunk.item);
    for (const DcpValue& value : metadata_.values) add(value.item);
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
      return a.file != b.file ? a.file < b.file : a.offset < b.offset;
    });
    for (size_t i = 1; i < spans.size(); ++i) {
      if (spans[i].file == spans[i - 1].file && spans[i].offset < spans[i - 1].end)
        return invalid_argument("file {}: the items at bytes {} and {} overlap",
                                quoted(metadata_.files[spans[i].file]), spans[i - 1].offset,
                                spans[i].offset);
    }
    return ok();
  }

  const Pickle& pickle_;
  PickleWalk walk_;
  DcpMetadata metadata_;
  uint64_t taken_ = 0;
  std::unordered_map<std::string_view, Named> names_;
  std::unordered_map<std::string_view, uint32_t> files_;
  /// By tensor: its chunks by where they begin.
  std::unordered_map<uint32_t, std::unordered_map<std::string, uint32_t>> tables_;
  std::string_view last_name_;
  Named last_{};
  PickleId last_file_id_ = UINT32_MAX;
  uint32_t last_file_ = 0;
};

}  // namespace

Result<DcpMetadata> parse_dcp_metadata(std::string_view bytes) {
  PTC_TRY(auto pickle, Pickle::parse(bytes));
  return DcpParser(pickle).run();
}

Result<> check_dcp_files(const DcpMetadata& metadata, std::span<const uint64_t> file_bytes) {
  if (file_bytes.size() != metadata.files.size())
    return invalid_argument("{} lengths for {} files", file_bytes.size(), metadata.files.size());
  auto check = [&](const std::string& name, const DcpItem& item) -> Result<> {
    if (item.file == DcpItem::kNone || (item.offset <= file_bytes[item.file] &&
                                        item.length <= file_bytes[item.file] - item.offset))
      return ok();
    return invalid_argument("file {} has {} bytes, but {} should be in bytes {} to {}",
                            quoted(metadata.files[item.file]), file_bytes[item.file], quoted(name),
                            item.offset, item.offset + item.length);
  };
  for (const DcpTensor& tensor : metadata.tensors) {
    for (const DcpChunk& chunk : tensor.chunks) {
      PTC_TRY(check(tensor.name, chunk.item));
    }
  }
  for (const DcpValue& value : metadata.values) {
    PTC_TRY(check(value.name, value.item));
  }
  return ok();
}

Result<DcpArray> find_dcp_array(const ReadAt& file, const DcpItem& item, DType dtype,
                                const Shape& shape) {
  PTC_TRY(auto archive, TorchFile::read(read_from(file, item.offset), item.length));
  if (archive.tensors().size() != 1 || !archive.tensors()[0].name.empty() ||
      !archive.opaque().empty())
    return invalid_argument("it does not hold one tensor");
  const TorchTensor& tensor = archive.tensors()[0];
  if (tensor.dtype != dtype || tensor.shape != shape)
    return invalid_argument("it holds {} {}, but should hold {} {}", dtype_name(tensor.dtype),
                            tensor.shape.to_string(), dtype_name(dtype), shape.to_string());
  return DcpArray{item.offset + tensor.offset, tensor.bytes, tensor.strides, tensor.contiguous};
}

}  // namespace ptc
