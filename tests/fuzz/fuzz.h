// What every fuzz target is made of.
//
// A target feeds one input to one parser and aborts when the parser breaks a promise. fuzz_main.cc
// runs it in two ways: under libFuzzer (PTC_FUZZ=ON, clang), or as a plain program that runs the
// corpus, the large inputs, and mutations of the corpus. Around each input the memory in use is
// measured: its peak may be kMemoryPerByte times the input and kMemoryAtLeast, no more.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::fuzz {

#if !defined(PTC_MEMORY_PER_BYTE)
#define PTC_MEMORY_PER_BYTE 80
#endif
inline constexpr size_t kMemoryPerByte = PTC_MEMORY_PER_BYTE;
inline constexpr size_t kMemoryAtLeast = 4 << 20;

/// Each target defines these two. `input` is a copy of exactly its size, so that a sanitizer sees a
/// read past its end.
void run(std::string_view input);
/// About a megabyte each of what is slow or large to read for a careless parser of this kind.
std::vector<std::string> large_inputs();

/// Aborts unless the error is one that a user can read: kInvalidArgument (kCorrupt for our own
/// files), not longer than a screen, UTF-8 without control characters.
void check_error(const Error& error);

/// A large input: `times` times `text` between the two ends.
std::string repeated(std::string_view begin, std::string_view text, size_t times,
                     std::string_view end = "");
inline constexpr size_t kMegabyte = 1 << 20;

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

/// Takes a little-endian number off the front; 0 where the input is shorter.
uint64_t take_number(std::string_view& input);

}  // namespace ptc::fuzz
