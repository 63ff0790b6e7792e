#include "store/tensor/stream_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace ptc {
namespace {

TEST(StreamCopy, CopiesJustTheBytesAtAnyAlignment) {
  std::vector<std::byte> source(5000), target(6000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + 1);
  for (size_t bytes : {0, 1, 63, 64, 255, 256, 319, 320, 1000, 4096, 4999}) {
    for (size_t shift = 0; shift < 70; shift += 3) {
      std::fill(target.begin(), target.end(), std::byte{0});
      stream_copy(target.data() + shift, source.data() + 1, std::min(bytes, source.size() - 1));
      for (size_t i = 0; i < target.size(); ++i) {
        bool inside = i >= shift && i < shift + bytes;
        ASSERT_EQ(target[i], inside ? source[i - shift + 1] : std::byte{0})
            << bytes << " bytes at " << shift << ", byte " << i;
      }
    }
  }
}

}  // namespace
}  // namespace ptc
