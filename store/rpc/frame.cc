#include "store/rpc/frame.h"

#include <cstring>

#include "store/base/bytes.h"
#include "store/base/crc32c.h"

namespace ptc {
namespace {

constexpr uint32_t kMagic = 0x46435450;  // "PTCF"
constexpr size_t kChecked = kFrameHeaderBytes - sizeof(uint32_t);

}  // namespace

uint32_t max_body_bytes(FrameType type) {
  switch (type) {
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kProof:
      return 4 << 10;
    case FrameType::kReady:
    case FrameType::kPing:
      return 0;
    case FrameType::kError:
      return 64 << 10;
    case FrameType::kCall:
    case FrameType::kReply:
      return 1 << 10;
    case FrameType::kData:
      return kMaxDataBytes;
    case FrameType::kFetch:
      return kMaxFetchBytes;
    case FrameType::kDeviceFetch:
      return kMaxDeviceFetchBytes;
    case FrameType::kDeviceChunk:
      return 64;
  }
  return 0;
}

FrameHeaderBytes encode(const FrameHeader& header) {
  ByteWriter out;
  out.number(kMagic);
  out.number(kProtocolVersion);
  out.number(static_cast<uint16_t>(header.type));
  out.number(header.request);
  out.number(header.body_bytes);
  out.number(header.body_crc);
  out.number(uint32_t{0});
  const std::string text = out.take();
  FrameHeaderBytes bytes;
  std::memcpy(bytes.data(), text.data(), kChecked);
  const uint32_t crc = crc32c(std::span(bytes).first<kChecked>());
  std::memcpy(bytes.data() + kChecked, &crc, sizeof crc);
  return bytes;
}

Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  ByteReader in({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (in.number<uint32_t>() != kMagic)
    return Error(Code::kCorrupt, "this is not the protocol of ptcfs nodes");
  const uint16_t version = in.number<uint16_t>();
  const uint16_t type = in.number<uint16_t>();
  FrameHeader header;
  header.type = static_cast<FrameType>(type);
  header.request = in.number<uint64_t>();
  header.body_bytes = in.number<uint32_t>();
  header.body_crc = in.number<uint32_t>();
  in.number<uint32_t>();
  if (in.number<uint32_t>() != crc32c(bytes.first<kChecked>()))
    return Error(Code::kCorrupt, "a frame's header was damaged on its way");
  if (version != kProtocolVersion)
    return make_error(Code::kCorrupt,
                      "the peer speaks version {} of the protocol, this node version {}; "
                      "run the same ptcfs on all nodes",
                      version, kProtocolVersion);
  if (type < static_cast<uint16_t>(FrameType::kHello) ||
      type > static_cast<uint16_t>(FrameType::kDeviceChunk))
    return make_error(Code::kCorrupt, "there are no frames of type {}", type);
  if (header.body_bytes > max_body_bytes(header.type))
    return make_error(Code::kCorrupt, "a frame of type {} with {} bytes is longer than {}", type,
                      header.body_bytes, max_body_bytes(header.type));
  return header;
}

}  // namespace ptc
