#include "dataset/source/shard_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "store/tensor/mapped_copy.h"

namespace ptc {
namespace {

constexpr size_t kPagesAtOnce = 256;

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

std::unique_ptr<const ShardMapping> ShardMapping::make(int fd, uint64_t bytes) {
  void* const begin = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (begin == MAP_FAILED) return nullptr;
  return std::unique_ptr<const ShardMapping>(
      new ShardMapping(static_cast<std::byte*>(begin), bytes));
}

ShardMapping::~ShardMapping() { ::munmap(begin_, bytes_); }

bool ShardMapping::copy(uint64_t offset, std::span<std::byte> out, Stores stores) const {
  if (offset > bytes_ || out.size() > bytes_ - offset) return false;
  std::array<unsigned char, kPagesAtOnce> in_memory;
  while (!out.empty()) {
    const uint64_t page = offset / page_bytes() * page_bytes();
    const size_t here = std::min<uint64_t>(out.size(), page + kPagesAtOnce * page_bytes() - offset);
    const size_t pages = (offset + here - page + page_bytes() - 1) / page_bytes();
    if (::mincore(begin_ + page, offset + here - page, in_memory.data()) != 0) return false;
    const auto is_there = [](unsigned char about_page) { return (about_page & 1) != 0; };
    if (!std::all_of(in_memory.begin(), in_memory.begin() + pages, is_there)) return false;
    if (!mapped_copy(out.data(), begin_ + offset, here, stores == Stores::kPastCaches))
      return false;
    out = out.subspan(here);
    offset += here;
  }
  return true;
}

}  // namespace ptc
