// Headers of tar members whose bytes depend on nothing but name and size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ptc {

constexpr uint64_t kTarBlockBytes = 512;
constexpr uint64_t kTarEndBytes = 2 * kTarBlockBytes;

constexpr uint64_t tar_padding(uint64_t bytes) { return -bytes % kTarBlockBytes; }

/// An ordinary file, mode 0644, owner 0, time 0. A name of more than 100 bytes (at most 511) gets a
/// header of GNU's before it, a size of 8 GiB or more GNU's binary number.
std::string tar_header(std::string_view name, uint64_t bytes);
/// Puts `suffix` behind the key of a member, "key.field", in its header; where that has no room for
/// it, and where the name stands in a header of its own before this one, it stays as it is.
void add_to_key(std::string& header, std::string_view field, std::string_view suffix);
constexpr uint64_t tar_header_bytes(uint64_t name_bytes) {
  return name_bytes > 100 ? 3 * kTarBlockBytes : kTarBlockBytes;
}

}  // namespace ptc
