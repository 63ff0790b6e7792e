// What a node takes from another: a frame's header, and behind it the body of its type.
#include <algorithm>
#include <cstring>

#include "fuzz.h"
#include "store/rpc/frame.h"
#include "store/rpc/messages.h"
#include "store/tensor/packed_copy.h"

namespace ptc::fuzz {
namespace {

/// A header with a body that says what it is.
std::string frame(FrameType type, std::string_view body) {
  const FrameHeaderBytes header =
      encode(FrameHeader{type, 1, static_cast<uint32_t>(body.size()), 0});
  return std::string(reinterpret_cast<const char*>(header.data()), header.size()) +
         std::string(body);
}

void check_parts(const FetchRequest& fetch) {
  for (const FetchPart& part : fetch.parts) {
    PTC_CHECK(part.image < fetch.images.size());
    PTC_CHECK(part.begin <= part.end && part.end <= part.runs.total_bytes());
    PTC_CHECK(part.runs.total_bytes() <= kMostPartBytes);
    PTC_CHECK(part.runs.source_end() >= part.runs.run_bytes);
    PTC_CHECK(part.runs.target_end() == part.runs.total_bytes());
  }
}

void check_fetch(std::string_view body) {
  auto fetch = decode_fetch(body);
  if (!fetch) return check_error(fetch.error());
  check_parts(fetch.value());
  PTC_CHECK(encode(fetch.value()) == body);
}

void check_device_fetch(std::string_view body) {
  auto fetch = decode_device_fetch(body);
  if (!fetch) return check_error(fetch.error());
  check_parts(fetch.value().fetch);
  // What a part asks for can be cut as a launch on a device wants it.
  for (const FetchPart& part : fetch.value().fetch.parts) {
    uint64_t bytes = 0;
    const uint64_t end = std::min(part.end, part.begin + kLeastChunkBytes);
    for_each_rectangle(part.runs, part.begin, end, [&](const StridedCopy& rectangle) {
      PTC_CHECK(lies_within(rectangle, part.runs.source_end(), part.begin, end));
      bytes += rectangle.total_bytes();
    });
    PTC_CHECK(bytes == end - part.begin);
  }
  PTC_CHECK(encode(fetch.value()) == body);
}

template <class Decoded>
void check(std::string_view body, const Decoded& decoded) {
  if (!decoded) return check_error(decoded.error());
  PTC_CHECK(encode(decoded.value()) == body);
}

void check_body(FrameType type, std::string_view body) {
  switch (type) {
    case FrameType::kHello:
    case FrameType::kWelcome:
      return check(body, decode_hello(body));
    case FrameType::kCall:
    case FrameType::kReply:
      return check(body, decode_call(body));
    case FrameType::kFetch:
      return check_fetch(body);
    case FrameType::kDeviceFetch:
      return check_device_fetch(body);
    case FrameType::kDeviceChunk:
      return check(body, decode_device_chunk(body));
    case FrameType::kError:
      (void)decode_error(body);
      return;
    default:
      return;
  }
}

}  // namespace

void run(std::string_view input) {
  if (input.size() < kFrameHeaderBytes) return;
  FrameHeaderBytes bytes;
  std::memcpy(bytes.data(), input.data(), bytes.size());
  const std::string_view body = input.substr(kFrameHeaderBytes);
  if (auto header = decode_frame_header(bytes)) {
    PTC_CHECK(header.value().body_bytes <= max_body_bytes(header.value().type));
  } else {
    check_error(header.error());
  }
  // The body also where the header's checksum is no longer right: few mutations would come so far.
  check_body(static_cast<FrameType>(std::to_integer<uint16_t>(bytes[6])), body);
}

std::vector<std::string> large_inputs() {
  FetchRequest images, parts;
  images.images.assign(50'000, std::string(16, '0'));
  parts.images = {std::string(16, '0')};
  FetchPart part;
  part.runs.run_bytes = 1;
  part.runs.level_count = 1;
  part.runs.levels[0] = {kMostPartBytes, 1, 1};
  parts.parts.assign(16'000, part);
  DeviceFetchRequest device;
  device.chunk_bytes = kLeastChunkBytes;
  device.fetch = parts;
  return {frame(FrameType::kDeviceFetch, encode(device)), frame(FrameType::kFetch, encode(images)),
          frame(FrameType::kFetch, encode(parts)),
          frame(FrameType::kFetch, std::string(kMegabyte, '\0')),
          frame(FrameType::kError, encode(Error(Code::kBusy, std::string(kMegabyte, '\xff'))))};
}

}  // namespace ptc::fuzz
