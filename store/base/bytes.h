// Numbers and texts in frames and in files of our own: little-endian, texts with their length
// before them.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace ptc {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "numbers are copied as they lie in memory");

class ByteWriter {
 public:
  template <std::unsigned_integral Number>
  void number(Number value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(std::string_view value) {
    number(static_cast<uint32_t>(value.size()));
    text_.append(value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// Reads from bytes of strangers. What is not there is 0 or empty, and then done() is false for
/// good.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <std::unsigned_integral Number>
  Number number() {
    Number value = 0;
    std::string_view raw = take(sizeof value);
    if (raw.size() == sizeof value) std::memcpy(&value, raw.data(), sizeof value);
    return value;
  }
  /// At most `limit` bytes long.
  std::string_view text(size_t limit) {
    const size_t size = number<uint32_t>();
    if (size > limit) fail();
    return take(size);
  }
  /// Whether all was there so far.
  bool good() const { return good_; }
  size_t left() const { return rest_.size(); }
  /// Whether all was there and nothing is left.
  bool done() const { return good_ && rest_.empty(); }

 private:
  std::string_view take(size_t size) {
    if (size > rest_.size()) fail();
    if (!good_) return {};
    std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  void fail() {
    good_ = false;
    rest_ = {};
  }
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace ptc
