#include "store/codec/npy.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kAlign = 64;

struct NpyDict {
  std::string descr;  // empty until seen
  std::optional<bool> fortran_order;
  std::optional<Shape> shape;
};

/// Reads the dict literal of a header: string keys, and the three kinds of values that occur.
class DictParser {
 public:
  explicit DictParser(std::string_view text) : text_(text) {}

  Result<NpyDict> parse() {
    NpyDict dict;
    if (!take('{')) return error("'{' expected");
    while (!take('}')) {
      PTC_TRY(auto key, string());
      if (!take(':')) return error("':' expected");
      if (key == "descr" && dict.descr.empty()) {
        if (peek() == '[') return error("a structured array is not a tensor");
        PTC_TRY(dict.descr, string());
      } else if (key == "fortran_order" && !dict.fortran_order) {
        PTC_TRY(dict.fortran_order, boolean());
      } else if (key == "shape" && !dict.shape) {
        PTC_TRY(dict.shape, tuple());
      } else {
        return error(fmt::format("key {} is unknown or there twice", quoted(key)));
      }
      if (!take(',') && peek() != '}') return error("',' or '}' expected");
    }
    skip_space();
    if (at_ != text_.size()) return error("text after the end");
    if (dict.descr.empty() || !dict.fortran_order || !dict.shape)
      return error("'descr', 'fortran_order' and 'shape' must all be there");
    return dict;
  }

 private:
  Error error(std::string_view what) const {
    return invalid_argument("npy header, character {}: {}", at_ + 1, what);
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \n", at_), text_.size()); }

  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  Result<std::string> string() {
    char quote = peek();
    if (quote != '\'' && quote != '"') return error("a string expected");
    size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return error("the string does not end");
    std::string_view content = text_.substr(at_ + 1, end - at_ - 1);
    if (content.find('\\') != std::string_view::npos) return error("a backslash in a string");
    at_ = end + 1;
    return std::string(content);
  }

  Result<bool> boolean() {
    skip_space();
    for (bool value : {false, true}) {
      std::string_view word = value ? "True" : "False";
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    return error("True or False expected");
  }

  Result<Shape> tuple() {
    Shape shape;
    if (!take('(')) return error("'(' expected");
    while (!take(')')) {
      PTC_TRY(auto count, number());
      if (shape.size() == kMaxAxes)
        return error(fmt::format("tensors of at most {} axes are supported", kMaxAxes));
      shape.push_back(count);
      if (!take(',') && (peek() != ')' || shape.size() == 1)) return error("',' expected");
    }
    return shape;
  }

  Result<uint64_t> number() {
    skip_space();
    uint64_t value = 0;
    size_t begin = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, static_cast<uint64_t>(text_[at_] - '0'), &value))
        return error("a number beyond 64 bits");
    }
    if (at_ == begin) return error("a whole number expected");
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote long numbers so
    return value;
  }

  std::string_view text_;
  size_t at_ = 0;
};

/// The type that an array whose elements are described as `descr` has if it is said to be
/// `declared`.
Result<DType> declared_dtype(std::string_view descr, DType declared) {
  auto bad = [&](std::string_view why) {
    return invalid_argument("the array is declared as {} (user.ptc.dtype), but its type {} {}",
                            dtype_name(declared), quoted(descr.substr(0, 40)), why);
  };
  if (descr.size() != 3 || descr[1] == 'O' || descr[2] < '1' || descr[2] > '8')
    return bad("is not one of plain elements");
  if (descr[0] == '>' && descr[2] != '1') return bad("is big-endian");
  if (8u * static_cast<uint32_t>(descr[2] - '0') != dtype_bits(declared))
    return bad("has elements of another size");
  return declared;
}

}  // namespace

Result<TensorEntry> parse_npy(std::span<const std::byte> prefix, uint64_t file_bytes,
                              std::optional<DType> declared) {
  std::string_view text(reinterpret_cast<const char*>(prefix.data()), prefix.size());
  if (!text.starts_with(kMagic) || text.size() < kMagic.size() + 4)
    return invalid_argument("this is not an npy file: it does not begin with \\x93NUMPY");
  uint8_t major = static_cast<uint8_t>(text[6]), minor = static_cast<uint8_t>(text[7]);
  if (major < 1 || major > 3 || minor != 0)
    return invalid_argument("npy version {}.{} is unknown; 1.0, 2.0 and 3.0 are read", major,
                            minor);
  size_t length_bytes = major == 1 ? 2 : 4;
  size_t dict_begin = kMagic.size() + 2 + length_bytes;
  if (text.size() < dict_begin) return invalid_argument("the npy file ends inside of its header");
  uint32_t dict_bytes = 0;
  std::memcpy(&dict_bytes, text.data() + kMagic.size() + 2, length_bytes);
  if (dict_bytes > text.size() - dict_begin) {
    return invalid_argument(
        "the npy header has {} bytes, but the file has {}, and at most {} of a "
        "header are read",
        dict_bytes, file_bytes, kMaxNpyHeaderBytes);
  }
  PTC_TRY(auto dict, DictParser(text.substr(dict_begin, dict_bytes)).parse());

  TensorEntry entry;
  if (declared) {
    PTC_TRY(entry.dtype, declared_dtype(dict.descr, *declared));
  } else {
    PTC_TRY(entry.dtype, dtype_of_npy_descr(dict.descr));
  }
  entry.shape = *dict.shape;
  if (*dict.fortran_order && entry.shape.size() > 1) {
    return invalid_argument(
        "the array {} is in Fortran order; save numpy.ascontiguousarray(array) instead",
        entry.shape.to_string());
  }
  entry.offset = dict_begin + dict_bytes;
  PTC_TRY(entry.bytes, array_bytes(entry.shape, entry.dtype));
  if (file_bytes < entry.offset || file_bytes - entry.offset != entry.bytes) {
    return invalid_argument("{} {} takes {} bytes after {} of header, but the file has {} in all",
                            dtype_name(entry.dtype), entry.shape.to_string(), entry.bytes,
                            entry.offset, file_bytes);
  }
  return entry;
}

std::string write_npy_header(DType dtype, const Shape& shape) {
  Shape written = shape;
  uint32_t bits = dtype_bits(dtype);
  if (bits % 8 != 0) {
    size_t axes = shape.size();
    if (axes > 0 && shape[axes - 1] * bits % 8 == 0) written[axes - 1] = shape[axes - 1] * bits / 8;
    else written = {Box::whole(shape).volume() * bits / 8};
  }
  std::string dict = fmt::format(
      "{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", dtype_npy_descr(dtype),
      fmt::join(written.begin(), written.end(), ", "), written.size() == 1 ? "," : "");
  size_t unpadded = kMagic.size() + 4 + dict.size() + 1;
  dict.append((kAlign - unpadded % kAlign) % kAlign, ' ');
  dict += '\n';
  std::string header(kMagic);
  header +=
      {'\x01', '\x00', static_cast<char>(dict.size() & 0xFF), static_cast<char>(dict.size() >> 8)};
  return header + dict;
}

}  // namespace ptc
