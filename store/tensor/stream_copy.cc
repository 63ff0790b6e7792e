#include "store/tensor/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ptc {

void stream_copy(std::byte* target, const std::byte* source, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  constexpr size_t kAhead = 8 * kLine;  // the hardware does not look beyond a page
  size_t head = -reinterpret_cast<uintptr_t>(target) % kLine;
  if (bytes >= 4 * kLine + head) {
    std::memcpy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(source + kAhead), _MM_HINT_NTA);
      for (size_t i = 0; i < 4; ++i) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i);
        _mm_stream_si128(reinterpret_cast<__m128i*>(target) + i, part);
      }
    }
    std::memcpy(target, source, bytes);
    _mm_sfence();
    return;
  }
#endif
  std::memcpy(target, source, bytes);
}

}  // namespace ptc
