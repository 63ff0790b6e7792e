#include "store/codec/safetensors.h"

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <string_view>

#include "store/base/json.h"
#include "store/codec/safetensors_json.h"

namespace ptc {
namespace {

constexpr uint64_t kPrefixBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

/// Checks that the entries, in order of offset, fill the data with neither hole nor overlap.
Result<> check_tiling(const std::vector<TensorEntry>& tensors, uint64_t data_bytes) {
  uint64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorEntry& entry = tensors[i];
    if (entry.offset < end) {
      return invalid_argument("tensor {} begins at byte {} of the data, inside of tensor {}",
                              quoted(entry.name), entry.offset, quoted(tensors[i - 1].name));
    }
    if (entry.offset > end) {
      return invalid_argument("bytes {} to {} of the data, before tensor {}, belong to no tensor",
                              end, entry.offset, quoted(entry.name));
    }
    end = entry.offset + entry.bytes;  // data_offsets held the same sum
  }
  if (end != data_bytes) {
    return invalid_argument("the tensors end at byte {} of the data, but the file has {}{}", end,
                            data_bytes, end > data_bytes ? "; it was cut short" : "");
  }
  return ok();
}

/// The place of each dtype in the order of the reference writer, which puts high ones first.
constexpr std::array kWriterOrder = {
    DType::kBool,       DType::kF4,     DType::kF6E2M3, DType::kF6E3M2, DType::kU8,
    DType::kI8,         DType::kF8E5M2, DType::kF8E4M3, DType::kF8E8M0, DType::kF8E4M3Fnuz,
    DType::kF8E5M2Fnuz, DType::kI16,    DType::kU16,    DType::kF16,    DType::kBF16,
    DType::kI32,        DType::kU32,    DType::kF32,    DType::kC64,    DType::kF64,
    DType::kI64,        DType::kU64};

size_t writer_rank(DType dtype) {
  return static_cast<size_t>(std::find(kWriterOrder.begin(), kWriterOrder.end(), dtype) -
                             kWriterOrder.begin());
}

/// `text` as a JSON string; not UTF-8 is kInvalidArgument.
Result<std::string> json_string(std::string_view text) {
  std::string token = json::serialize(json::string_view(text.data(), text.size()));
  bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; });
  json::error_code error;
  if (!ascii) json::parse(token, error);
  if (error) return invalid_argument("the text {} is not UTF-8", quoted(text));
  return token;
}

Result<> check_new_name(const std::string& name) {
  if (name == kMetadataKey)
    return invalid_argument("no tensor can be named __metadata__ in a safetensors file");
  if (name.find('\0') != std::string::npos)
    return invalid_argument("the tensor name {} has a NUL", quoted(name));
  return ok();
}

}  // namespace

Result<uint64_t> safetensors_header_bytes(std::span<const std::byte> first_8_bytes,
                                          uint64_t file_bytes) {
  if (first_8_bytes.size() < kPrefixBytes || file_bytes < kPrefixBytes)
    return invalid_argument("a safetensors file has at least 8 bytes, this one has {}",
                            std::min<uint64_t>(first_8_bytes.size(), file_bytes));
  uint64_t length = 0;
  std::memcpy(&length, first_8_bytes.data(), kPrefixBytes);
  if (length > kMaxHeaderBytes) {
    return invalid_argument(
        "its header would have {} bytes, more than the {} that the format allows; "
        "this is not a safetensors file, or a damaged one",
        length, kMaxHeaderBytes);
  }
  if (length > file_bytes - kPrefixBytes) {
    return invalid_argument("its header has {} bytes, but the file ends {} bytes after its start",
                            length, file_bytes - kPrefixBytes);
  }
  return kPrefixBytes + length;
}

Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> header,
                                            uint64_t file_bytes) {
  SafetensorsHeader result;
  PTC_TRY(result.data_offset, safetensors_header_bytes(header, file_bytes));
  if (header.size() < result.data_offset)
    return invalid_argument("{} bytes of the header are there, but it has {}", header.size(),
                            result.data_offset);
  std::string_view text(reinterpret_cast<const char*>(header.data()) + kPrefixBytes,
                        result.data_offset - kPrefixBytes);
  if (text.empty())
    return invalid_argument("it has no header, as one whose writer was ended before it was done");
  if (!text.starts_with('{')) return invalid_argument("its header does not begin with '{{'");
  PTC_TRY(parse_safetensors_json(text, result));
  std::stable_sort(result.tensors.begin(), result.tensors.end(),
                   [](const TensorEntry& a, const TensorEntry& b) {
                     return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
                   });
  PTC_TRY(check_tiling(result.tensors, file_bytes - result.data_offset));
  for (TensorEntry& entry : result.tensors) entry.offset += result.data_offset;
  return result;
}

bool comes_before_in_safetensors(DType a, std::string_view name_a, DType b,
                                 std::string_view name_b) {
  const size_t rank_a = writer_rank(a), rank_b = writer_rank(b);
  return rank_a != rank_b ? rank_a > rank_b : name_a < name_b;
}

Result<std::string> write_safetensors_header(std::vector<TensorEntry>& tensors,
                                             const std::map<std::string, std::string>& metadata,
                                             uint64_t align) {
  if (align == 0 || align % kPrefixBytes != 0)
    return invalid_argument("the data's alignment {} is not a multiple of 8", align);
  const auto comes_before = [](const TensorEntry& a, const TensorEntry& b) {
    return comes_before_in_safetensors(a.dtype, a.name, b.dtype, b.name);
  };
  if (!std::is_sorted(tensors.begin(), tensors.end(), comes_before))
    std::sort(tensors.begin(), tensors.end(), comes_before);
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorEntry& entry : tensors) names.push_back(entry.name);
  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  if (auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    return invalid_argument("two tensors are named {}", quoted(*twice));

  std::string text(kPrefixBytes, '\0');
  text += '{';
  const char* separator = "";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      PTC_TRY(auto key_token, json_string(key));
      PTC_TRY(auto value_token, json_string(value));
      text += separator + key_token + ":" + value_token;
      separator = ",";
    }
    text += '}';
    separator = ",";
  }
  uint64_t end = 0;
  for (TensorEntry& entry : tensors) {
    PTC_TRY(check_new_name(entry.name));
    PTC_TRY(auto name_token, json_string(entry.name));
    PTC_TRY(entry.bytes, array_bytes(entry.shape, entry.dtype));
    entry.offset = end;
    if (__builtin_add_overflow(end, entry.bytes, &end) || end >= uint64_t{1} << 63)
      return invalid_argument("the tensors up to {} have more than 2^63 bytes", quoted(entry.name));
    text.append(separator)
        .append(name_token)
        .append(":{\"dtype\":\"")
        .append(dtype_name(entry.dtype));
    text += "\",\"shape\":[";
    for (size_t axis = 0; axis < entry.shape.size(); ++axis)
      text.append(axis == 0 ? "" : ",").append(fmt::format_int(entry.shape[axis]).c_str());
    text.append("],\"data_offsets\":[").append(fmt::format_int(entry.offset).c_str());
    text.append(",").append(fmt::format_int(end).c_str()).append("]}");
    separator = ",";
  }
  text += '}';
  text.resize((text.size() + align - 1) / align * align, ' ');
  uint64_t length = text.size() - kPrefixBytes;
  if (length > kMaxHeaderBytes)
    return invalid_argument("the header of {} tensors has {} bytes, more than the {} allowed",
                            tensors.size(), length, kMaxHeaderBytes);
  std::memcpy(text.data(), &length, kPrefixBytes);
  for (TensorEntry& entry : tensors) entry.offset += text.size();
  return text;
}

Result<uint64_t> array_bytes(const Shape& shape, DType dtype) {
  PTC_TRY(auto bits, num_bits(shape, dtype_bits(dtype)));
  if (bits % 8 != 0)
    return invalid_argument("{} {} has {} bits, which do not fill whole bytes", dtype_name(dtype),
                            shape.to_string(), bits);
  return bits / 8;
}

}  // namespace ptc
