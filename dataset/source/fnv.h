// FNV-1a, for fingerprints of small things. Persisted: never changes.
#pragma once

#include <cstdint>
#include <string_view>

namespace ptc {

class Fnv {
 public:
  Fnv& add(uint64_t number) {
    for (int i = 0; i < 8; ++i) byte(static_cast<unsigned char>(number >> (8 * i)));
    return *this;
  }
  /// With its length, so that neighbouring texts stay apart.
  Fnv& add(std::string_view text) {
    for (char c : text) byte(static_cast<unsigned char>(c));
    return add(uint64_t{text.size()});
  }
  uint64_t value() const { return hash_; }

 private:
  void byte(unsigned char b) { hash_ = (hash_ ^ b) * 0x100000001b3; }
  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace ptc
