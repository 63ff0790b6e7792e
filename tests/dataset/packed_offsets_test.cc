#include "dataset/source/packed_offsets.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace ptc {
namespace {

TEST(PackedOffsets, GiveBackWhatWasAdded) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    const uint64_t unit = round % 3 == 0 ? 512 : 1;
    const uint64_t count = random() % 300;
    const unsigned step_bits = random() % 49, extra_bits = random() % 57;
    std::vector<uint64_t> starts, extras;
    OffsetPacker packer(unit);
    for (uint64_t i = 0, at = random() % 1000 * unit; i < count; ++i) {
      starts.push_back(at);
      extras.push_back(random() & ((uint64_t{1} << extra_bits) - 1));
      packer.add(at, extras.back());
      at += (random() & ((uint64_t{1} << step_bits) - 1)) / unit * unit;
    }
    ASSERT_EQ(packer.count(), count);
    const std::string packed = packer.finish();
    const PackedOffsets offsets(reinterpret_cast<const std::byte*>(packed.data()), count, unit);
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_EQ(offsets.start(i), starts[i]);
      ASSERT_EQ(offsets.extra(i), extras[i]);
    }
  }
}

}  // namespace
}  // namespace ptc
