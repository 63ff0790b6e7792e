#include "reshard/checkpoint/dcp_values.h"

#include <deque>

#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

std::span<const std::byte> value_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// The archive as bytes, with those of its tensors out of the values' own.
std::string file_of(const TorchLayout& made, const std::vector<TorchPathValue>& values,
                    const std::vector<std::string_view>& bytes) {
  std::string file(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i].pickle == nullptr)
      file.replace(made.tensors[i].offset, bytes[i].size(), bytes[i]);
  return file;
}

}  // namespace

Result<std::string> dcp_values_file(std::span<const DcpTable> tables) {
  std::deque<TorchFile> files;  // whose pickles the values point to
  std::vector<TorchPathValue> values;
  std::vector<std::string_view> bytes;  // by value: of a tensor
  for (const DcpTable& table : tables) {
    for (const auto& [text, archive] : table.values) {
      PTC_TRY(const auto path, parse_torch_path(text));
      PTC_TRY(auto read, TorchFile::read(read_at(value_bytes(archive)), archive.size()));
      const TorchFile& file = files.emplace_back(std::move(read));
      auto add = [&](uint32_t place) -> TorchPathValue& {
        TorchPathValue& value = values.emplace_back();
        value.path = path;
        for (TorchStep& step : file.path(place)) value.path.push_back(std::move(step));
        bytes.emplace_back();
        return value;
      };
      for (const TorchLiteral& literal : file.literals()) {
        TorchPathValue& value = add(literal.place);
        value.pickle = &file.pickle();
        value.node = literal.node;
      }
      for (const TorchTensor& tensor : file.tensors()) {
        if (!tensor.contiguous) continue;
        TorchPathValue& value = add(tensor.place);
        value.dtype = tensor.dtype;
        value.shape = tensor.shape;
        bytes.back() = std::string_view(archive).substr(tensor.offset, tensor.bytes);
      }
    }
  }
  if (values.empty()) return std::string();
  auto made = compose_torch_file(values);
  if (made.has_error()) {
    for (TorchPathValue& value : values)
      value.path = {{TorchStep::Kind::kKey, torch_name(value.path), 0}};
    made = compose_torch_file(values);
  }
  if (made.has_error()) return std::move(made).error();
  return file_of(made.value(), values, bytes);
}

}  // namespace ptc
