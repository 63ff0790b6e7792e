#include "reshard/checkpoint/dcp_values.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "store/base/json.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

std::span<const std::byte> value_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// The elements of a transpose, or of a slice of columns, one behind the other. A tensor that
/// repeats its elements (expand) has more of them than the archive, which nobody saves on purpose.
Result<std::string> in_c_order(std::string_view bytes, const TorchTensor& tensor,
                               size_t archive_bytes) {
  PTC_TRY(const uint64_t all, array_bytes(tensor.shape, tensor.dtype));
  if (all > archive_bytes || dtype_bits(tensor.dtype) % 8 != 0)
    return invalid_argument(
        "tensor {} has {} bytes, more than what it is saved in, because its elements are repeated: "
        "save .contiguous()",
        ptc::quoted(tensor.name), all);
  const size_t item = dtype_bits(tensor.dtype) / 8;
  std::string gathered;
  gathered.reserve(all);
  std::vector<uint64_t> index(tensor.shape.size());
  for (uint64_t left = all / item, at = 0; left > 0; --left) {
    gathered.append(bytes.substr(at * item, item));
    for (size_t axis = index.size(); axis-- > 0;) {
      at += tensor.strides[axis];
      if (++index[axis] < tensor.shape[axis]) break;
      at -= tensor.strides[axis] * tensor.shape[axis];
      index[axis] = 0;
    }
  }
  return gathered;
}

/// Values out of archives, with what their pickles and bytes are in.
struct GatheredValues {
  std::deque<TorchFile> files;  // whose pickles the values point to
  std::vector<TorchPathValue> values;
  std::vector<std::string_view> bytes;  // by value: of a tensor
  std::deque<std::string> gathered_bytes;

  Result<> add(const std::string& text, const std::string& archive) {
    PTC_TRY(const auto path, parse_torch_path(text));
    PTC_TRY(auto read, TorchFile::read(read_at(value_bytes(archive)), archive.size()));
    const TorchFile& file = files.emplace_back(std::move(read));
    auto add_at = [&](uint32_t place) -> TorchPathValue& {
      TorchPathValue& value = values.emplace_back();
      value.path = path;
      for (TorchStep& step : file.path(place)) value.path.push_back(std::move(step));
      bytes.emplace_back();
      return value;
    };
    for (const TorchLiteral& literal : file.literals()) {
      TorchPathValue& value = add_at(literal.place);
      value.pickle = &file.pickle();
      value.node = literal.node;
    }
    if (!file.opaque().empty()) {
      const TorchOpaque& opaque = file.opaque().front();
      return invalid_argument("value {}: what is at {} in it cannot be kept: {}",
                              ptc::quoted(torch_name(path)), ptc::quoted(opaque.name),
                              opaque.reason);
    }
    for (const TorchTensor& tensor : file.tensors()) {
      TorchPathValue& value = add_at(tensor.place);
      value.dtype = tensor.dtype;
      value.shape = tensor.shape;
      const auto elements = std::string_view(archive).substr(tensor.offset, tensor.bytes);
      if (tensor.contiguous) {
        bytes.back() = elements;
      } else {
        PTC_TRY(auto gathered, in_c_order(elements, tensor, archive.size()));
        bytes.back() = gathered_bytes.emplace_back(std::move(gathered));
      }
    }
    return ok();
  }
  Result<> add(std::span<const DcpTable> tables) {
    for (const DcpTable& table : tables)
      for (const auto& [text, archive] : table.values) {
        PTC_TRY(add(text, archive));
      }
    return ok();
  }

  /// All bytes of the archive but those of tensors that are not among these; by offset.
  std::vector<Literals::Piece> pieces(TorchLayout made) const {
    std::vector<Literals::Piece> all;
    for (ZipWriter::Piece& piece : made.zip.pieces)
      if (!piece.bytes.empty()) all.push_back({piece.offset, std::move(piece.bytes)});
    for (size_t i = 0; i < values.size(); ++i)
      if (!bytes[i].empty()) all.push_back({made.tensors[i].offset, std::string(bytes[i])});
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.offset < b.offset; });
    return all;
  }
};

}  // namespace

Result<std::string> dcp_values_file(std::span<const DcpTable> tables) {
  GatheredValues all;
  PTC_TRY(all.add(tables));
  if (all.values.empty()) return std::string();
  auto made = compose_torch_file(all.values);
  if (made.has_error()) {
    for (TorchPathValue& value : all.values)
      value.path = {{TorchStep::Kind::kKey, torch_name(value.path), 0}};
    made = compose_torch_file(all.values);
  }
  if (made.has_error()) return std::move(made).error();
  std::string file(made.value().zip.file_bytes, '\0');
  for (const Literals::Piece& piece : all.pieces(std::move(made).value()))
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  return file;
}

Result<ImageLayout> lay_out_values(std::span<const DcpTable> tables,
                                   std::span<const ValueTensor> tensors) {
  GatheredValues all;
  PTC_TRY(all.add(tables));
  const size_t before = all.values.size();
  for (const ValueTensor& tensor : tensors) {
    TorchPathValue& value = all.values.emplace_back();
    value.path = tensor.path;
    value.dtype = tensor.dtype;
    value.shape = tensor.all.local_shape;
    all.bytes.emplace_back();
  }
  PTC_TRY(auto made, compose_torch_file(all.values));
  ImageLayout layout;
  layout.bytes = made.zip.file_bytes;
  std::vector<ArraySlot> arrays;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (made.tensors[before + i].bytes > 0)
      arrays.push_back({tensors[i].tensor, made.tensors[before + i].offset, tensors[i].all});
  sort_arrays(arrays);
  layout.arrays = std::move(arrays);
  layout.literals = Literals(all.pieces(std::move(made)));
  return layout;
}

}  // namespace ptc
