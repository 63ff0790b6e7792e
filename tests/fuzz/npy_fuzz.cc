// The beginning of an npy file: 8 bytes say how much data there is, the rest is the header.
#include "fuzz.h"
#include "store/codec/npy.h"

namespace ptc::fuzz {

void run(std::string_view input) {
  const uint64_t data_bytes = take_number(input) & (UINT64_MAX >> 1);
  const uint64_t file_bytes = input.size() + data_bytes;
  const auto prefix = bytes_of(input.substr(0, kMaxNpyHeaderBytes));
  if (auto declared = parse_npy(prefix, file_bytes, DType::kBF16); !declared)
    check_error(declared.error());
  auto parsed = parse_npy(prefix, file_bytes);
  if (!parsed) return check_error(parsed.error());
  const TensorEntry& entry = parsed.value();
  PTC_CHECK(entry.offset + entry.bytes == file_bytes);
  const std::string written = write_npy_header(entry.dtype, entry.shape);
  auto again = parse_npy(bytes_of(written), written.size() + entry.bytes);
  PTC_CHECK(again.has_value());
  PTC_CHECK(again.value().dtype == entry.dtype && again.value().shape == entry.shape);
}

std::vector<std::string> large_inputs() {
  auto file = [](const std::string& dict) {
    std::string text = std::string(8, '\0') + "\x93NUMPY" + std::string("\x02\0", 2);
    const uint32_t length =
        static_cast<uint32_t>(std::min<size_t>(dict.size(), kMaxNpyHeaderBytes - 12));
    text.append(reinterpret_cast<const char*>(&length), sizeof length);
    return text + dict;
  };
  return {
      file(repeated("{'shape': (", "1, ", 20'000, ")}")),
      file(repeated("{'descr': '", "<", 60'000, "'}")),
      file(repeated("{", "'shape': (), ", 4'000, "}")),
      file(repeated("{'", "x", 60'000, "': 1}")),
      file(repeated("{", " ", kMegabyte, "}")),
      file(repeated("{'shape': (", "9", 60'000, ",)}")),
  };
}

}  // namespace ptc::fuzz
