#include "store/codec/safetensors.h"

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <numeric>
#include <string_view>

#include "store/base/json.h"
#include "store/codec/safetensors_json.h"

namespace ptc {
namespace {

constexpr uint64_t kPrefixBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// Of a tensor's text: two offsets, the type, and what is the same for all.
constexpr size_t kMostDigits = 20, kMostBytesBesideName = 2 * kMostDigits + 64;

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

/// Appends `text` as a JSON string; not UTF-8 is kInvalidArgument.
Result<> append_json_string(std::string& to, std::string_view text) {
  const auto stands_for_itself = [](char c) {
    return c >= ' ' && c < '\x7f' && c != '"' && c != '\\';
  };
  if (std::all_of(text.begin(), text.end(), stands_for_itself)) {
    to.append(1, '"').append(text).append(1, '"');
    return ok();
  }
  std::string token = json::serialize(json::string_view(text.data(), text.size()));
  bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; });
  json::error_code error;
  if (!ascii) json::parse(token, error);
  if (error) return invalid_argument("the text {} is not UTF-8", quoted(text));
  to += token;
  return ok();
}

void append_number(std::string& to, uint64_t number) {
  const fmt::format_int text(number);
  to.append(text.data(), text.size());
}

Result<> check_new_name(std::string_view name) {
  if (name == kMetadataKey)
    return invalid_argument("no tensor can be named __metadata__ in a safetensors file");
  if (name.find('\0') != std::string_view::npos)
    return invalid_argument("the tensor name {} has a NUL", quoted(name));
  return ok();
}

/// Names of a model have long beginnings in common. So they are not compared as a whole: eight
/// bytes at a time are a number, and only what has equal ones is looked at further on.
class NameOrder {
 public:
  explicit NameOrder(std::span<const SafetensorsArray> arrays) : arrays_(arrays) {}

  void sort(std::span<uint32_t> order) {
    keyed_.clear();
    keyed_.reserve(order.size());
    for (const uint32_t i : order) keyed_.push_back({0, i});
    sort_from(0, keyed_);
    for (size_t i = 0; i < order.size(); ++i) order[i] = keyed_[i].array;
  }

 private:
  struct Keyed {
    uint64_t key;
    uint32_t array;
  };
  static constexpr size_t kMostBytesInCommon = 1024;
  static constexpr size_t kKeyBytes = 7;  // the eighth says how many there are: "a" before "a\0"

  uint64_t key_of(uint32_t array, size_t from) const {
    const std::string_view name = arrays_[array].name;
    const size_t bytes = from < name.size() ? std::min(kKeyBytes, name.size() - from) : 0;
    uint64_t key = 0;
    for (size_t i = 0; i < kKeyBytes; ++i)
      key = key << 8 | (i < bytes ? static_cast<unsigned char>(name[from + i]) : 0);
    return key << 8 | bytes;
  }
  /// Those of which the names are the same up to `from`.
  void sort_from(size_t from, std::span<Keyed> same) {
    if (from > kMostBytesInCommon)  // no stack for whoever names tensors so
      return std::sort(same.begin(), same.end(), [&](const Keyed& a, const Keyed& b) {
        return arrays_[a.array].name < arrays_[b.array].name;
      });
    for (Keyed& one : same) one.key = key_of(one.array, from);
    const auto before = [](const Keyed& a, const Keyed& b) { return a.key < b.key; };
    if (!std::is_sorted(same.begin(), same.end(), before))
      std::sort(same.begin(), same.end(), before);
    for (size_t begin = 0, end = 0; begin < same.size(); begin = end) {
      while (end < same.size() && same[end].key == same[begin].key) ++end;
      const bool goes_on = (same[begin].key & 0xff) == kKeyBytes;
      if (end - begin > 1 && goes_on) sort_from(from + kKeyBytes, same.subspan(begin, end - begin));
    }
  }

  const std::span<const SafetensorsArray> arrays_;
  std::vector<Keyed> keyed_;
};

/// The order of the file, in which names of one type follow each other.
Result<std::vector<uint32_t>> file_order(std::span<const SafetensorsArray> arrays) {
  std::vector<uint32_t> order(arrays.size());
  std::iota(order.begin(), order.end(), 0);
  const auto by_type = [&](uint32_t a, uint32_t b) {
    return writer_rank(arrays[a].dtype) > writer_rank(arrays[b].dtype);
  };
  const bool one_type = std::all_of(arrays.begin(), arrays.end(), [&](const auto& array) {
    return array.dtype == arrays.front().dtype;
  });
  if (!one_type) std::stable_sort(order.begin(), order.end(), by_type);
  const auto by_name = [&](uint32_t a, uint32_t b) { return arrays[a].name < arrays[b].name; };
  NameOrder names(arrays);
  std::vector<uint32_t> all;  // by name alone
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && arrays[order[end]].dtype == arrays[order[begin]].dtype) ++end;
    const std::span<uint32_t> of_type = std::span(order).subspan(begin, end - begin);
    if (!std::is_sorted(of_type.begin(), of_type.end(), by_name)) names.sort(of_type);
    if (one_type) break;
    const auto middle = static_cast<ptrdiff_t>(all.size());
    all.insert(all.end(), of_type.begin(), of_type.end());
    std::inplace_merge(all.begin(), all.begin() + middle, all.end(), by_name);
  }
  const std::vector<uint32_t>& in_order = one_type ? order : all;
  const auto twice =
      std::adjacent_find(in_order.begin(), in_order.end(),
                         [&](uint32_t a, uint32_t b) { return arrays[a].name == arrays[b].name; });
  if (twice != in_order.end())
    return invalid_argument("two tensors are named {}", quoted(arrays[*twice].name));
  return order;
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

Result<SafetensorsLayout> lay_out_safetensors(std::span<const SafetensorsArray> arrays,
                                              const std::map<std::string, std::string>& metadata,
                                              uint64_t align) {
  if (align == 0 || align % kPrefixBytes != 0)
    return invalid_argument("the data's alignment {} is not a multiple of 8", align);
  SafetensorsLayout made;
  PTC_TRY(made.order, file_order(arrays));

  std::string& text = made.header;
  text.assign(kPrefixBytes, '\0');
  text += '{';
  const char* separator = "";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      text += separator;
      PTC_TRY(append_json_string(text, key));
      text += ':';
      PTC_TRY(append_json_string(text, value));
      separator = ",";
    }
    text += '}';
    separator = ",";
  }
  // It may be very long: no room is looked for twice.
  size_t most = text.size() + align;
  for (const SafetensorsArray& array : arrays)
    most += kMostBytesBesideName + array.name.size() + kMostDigits * array.shape->size();
  text.reserve(most);
  made.offsets.resize(arrays.size());
  uint64_t end = 0;
  for (const uint32_t i : made.order) {
    const auto& [name, dtype, shape] = arrays[i];
    PTC_TRY(check_new_name(name));
    PTC_TRY(const uint64_t bytes, array_bytes(*shape, dtype));
    const uint64_t begin = made.offsets[i] = end;
    if (__builtin_add_overflow(end, bytes, &end) || end >= uint64_t{1} << 63)
      return invalid_argument("the tensors up to {} have more than 2^63 bytes", quoted(name));
    text += separator;
    PTC_TRY(append_json_string(text, name));
    text.append(":{\"dtype\":\"").append(dtype_name(dtype)).append("\",\"shape\":[");
    for (size_t axis = 0; axis < shape->size(); ++axis) {
      if (axis > 0) text += ',';
      append_number(text, (*shape)[axis]);
    }
    text.append("],\"data_offsets\":[");
    append_number(text, begin);
    text += ',';
    append_number(text, end);
    text.append("]}");
    separator = ",";
  }
  text += '}';
  text.resize((text.size() + align - 1) / align * align, ' ');
  uint64_t length = text.size() - kPrefixBytes;
  if (length > kMaxHeaderBytes)
    return invalid_argument("the header of {} tensors has {} bytes, more than the {} allowed",
                            arrays.size(), length, kMaxHeaderBytes);
  std::memcpy(text.data(), &length, kPrefixBytes);
  for (uint64_t& offset : made.offsets) offset += text.size();
  made.bytes = text.size() + end;
  return made;
}

Result<std::string> write_safetensors_header(std::vector<TensorEntry>& tensors,
                                             const std::map<std::string, std::string>& metadata,
                                             uint64_t align) {
  std::vector<SafetensorsArray> arrays;
  arrays.reserve(tensors.size());
  for (const TensorEntry& entry : tensors)
    arrays.push_back({entry.name, entry.dtype, &entry.shape});
  PTC_TRY(auto made, lay_out_safetensors(arrays, metadata, align));
  std::vector<TensorEntry> in_order;
  in_order.reserve(tensors.size());
  for (const uint32_t i : made.order) {
    TensorEntry& entry = in_order.emplace_back(std::move(tensors[i]));
    entry.offset = made.offsets[i];
    PTC_TRY(entry.bytes, array_bytes(entry.shape, entry.dtype));
  }
  tensors = std::move(in_order);
  return std::move(made.header);
}

Result<uint64_t> array_bytes(const Shape& shape, DType dtype) {
  PTC_TRY(auto bits, num_bits(shape, dtype_bits(dtype)));
  if (bits % 8 != 0)
    return invalid_argument("{} {} has {} bits, which do not fill whole bytes", dtype_name(dtype),
                            shape.to_string(), bits);
  return bits / 8;
}

}  // namespace ptc
