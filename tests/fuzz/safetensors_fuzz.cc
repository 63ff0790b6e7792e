// A safetensors file: 8 bytes say how much data there is, the rest is the file up to the data.
#include <algorithm>

#include "fuzz.h"
#include "store/codec/safetensors.h"
#include "store/codec/tensor_path.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  const uint64_t data_bytes = take_number(input) & (UINT64_MAX >> 1);
  const uint64_t file_bytes = input.size() + data_bytes;
  const auto file = bytes_of(input);
  auto header_bytes =
      safetensors_header_bytes(file.first(std::min<size_t>(8, file.size())), file_bytes);
  if (!header_bytes) return check_error(header_bytes.error());
  PTC_CHECK(header_bytes.value() >= 8 && header_bytes.value() <= file_bytes);
  if (header_bytes.value() > file.size()) return;
  auto parsed = parse_safetensors(file.first(header_bytes.value()), file_bytes);
  if (!parsed) return check_error(parsed.error());

  std::vector<TensorEntry> tensors = parsed.value().tensors;
  uint64_t end = parsed.value().data_offset;
  for (const TensorEntry& tensor : tensors) {
    PTC_CHECK(tensor.offset == end);
    end += tensor.bytes;
    PTC_CHECK(array_bytes(tensor.shape, tensor.dtype).value() == tensor.bytes);
    auto path = tensor_path(tensor.name);
    if (!path) check_error(path.error());
    else PTC_CHECK(tensor_name_of_path(path.value()).value() == tensor.name);
  }
  PTC_CHECK(end == file_bytes);

  auto written = write_safetensors_header(tensors, parsed.value().metadata);
  if (!written) return check_error(written.error());
  auto again = parse_safetensors(bytes_of(written.value()),
                                 written.value().size() + file_bytes - parsed.value().data_offset);
  PTC_CHECK(again.has_value());
  PTC_CHECK(again.value().tensors.size() == tensors.size());
  PTC_CHECK(again.value().metadata == parsed.value().metadata);
}

std::vector<std::string> large_inputs() {
  auto file = [](const std::string& header) {
    std::string text(16, '\0');
    const uint64_t length = header.size();
    std::copy_n(reinterpret_cast<const char*>(&length), 8, text.data() + 8);
    return text + header;
  };
  std::string tensors = "{";
  for (size_t i = 0; i < 15'000; ++i)
    tensors += fmt::format(R"("t{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},)", i);
  tensors.back() = '}';
  return {
      file(tensors),
      file(repeated("{\"a\":", "[", kMegabyte)),
      file(repeated("", "{\"a\":", kMegabyte / 5)),
      file(repeated("{\"__metadata__\":{\"\":\"\"", ",\"\":\"\"", kMegabyte / 6, "}}")),
      file(repeated("{", "\"a\":{},", kMegabyte / 7, "\"a\":0}")),
      file(repeated("{\"a\":{\"shape\":[1", ",1", kMegabyte / 2, "]}}")),
      file(repeated("{\"", "\\u0061", kMegabyte / 6, "\":0}")),
      file(repeated("{\"a\":{\"x\":[0", ",0", kMegabyte / 2, "]}}")),
  };
}

}  // namespace ptc::fuzz
