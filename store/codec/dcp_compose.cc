#include "store/codec/dcp_compose.h"

#include <fmt/format.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "store/base/json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

constexpr const char* kMetadata = "torch.distributed.checkpoint.metadata";
constexpr uint64_t kAlign = 64;
constexpr size_t kMostKinds = 4096;

/// Where something is in the files, for the metadata.
struct Item {
  uint32_t file = 0;
  uint64_t offset = 0, length = 0;
};

class DcpComposer {
 public:
  DcpComposer(std::span<const DcpNewTensor> tensors, std::span<const DcpNewValue> values,
              uint64_t file_bytes)
      : tensors_(tensors), values_(values), file_bytes_(file_bytes) {}

  Result<DcpNewCheckpoint> run() {
    for (const DcpNewValue& value : values_) value_items_.push_back(add_value(value));
    for (const DcpNewTensor& tensor : tensors_) {
      made_.places.emplace_back();
      items_.emplace_back();
      for (const Box& chunk : tensor.chunks) {
        auto added = add_chunk(tensor, chunk.extent);
        if (added.has_error())
          return std::move(added).error().with_context(
              fmt::format("tensor {}", quoted(tensor.name)));
      }
    }
    if (made_.files.empty()) begin_file();
    PTC_TRY(write_metadata());
    return std::move(made_);
  }

 private:
  // --- files

  void begin_file() {
    made_.files.push_back({fmt::format("__0_{}.distcp", made_.files.size()), {{0, ""}}, 0});
  }
  /// The file that the next item goes to, at a multiple of kAlign.
  DcpNewFile& file() {
    if (made_.files.empty() || made_.files.back().bytes >= file_bytes_) begin_file();
    DcpNewFile& file = made_.files.back();
    if (const uint64_t over = file.bytes % kAlign; over > 0)
      append(file, file.bytes, std::string(kAlign - over, '\0'));
    return file;
  }
  /// `offset` is not before the file's end.
  static void append(DcpNewFile& file, uint64_t offset, std::string_view bytes) {
    if (bytes.empty()) return;
    ZipWriter::Piece& last = file.pieces.back();
    if (last.offset + last.bytes.size() == offset) last.bytes += bytes;
    else if (last.bytes.empty()) last = {offset, std::string(bytes)};
    else file.pieces.push_back({offset, std::string(bytes)});
    file.bytes = offset + bytes.size();
  }
  uint32_t last_file() const { return static_cast<uint32_t>(made_.files.size() - 1); }

  Item add_value(const DcpNewValue& value) {
    DcpNewFile& into = file();
    const Item item{last_file(), into.bytes, value.archive.size()};
    append(into, into.bytes, value.archive);
    return item;
  }

  Result<> add_chunk(const DcpNewTensor& tensor, const Shape& shape) {
    // Chunks of one tensor are alike, as are tensors of a model's layers.
    const std::string kind = fmt::format("{}{}", dtype_name(tensor.dtype), shape.to_string());
    auto like = like_.find(kind);
    if (like == like_.end()) {
      TorchPathValue whole;
      whole.dtype = tensor.dtype;
      whole.shape = shape;
      PTC_TRY(auto made, compose_torch_file(std::span(&whole, 1)));
      if (like_.size() >= kMostKinds) like_.clear();
      like = like_.emplace(kind, std::move(made)).first;
    }
    const TorchLayout& archive = like->second;
    DcpNewFile& into = file();
    const uint64_t begin = into.bytes;
    if (archive.zip.file_bytes > (uint64_t{1} << 62) - begin)
      return invalid_argument("the tensors have more than 2^62 bytes");
    for (const ZipWriter::Piece& piece : archive.zip.pieces)
      append(into, begin + piece.offset, piece.bytes);
    into.bytes = begin + archive.zip.file_bytes;
    items_.back().push_back({last_file(), begin, archive.zip.file_bytes});
    made_.places.back().push_back({last_file(), begin + archive.tensors.front().offset});
    return ok();
  }

  // --- metadata

  /// An object made without arguments, whose attributes follow: dict and BUILD.
  void begin_object(const char* module, const char* name) {
    writer_.known_global(module, name);
    writer_.opcode(')');
    writer_.opcode('\x81');
    writer_.opcode('}');
    writer_.opcode('(');
  }
  void end_object() {
    writer_.opcode('u');
    writer_.opcode('b');
  }
  void size(const Dims& dims) {
    writer_.known_global("torch", "Size");
    writer_.numbers(dims.begin(), dims.end());
    writer_.opcode('\x85');
    writer_.opcode('R');
  }
  /// A text that is used again.
  void shared(std::string_view text, std::optional<uint32_t>& remembered) {
    if (remembered) return writer_.get(*remembered);
    writer_.text(text);
    remembered = writer_.put();
  }

  Result<> properties(DType dtype) {
    writer_.known_global(kMetadata, "TensorProperties");
    writer_.opcode(')');
    writer_.opcode('\x81');
    writer_.opcode('(');
    const std::string_view name = torch_dtype_name(dtype);
    if (name.empty()) return invalid_argument("torch has no type {}", dtype_name(dtype));
    PTC_TRY(writer_.global("torch", name));
    writer_.known_global("torch.serialization", "_get_layout");
    writer_.text("torch.strided");
    writer_.opcode('\x85');
    writer_.opcode('R');
    writer_.boolean(false);
    writer_.known_global(kMetadata, "_MEM_FORMAT_ENCODING");
    writer_.integer(0);  // contiguous
    writer_.opcode('\x85');
    writer_.opcode('R');
    writer_.boolean(false);
    writer_.opcode('t');
    writer_.opcode('b');
    return ok();
  }

  Result<> describe(const DcpNewTensor& tensor) {
    begin_object(kMetadata, "TensorStorageMetadata");
    writer_.text("properties");
    PTC_TRY(properties(tensor.dtype));
    writer_.text("size");
    size(tensor.shape);
    writer_.text("chunks");
    writer_.opcode(']');
    writer_.opcode('(');
    for (const Box& chunk : tensor.chunks) {
      begin_object(kMetadata, "ChunkStorageMetadata");
      shared("offsets", offsets_);
      size(chunk.offset);
      shared("sizes", sizes_);
      size(chunk.extent);
      end_object();
    }
    writer_.opcode('e');
    end_object();
    return ok();
  }

  void path(const std::vector<TorchStep>& path, std::string_view name) {
    writer_.opcode('(');
    for (const TorchStep& step : path) {
      if (step.kind == TorchStep::Kind::kKey || step.kind == TorchStep::Kind::kTypesKey)
        writer_.text(step.key);
      else if (step.kind == TorchStep::Kind::kNumberKey) writer_.text(std::to_string(step.number));
      else writer_.integer(step.number);
    }
    if (path.empty()) writer_.text(name);
    writer_.opcode('t');
  }

  void stored(uint32_t name, const Box* chunk, size_t number, const Item& item) {
    begin_object(kMetadata, "MetadataIndex");
    shared("fqn", fqn_);
    writer_.get(name);
    shared("offset", offset_);
    if (chunk != nullptr) size(chunk->offset);
    else writer_.none();
    shared("index", index_);
    if (chunk != nullptr) writer_.integer(static_cast<int64_t>(number));
    else writer_.none();
    end_object();
    begin_object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    shared("relative_path", relative_path_);
    writer_.text(made_.files[item.file].name);
    shared("offset", offset_);
    writer_.integer(static_cast<int64_t>(item.offset));
    shared("length", length_);
    writer_.integer(static_cast<int64_t>(item.length));
    end_object();
  }

  Result<> write_metadata() {
    std::vector<uint32_t> names;  // remembered: of tensors, then values
    begin_object(kMetadata, "Metadata");
    writer_.text("state_dict_metadata");
    writer_.opcode('}');
    writer_.opcode('(');
    for (const DcpNewTensor& tensor : tensors_) {
      writer_.text(tensor.name);
      names.push_back(writer_.put());
      auto described = describe(tensor);
      if (described.has_error())
        return std::move(described).error().with_context(
            fmt::format("tensor {}", quoted(tensor.name)));
    }
    for (const DcpNewValue& value : values_) {
      writer_.text(value.name);
      names.push_back(writer_.put());
      writer_.known_global(kMetadata, "BytesStorageMetadata");
      writer_.opcode(')');
      writer_.opcode('\x81');
    }
    writer_.opcode('u');
    writer_.text("planner_data");
    writer_.opcode('}');
    writer_.opcode('(');
    for (size_t i = 0; i < tensors_.size(); ++i) {
      writer_.get(names[i]);
      path(tensors_[i].path, tensors_[i].name);
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      writer_.get(names[tensors_.size() + i]);
      path(values_[i].path, values_[i].name);
    }
    writer_.opcode('u');
    writer_.text("storage_data");
    writer_.opcode('}');
    writer_.opcode('(');
    for (size_t i = 0; i < tensors_.size(); ++i)
      for (size_t c = 0; c < tensors_[i].chunks.size(); ++c)
        stored(names[i], &tensors_[i].chunks[c], c, items_[i][c]);
    for (size_t i = 0; i < values_.size(); ++i)
      stored(names[tensors_.size() + i], nullptr, 0, value_items_[i]);
    writer_.opcode('u');
    writer_.text("storage_meta");
    writer_.none();
    writer_.text("version");
    writer_.text("1.0.0");
    end_object();
    made_.metadata = std::move(writer_).finish();
    return ok();
  }

  const std::span<const DcpNewTensor> tensors_;
  const std::span<const DcpNewValue> values_;
  const uint64_t file_bytes_;
  DcpNewCheckpoint made_;
  std::vector<Item> value_items_;
  std::vector<std::vector<Item>> items_;               // by tensor and chunk
  std::unordered_map<std::string, TorchLayout> like_;  // archives by type and shape
  PickleWriter writer_;
  std::optional<uint32_t> offsets_, sizes_, fqn_, offset_, index_, relative_path_, length_;
};

}  // namespace

Result<DcpNewCheckpoint> compose_dcp(std::span<const DcpNewTensor> tensors,
                                     std::span<const DcpNewValue> values, uint64_t file_bytes) {
  return DcpComposer(tensors, values, file_bytes).run();
}

namespace {

/// A pickle of this value alone, if it is of a kind that holds no others: to copy it out of its own
/// is to look at all of that.
std::optional<std::string> pickle_alone(const Pickle& pickle, PickleId node) {
  PickleWriter writer;
  switch (pickle.kind(node)) {
    case PickleKind::kNone:
      writer.none();
      break;
    case PickleKind::kFalse:
    case PickleKind::kTrue:
      writer.boolean(pickle.kind(node) == PickleKind::kTrue);
      break;
    case PickleKind::kInt:
      writer.integer(pickle.integer(node));
      break;
    case PickleKind::kFloat:
      writer.number(pickle.number(node));
      break;
    case PickleKind::kText:
      writer.text(pickle.text(node));
      break;
    default:
      return std::nullopt;
  }
  return std::move(writer).finish();
}

}  // namespace

Result<std::string> save_value(const Pickle& pickle, PickleId node) {
  TorchPathValue value;
  value.pickle = &pickle;
  value.node = node;
  const std::optional<std::string> alone = pickle_alone(pickle, node);
  std::optional<Pickle> of_alone;
  if (alone) {
    PTC_TRY(of_alone, Pickle::parse(*alone));
    value.pickle = &*of_alone;
    value.node = of_alone->root();
  }
  PTC_TRY(auto made, compose_torch_file(std::span(&value, 1)));
  std::string archive(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    archive.replace(piece.offset, piece.bytes.size(), piece.bytes);
  return archive;
}

}  // namespace ptc
