// The .metadata of a distributed checkpoint.
#include "fuzz.h"
#include "store/base/utf8.h"
#include "store/codec/dcp_metadata.h"
#include "store/codec/safetensors.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  auto parsed = parse_dcp_metadata(input);
  if (!parsed) return check_error(parsed.error());
  const DcpMetadata& metadata = parsed.value();
  auto check_item = [&](const DcpItem& item) {
    PTC_CHECK(item.file < metadata.files.size() && item.offset + item.length >= item.offset);
  };
  for (const DcpTensor& tensor : metadata.tensors) {
    PTC_CHECK(is_utf8(tensor.name) && array_bytes(tensor.shape, tensor.dtype).has_value());
    uint64_t elements = 0;
    for (const DcpChunk& chunk : tensor.chunks) {
      for (size_t axis = 0; axis < chunk.box.axes(); ++axis)
        PTC_CHECK(chunk.box.offset[axis] + chunk.box.extent[axis] <= tensor.shape[axis]);
      elements += chunk.box.volume();
      if (chunk.box.volume() > 0) check_item(chunk.item);
    }
    PTC_CHECK(elements == num_elements(tensor.shape).value());
    if (tensor.chunks.size() > 100) continue;
    for (const DcpChunk& a : tensor.chunks)
      for (const DcpChunk& b : tensor.chunks)
        PTC_CHECK(&a == &b || a.box.empty() || b.box.empty() || !intersect(a.box, b.box));
  }
  for (const DcpValue& value : metadata.values) check_item(value.item);
  std::vector<uint64_t> lengths(metadata.files.size(), 1000);
  if (auto checked = check_dcp_files(metadata, lengths); !checked) check_error(checked.error());
}

std::vector<std::string> large_inputs() {
  using namespace std::string_literals;
  const std::string module = "torch.distributed.checkpoint.metadata\n";
  const std::string begin =
      "\x80\2c" + module + "Metadata\n)\x81}(X\x13\0\0\0state_dict_metadata}("s;
  const std::string end = "uX\x0c\0\0\0storage_data}ub."s;
  const std::string tensor =
      "c" + module + "TensorStorageMetadata\n)\x81}(X\x0a\0\0\0properties"s + "c" + module +
      "TensorProperties\n)\x81(ctorch\nfloat32\ntbX\4\0\0\0sizeK\4\x85X\6\0\0\0chunks]("s + "c" +
      module + "ChunkStorageMetadata\n)\x81}(X\7\0\0\0offsetsK\0\x85X\5\0\0\0sizesK\4\x85ubq\1"s;
  std::vector<std::string> inputs;
  inputs.push_back(begin + "X\1\0\0\0w"s + repeated(tensor, "h\1", kMegabyte / 2, "eub") + end);
  inputs.push_back(begin + "c" + module + "BytesStorageMetadata\n)\x81q\1" + "0" +
                   repeated("", "X\1\0\0\0wh\1"s, kMegabyte / 8, "") + end);
  std::string many = begin + "c" + module + "BytesStorageMetadata\n)\x81q\1" + "0";
  for (uint32_t i = 0; many.size() < kMegabyte; ++i)
    many += "X\3\0\0\0"s + static_cast<char>('a' + i % 26) + static_cast<char>('a' + i / 26 % 26) +
            static_cast<char>('a' + i / 676 % 26) + "h\1";
  inputs.push_back(many + end);
  // Tensors of nothing, which have little but their names.
  std::string empty = "c" + module + "TensorStorageMetadata\n)\x81}(X\x0a\0\0\0properties"s + "c" +
                      module + "TensorProperties\n)\x81(ctorch\nfloat32\ntbX\4\0\0\0size"s +
                      "K\0\x85X\6\0\0\0chunks]ubq\1"s;
  many = "\x80\4c" + module + "Metadata\n)\x81}(X\x0c\0\0\0storage_data}X\x13\0\0\0"s +
         "state_dict_metadata}(X\1\0\0\0w"s + empty;
  for (uint32_t i = 0; many.size() < 7 * kMegabyte; ++i) {
    many += "\x8c\4";
    for (const uint32_t by : {0, 6, 12, 18}) many += static_cast<char>('0' + (i >> by & 63));
    many += "h\1";
  }
  inputs.push_back(many + "uub.");
  return inputs;
}

}  // namespace ptc::fuzz
