// What is hashed of a file, and what is known of it already; and whose master copy an array is.
#include "reshard/intake/file_hash.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>

#include "reshard/intake/master_copies.h"
#include "tests/support/job_fixture.h"

namespace ptc {
namespace {

/// Of some formats another file says which array has which number: written anew, in another order,
/// it says something else of the same bytes.
TEST(FileHash, ASumIsOfBytesAndNotOfANumber) {
  const testing::TempDir dir;
  testing::write_file(dir.path() / "a", std::string(16, 'A') + std::string(16, 'B'));
  const auto fd = open_file(AT_FDCWD, dir.path(), O_PATH | O_DIRECTORY).value();
  struct stat st {};
  ASSERT_EQ(::stat((dir.path() / "a").c_str(), &st), 0);
  HashCache hashes;
  const FileVersion version = version_of(st);
  const auto file =
      std::make_shared<const FileToHash>(fd.get(), "a", version, hashes.begin(version));
  Executor executor(1, nullptr);
  const auto sum_at = [&](uint64_t offset) {
    const ArrayToHash array{
        file, 0, {"w", DType::kU8, {16}, offset, 16}, SubTensor::whole({16}), {16}};
    return hash_arrays({array}, executor, hashes, {}).value().at(0).at(0);
  };
  const Checksum first = sum_at(0), second = sum_at(16);
  EXPECT_NE(first.to_hex(), second.to_hex());
  const uint64_t hashed = hashes.bytes();
  EXPECT_EQ(sum_at(0).to_hex(), first.to_hex());
  EXPECT_EQ(sum_at(16).to_hex(), second.to_hex());
  EXPECT_EQ(hashes.bytes(), hashed);  // they were known
}

bool is_master_of_f16(float master, uint16_t weight) {
  return is_master_of(std::span(&master, 1), DType::kF16, std::as_bytes(std::span(&weight, 1)));
}

TEST(MasterCopies, RoundedToSixteenBits) {
  // What torch makes of them.
  const std::pair<float, uint16_t> rounded[] = {
      {1.0F, 0x3C00},     {-2.5F, 0xC100},     {0.1F, 0x2E66},           {65504.0F, 0x7BFF},
      {65519.0F, 0x7BFF}, {65520.0F, 0x7C00},  {-1e30F, 0xFC00},         {INFINITY, 0x7C00},
      {6.1e-5F, 0x03FF},  {6.103e-5F, 0x0400}, {5.9604645e-8F, 1},       {2.9802322e-8F, 0},
      {2.9802326e-8F, 1}, {8.9406967e-8F, 2},  {1.00048828125F, 0x3C00}, {1.00146484375F, 0x3C02},
      {-0.0F, 0x8000}};
  for (const auto& [master, weight] : rounded) {
    EXPECT_TRUE(is_master_of_f16(master, weight)) << master;
    EXPECT_FALSE(is_master_of_f16(master, weight ^ 1)) << master;
  }
  EXPECT_TRUE(is_master_of_f16(NAN, 0x7E01));
  EXPECT_FALSE(is_master_of_f16(NAN, 0x7C00));
  const float one = 1;
  EXPECT_FALSE(is_master_of(std::span(&one, 1), DType::kF8E4M3, std::as_bytes(std::span(&one, 1))));
}

}  // namespace
}  // namespace ptc
