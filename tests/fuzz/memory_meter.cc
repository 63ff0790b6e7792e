#include "memory_meter.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#if defined(PTC_SANITIZED)
// GCC has these functions and not their header, sanitizer/allocator_interface.h.
extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                              void (*on_free)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void* block);
}
#else
#include <malloc.h>
#endif

namespace ptc::fuzz {
namespace {

std::atomic<bool> metering{false};
std::atomic<int64_t> in_use{0}, peak{0};

void add(size_t bytes) {
  if (!metering.load(std::memory_order_relaxed)) return;
  const int64_t now = in_use += static_cast<int64_t>(bytes);
  int64_t before = peak.load();
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
}
void subtract(size_t bytes) {
  if (metering.load(std::memory_order_relaxed)) in_use -= static_cast<int64_t>(bytes);
}

#if defined(PTC_SANITIZED)
void on_malloc(const volatile void*, size_t bytes) { add(bytes); }
void on_free(const volatile void* block) {
  if (block != nullptr) subtract(__sanitizer_get_allocated_size(block));
}
[[maybe_unused]] const int installed =
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
#endif

}  // namespace

MemoryMeter::MemoryMeter() {
  in_use = peak = 0;
  metering = true;
}
MemoryMeter::~MemoryMeter() { metering = false; }
size_t MemoryMeter::peak_bytes() const { return static_cast<size_t>(std::max<int64_t>(0, peak)); }

}  // namespace ptc::fuzz

#if !defined(PTC_SANITIZED)
// In front of the C library's own: operator new and the libraries come through here too.
extern "C" {

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* block, size_t size);
void __libc_free(void* block);

void* malloc(size_t size) {
  void* block = __libc_malloc(size);
  ptc::fuzz::add(malloc_usable_size(block));
  return block;
}
void* calloc(size_t count, size_t size) {
  void* block = __libc_calloc(count, size);
  ptc::fuzz::add(malloc_usable_size(block));
  return block;
}
void* realloc(void* block, size_t size) {
  const size_t before = malloc_usable_size(block);
  void* moved = __libc_realloc(block, size);
  if (moved == nullptr && size != 0) return nullptr;
  ptc::fuzz::subtract(before);
  ptc::fuzz::add(malloc_usable_size(moved));
  return moved;
}
void free(void* block) {
  ptc::fuzz::subtract(malloc_usable_size(block));
  __libc_free(block);
}

}  // extern "C"
#endif
