// The header of a frame: 32 bytes before everything that goes between two nodes. See PROTOCOL.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "store/base/error.h"

namespace ptc {

inline constexpr uint16_t kProtocolVersion = 7;

/// On the wire: never renumber.
enum class FrameType : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kProof = 3,
  kReady = 4,
  kError = 5,
  kCall = 6,
  kReply = 7,
  kData = 8,
  kPing = 9,
  kFetch = 10,
  kDeviceFetch = 11,
  kDeviceChunk = 12,
};

inline constexpr size_t kFrameHeaderBytes = 32;
inline constexpr uint32_t kMaxDataBytes = 1 << 20;
inline constexpr uint32_t kMaxFetchBytes = 16 << 20;
inline constexpr uint32_t kMaxDeviceFetchBytes = kMaxFetchBytes + (1 << 10);
inline constexpr uint64_t kMaxCallBytes = 256 << 20;  // in frames of at most kMaxDataBytes

/// The longest body of a frame of this type; 0 of a type that does not exist.
uint32_t max_body_bytes(FrameType type);

struct FrameHeader {
  FrameType type{};
  uint64_t request = 0;  // an answer carries its request's
  uint32_t body_bytes = 0;
  uint32_t body_crc = 0;  // crc32c of the body; 0 of none
};

using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;
FrameHeaderBytes encode(const FrameHeader& header);

/// kCorrupt, with what is wrong with it: another program, another version, damage, an unknown type,
/// or a length beyond max_body_bytes.
Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes);

}  // namespace ptc
