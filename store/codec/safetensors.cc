#include "store/codec/safetensors.h"

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <numeric>
#include <string_view>

#include "store/base/json.h"
#include "store/codec/name_order.h"
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

/// Whether each byte stands for itself in a JSON string: none is a control character, a quote, a
/// backslash, or beyond 7 bits. Looks at eight at a time.
bool stands_for_itself(std::string_view text) {
  constexpr uint64_t kEach = 0x0101010101010101, kHigh = 0x80 * kEach;
  const auto any_is = [](uint64_t bytes, uint64_t c) {
    const uint64_t differs = bytes ^ c * kEach;
    return (differs - kEach) & ~differs;
  };
  const auto odd_ones = [&](uint64_t bytes) {
    const uint64_t control = (bytes - ' ' * kEach) & ~bytes;
    const uint64_t high = bytes | (bytes + kEach);  // 0x7f, too
    return (control | high | any_is(bytes, '"') | any_is(bytes, '\\')) & kHigh;
  };
  uint64_t odd = 0;
  for (; text.size() >= sizeof odd; text.remove_prefix(sizeof odd)) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, text.data(), sizeof bytes);
    odd |= odd_ones(bytes);
  }
  uint64_t rest = 'a' * kEach;
  if (!text.empty()) std::memcpy(&rest, text.data(), text.size());
  return (odd | odd_ones(rest)) == 0;
}

/// Appends `text` as a JSON string; not UTF-8 is kInvalidArgument.
Result<> append_json_string(std::string& to, std::string_view text) {
  if (stands_for_itself(text)) {
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

/// The same of an array's name.
Result<> append_name(std::string& to, std::string_view name) {
  if (stands_for_itself(name) && name != kMetadataKey) {
    to.append(1, '"').append(name).append(1, '"');
    return ok();
  }
  if (name == kMetadataKey)
    return invalid_argument("no tensor can be named __metadata__ in a safetensors file");
  if (name.find('\0') != std::string_view::npos)
    return invalid_argument("the tensor name {} has a NUL", quoted(name));
  return append_json_string(to, name);
}

void append_number(std::string& to, uint64_t number) {
  const fmt::format_int text(number);
  to.append(text.data(), text.size());
}

/// Each name's place in the order of all.
std::vector<uint32_t> places_of(std::span<const SafetensorsArray> arrays) {
  const auto is_known = [](const SafetensorsArray& array) {
    return array.place != SafetensorsArray::kUnknown;
  };
  if (!std::all_of(arrays.begin(), arrays.end(), is_known)) {
    std::vector<std::string_view> names;
    names.reserve(arrays.size());
    for (const SafetensorsArray& array : arrays) names.push_back(array.name);
    return places_by_name(names);
  }
  std::vector<uint32_t> places;
  places.reserve(arrays.size());
  for (const SafetensorsArray& array : arrays) places.push_back(array.place);
  return places;
}

/// The arrays by their names' places.
std::vector<uint32_t> order_of(const std::vector<uint32_t>& places) {
  std::vector<uint32_t> order(places.size());
  std::iota(order.begin(), order.end(), 0);
  if (std::is_sorted(places.begin(), places.end())) return order;
  const uint32_t last = *std::max_element(places.begin(), places.end());
  constexpr size_t kPlacesForOne = 32;  // that may be looked at for an array
  if (last / kPlacesForOne > places.size()) {
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return places[a] < places[b]; });
    return order;
  }
  std::vector<uint32_t> begin(size_t{last} + 2);  // of each place, in `order`
  for (const uint32_t place : places) ++begin[size_t{place} + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  for (uint32_t i = 0; i < places.size(); ++i) order[begin[places[i]]++] = i;
  return order;
}

/// The order of the file, in which names of one type follow each other.
Result<std::vector<uint32_t>> file_order(std::span<const SafetensorsArray> arrays) {
  const std::vector<uint32_t> places = places_of(arrays);
  std::vector<uint32_t> order = order_of(places);
  const auto twice = std::adjacent_find(
      order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return places[a] == places[b]; });
  if (twice != order.end())
    return invalid_argument("two tensors are named {}", quoted(arrays[*twice].name));
  const auto of_first_type = [&](const auto& array) { return array.dtype == arrays[0].dtype; };
  if (std::all_of(arrays.begin(), arrays.end(), of_first_type)) return order;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return writer_rank(arrays[a].dtype) > writer_rank(arrays[b].dtype);
  });
  return order;
}

/// What is in the text of an array between its name and its offsets.
void append_type_and_shape(std::string& to, DType dtype, const Shape& shape) {
  to.append(":{\"dtype\":\"").append(dtype_name(dtype)).append("\",\"shape\":[");
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) to += ',';
    append_number(to, shape[axis]);
  }
  to.append("],\"data_offsets\":[");
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
  std::string middle;  // of the last array's text; many follow that are alike
  const SafetensorsArray* last = nullptr;
  uint64_t bytes = 0;
  for (size_t place = 0; place < made.order.size(); ++place) {
    // Names lie here and there. That of one to come is fetched meanwhile.
    constexpr size_t kAhead = 8;
    if (place + kAhead < made.order.size())
      __builtin_prefetch(arrays[made.order[place + kAhead]].name.data());
    const uint32_t i = made.order[place];
    const SafetensorsArray& array = arrays[i];
    if (last == nullptr || array.dtype != last->dtype || *array.shape != *last->shape) {
      PTC_TRY(bytes, array_bytes(*array.shape, array.dtype));
      middle.clear();
      append_type_and_shape(middle, array.dtype, *array.shape);
      last = &array;
    }
    const uint64_t begin = made.offsets[i] = end;
    if (__builtin_add_overflow(end, bytes, &end) || end >= uint64_t{1} << 63)
      return invalid_argument("the tensors up to {} have more than 2^63 bytes", quoted(array.name));
    text += separator;
    PTC_TRY(append_name(text, array.name));
    text += middle;
    append_number(text, begin);
    text += ',';
    append_number(text, end);
    text += "]}";
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
