// The bytes of the protocol: checksum, header, messages, and runs as one string.
#include "store/rpc/frame.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "store/base/crc32c.h"
#include "store/base/memory_place.h"
#include "store/rpc/messages.h"
#include "store/tensor/packed_copy.h"

namespace ptc {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

uint64_t seed() {
  const char* given = std::getenv("PTC_SEED");
  return given ? std::strtoull(given, nullptr, 10) : std::random_device()();
}

TEST(Crc32c, KnownSums) {
  // RFC 3720, B.4, and the usual check value.
  for (auto* crc : {&crc32c, &crc32c_by_table}) {
    EXPECT_EQ(crc(bytes_of("123456789"), 0), 0xE3069283u);
    EXPECT_EQ(crc(bytes_of(std::string(32, '\0')), 0), 0x8A9136AAu);
    EXPECT_EQ(crc(bytes_of(std::string(32, '\xff')), 0), 0x62A8AB43u);
    EXPECT_EQ(crc({}, 0), 0u);
  }
}

TEST(Crc32c, HoweverItIsCutAndWhereverItLies) {
  std::mt19937_64 random(seed());
  std::string text(40'000, '\0');
  for (char& c : text) c = static_cast<char>(random());
  for (int round = 0; round < 300; ++round) {
    const size_t begin = random() % 100, size = random() % (text.size() - begin);
    const auto bytes = bytes_of(text).subspan(begin, size);
    const size_t cut = random() % (size + 1);
    const uint32_t sum = crc32c_by_table(bytes);
    ASSERT_EQ(crc32c(bytes), sum) << begin << "+" << size;
    ASSERT_EQ(crc32c(bytes.subspan(cut), crc32c(bytes.first(cut))), sum);
  }
}

TEST(Frame, AHeaderComesBackAndEveryFlippedBitIsSeen) {
  const FrameHeader header{FrameType::kData, 0x0102030405060708, 1000, 0xABCDEF01};
  FrameHeaderBytes bytes = encode(header);
  const FrameHeader again = decode_frame_header(bytes).value();
  EXPECT_EQ(again.type, header.type);
  EXPECT_EQ(again.request, header.request);
  EXPECT_EQ(again.body_bytes, header.body_bytes);
  EXPECT_EQ(again.body_crc, header.body_crc);
  for (size_t bit = 0; bit < 8 * kFrameHeaderBytes; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_TRUE(has_error(decode_frame_header(bytes), Code::kCorrupt)) << bit;
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }
}

TEST(Frame, LengthsAndTypesAreLimited) {
  auto refused = [](uint16_t type, uint32_t bytes, std::string_view part) {
    return has_error(decode_frame_header(encode({static_cast<FrameType>(type), 1, bytes, 0})),
                     Code::kCorrupt, part);
  };
  EXPECT_TRUE(refused(0, 0, "type 0"));
  EXPECT_TRUE(refused(13, 0, "type 13"));
  EXPECT_TRUE(refused(8, kMaxDataBytes + 1, "longer"));
  EXPECT_TRUE(refused(1, UINT32_MAX, "longer"));
  EXPECT_TRUE(refused(9, 1, "longer"));
}

TEST(Messages, EveryCodeOfAnErrorTravels) {
  for (int code = 0; code <= static_cast<int>(Code::kInternal); ++code) {
    const Error error(static_cast<Code>(code), "why");
    const auto again = decode_error(encode(error));
    ASSERT_TRUE(again);
    EXPECT_EQ(again->code(), error.code());
    EXPECT_EQ(again->message(), "why");
  }
  EXPECT_TRUE(is_too_busy(*decode_error(encode(too_busy("later")))));
  EXPECT_FALSE(is_too_busy(*decode_error(encode(Error(Code::kUnavailable, "why")))));
  std::string unknown = encode(Error(Code::kBusy, "x"));
  unknown[0] = 99;
  EXPECT_EQ(decode_error(unknown)->code(), Code::kInternal);
}

/// A copy whose levels nest as make_strided_copy makes them, with gaps.
StridedCopy random_copy(std::mt19937_64& random) {
  StridedCopy copy;
  copy.source_offset = random() % 50;
  copy.target_offset = random() % 50;
  copy.run_bytes = 1 + random() % 9;
  copy.level_count = random() % 4;
  uint64_t source = copy.run_bytes, target = copy.run_bytes;
  for (uint32_t level = copy.level_count; level-- > 0;) {
    StridedCopy::Level& loop = copy.levels[level];
    loop = {1 + random() % 5, source + random() % 4, target + random() % 4};
    source = loop.source_stride * loop.count;
    target = loop.target_stride * loop.count;
  }
  return copy;
}

TEST(PackedCopy, IsTheRunsOneBehindTheOther) {
  const uint64_t first = seed();
  for (uint64_t now = first; now < first + 500; ++now) {
    SCOPED_TRACE("PTC_SEED=" + std::to_string(now));
    std::mt19937_64 random(now);
    const StridedCopy copy = random_copy(random);
    std::vector<uint64_t> source_of, target_of;  // by byte of the string
    for_each_run(copy, [&](uint64_t source, uint64_t target, uint64_t bytes) {
      for (uint64_t i = 0; i < bytes; ++i) {
        source_of.push_back(source + i);
        target_of.push_back(target + i);
      }
    });
    ASSERT_EQ(source_of.size(), copy.total_bytes());
    const StridedCopy dense = packed(copy);
    EXPECT_EQ(dense.target_end(), copy.total_bytes());
    for_each_run(dense, [&](uint64_t source, uint64_t target, uint64_t bytes) {
      for (uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(source_of[target + i], source + i);
    });
    size_t before = 0;
    for (uint64_t target = 0; target <= copy.target_end() + 5; ++target) {
      while (before < target_of.size() && target_of[before] < target) ++before;
      ASSERT_EQ(packed_offset(copy, target), before) << target;
    }
    for (size_t i = 0; i < target_of.size(); ++i)
      ASSERT_EQ(target_of_packed(copy, i), target_of[i]);
    uint64_t at = 0;
    const StridedCopy back = unpacked(copy);
    EXPECT_EQ(back.source_end(), copy.total_bytes());
    for_each_run(back, [&](uint64_t source, uint64_t target, uint64_t bytes) {
      for (uint64_t i = 0; i < bytes; ++i, ++at) {
        ASSERT_EQ(source + i, at);
        ASSERT_EQ(target + i, target_of[at]);
      }
    });
  }
}

TEST(PackedCopy, AWindowAtTheEndOfManyBytesIsNoLarger) {
  for (const uint64_t count : {kMostPartBytes, (uint64_t{1} << 63) + 10, UINT64_MAX - 5}) {
    StridedCopy copy;
    copy.run_bytes = 1;
    copy.level_count = 2;
    copy.levels[0].count = 1;
    copy.levels[1].count = count;
    copy = packed(copy);
    ASSERT_EQ(copy.total_bytes(), count);
    for (const uint64_t begin : {uint64_t{0}, count / 2, count - 1}) {
      uint64_t bytes = 0;
      for_each_rectangle(copy, begin, begin + 1, [&](const StridedCopy& rectangle) {
        EXPECT_TRUE(lies_within(rectangle, 1, begin, begin + 1));
        bytes += rectangle.total_bytes();
      });
      EXPECT_EQ(bytes, 1u) << count << " " << begin;
    }
  }
}

/// A request with a part of each kind, and one without.
DeviceFetchRequest some_device_fetch() {
  DeviceFetchRequest request;
  request.links = "NCCL 2.27.3";
  request.device = 3;
  request.link = 0x0102030405060708;
  request.id = std::string("\0\x01id", 4);
  request.chunk_bytes = 1 << 20;
  request.fetch.images = {"0123456789abcdef"};
  FetchPart part;
  part.runs.run_bytes = 10;
  part.runs.level_count = 1;
  part.runs.levels[0] = {3, 20, 10};
  part.end = 30;
  request.fetch.parts = {part};
  return request;
}

TEST(DeviceFetch, ComesBackAndNothingElseIsTaken) {
  const DeviceFetchRequest request = some_device_fetch();
  const std::string body = encode(request);
  const DeviceFetchRequest again = decode_device_fetch(body).value();
  EXPECT_EQ(encode(again), body);
  EXPECT_EQ(again.links, request.links);
  EXPECT_EQ(again.device, 3u);
  EXPECT_EQ(again.link, request.link);
  EXPECT_EQ(again.id, request.id);
  EXPECT_EQ(again.fetch.parts.at(0).end, 30u);
  for (size_t size = 0; size < body.size(); ++size)
    EXPECT_TRUE(has_error(decode_device_fetch(body.substr(0, size)), Code::kCorrupt)) << size;
  EXPECT_TRUE(has_error(decode_device_fetch(body + "x"), Code::kCorrupt));
  const auto refused = [](auto change) {
    DeviceFetchRequest wrong = some_device_fetch();
    change(wrong);
    EXPECT_TRUE(has_error(decode_device_fetch(encode(wrong)), Code::kCorrupt));
  };
  refused([](DeviceFetchRequest& wrong) { wrong.links = std::string(300, 'x'); });
  refused([](DeviceFetchRequest& wrong) { wrong.id = std::string(129, 'x'); });
  refused([](DeviceFetchRequest& wrong) { wrong.device = NodeMemory::kMostDevices; });
  refused([](DeviceFetchRequest& wrong) { wrong.chunk_bytes = kLeastChunkBytes - 1; });
  refused([](DeviceFetchRequest& wrong) { wrong.chunk_bytes = kMostChunkBytes + 1; });
  refused([](DeviceFetchRequest& wrong) { wrong.fetch.parts[0].image = 1; });
  refused([](DeviceFetchRequest& wrong) {
    wrong.fetch.parts[0].runs.run_bytes = 1;
    wrong.fetch.parts[0].runs.levels[0] = {kMostPartBytes + 1, 0, 1};
  });
}

TEST(DeviceChunk, ComesBack) {
  const DeviceChunk chunk{12345, {{UINT64_MAX, 7}}};
  const std::string body = encode(chunk);
  EXPECT_EQ(decode_device_chunk(body).value().bytes, chunk.bytes);
  EXPECT_EQ(decode_device_chunk(body).value().sum, chunk.sum);
  for (size_t size = 0; size < body.size(); ++size)
    EXPECT_TRUE(has_error(decode_device_chunk(body.substr(0, size)), Code::kCorrupt)) << size;
  EXPECT_TRUE(has_error(decode_device_chunk(body + "x"), Code::kCorrupt));
  EXPECT_TRUE(has_error(decode_device_chunk(encode(DeviceChunk{})), Code::kCorrupt));
}

}  // namespace
}  // namespace ptc
