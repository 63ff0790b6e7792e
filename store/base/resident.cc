#include "store/base/resident.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace ptc {
namespace {

struct WholePages {
  std::byte* begin;
  size_t bytes;
};

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

WholePages whole_pages(std::span<const std::byte> mapped) {
  const size_t before = reinterpret_cast<uintptr_t>(mapped.data()) % page_bytes();
  return {const_cast<std::byte*>(mapped.data()) - before, mapped.size() + before};
}

}  // namespace

bool is_in_memory(std::span<const std::byte> mapped) {
  if (mapped.empty()) return true;
  std::array<unsigned char, 256> present;
  auto [at, left] = whole_pages(mapped);
  while (left > 0) {
    const size_t bytes = std::min(left, present.size() * page_bytes());
    if (::mincore(at, bytes, present.data()) != 0) return true;
    const size_t pages = (bytes + page_bytes() - 1) / page_bytes();
    if (std::any_of(present.begin(), present.begin() + static_cast<ptrdiff_t>(pages),
                    [](unsigned char page) { return (page & 1) == 0; }))
      return false;
    at += bytes;
    left -= bytes;
  }
  return true;
}

void read_into_memory(std::span<const std::span<const std::byte>> mapped) {
  for (const std::span<const std::byte> one : mapped) {
    const auto [begin, bytes] = whole_pages(one);
    (void)::madvise(begin, bytes, MADV_WILLNEED);
  }
  for (const std::span<const std::byte> one : mapped) {
    const auto [begin, bytes] = whole_pages(one);
    (void)::madvise(begin, bytes, MADV_POPULATE_READ);  // Linux before 5.14 has no such thing
  }
}

}  // namespace ptc
