// The bodies of frames. Decoders take bytes from strangers: kCorrupt, with what is wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/tensor/checksum.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

inline constexpr size_t kMaxNameBytes = 255;  // nodes, clusters, methods
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kMaxFetchItems = 1 << 16;

/// Who speaks; of a Welcome with the proof that it knows the secret. Names are printable ASCII
/// without blanks.
struct Hello {
  std::string cluster, node, nonce, proof;
};
std::string encode(const Hello& hello);
Result<Hello> decode_hello(std::string_view body);

/// Of a node that has not begun what was asked, as it is busy with as much as it may be:
/// kUnavailable, and it can be asked again, whatever it is.
Error too_busy(std::string message);
bool is_too_busy(const Error& error);

/// A code that the other side does not know becomes kInternal. too_busy() stays that.
std::string encode(const Error& error);
std::optional<Error> decode_error(std::string_view body);  // nothing: it cannot be read

/// What a call and a reply announce; the bytes follow in data frames.
struct CallHeader {
  std::string method;  // empty in a reply
  uint64_t body_bytes = 0;
};
std::string encode(const CallHeader& call);
Result<CallHeader> decode_call(std::string_view body);

/// Bytes [begin, end) of the string that the runs of an image make: `runs` is packed().
struct FetchPart {
  uint32_t image = 0;  // index into FetchRequest::images
  StridedCopy runs;
  uint64_t begin = 0, end = 0;
};
inline constexpr uint64_t kMostPartBytes = uint64_t{1} << 62;
struct FetchRequest {
  std::vector<std::string> images;
  std::vector<FetchPart> parts;
};
std::string encode(const FetchRequest& request);
/// Nothing in it overflows: all products and sums of a part fit into 64 bits, begin ≤ end ≤ its
/// bytes ≤ kMostPartBytes.
Result<FetchRequest> decode_fetch(std::string_view body);

/// Of what is staged on a device and sent over a link at a time.
inline constexpr uint64_t kLeastChunkBytes = 64 << 10, kMostChunkBytes = 1 << 30;

/// A fetch whose bytes go from a device of who answers to one of who asks, over a link between the
/// two (store/device/device_link.h).
struct DeviceFetchRequest {
  std::string links;         // their kind, DeviceLinkMaker::name()
  uint32_t device = 0;       // of who answers
  uint64_t link = 0;         // which, of those that who asks has made
  std::string id;            // it is made now, by this; empty: it is open
  uint64_t chunk_bytes = 0;  // at most in a chunk
  FetchRequest fetch;
};
std::string encode(const DeviceFetchRequest& request);
Result<DeviceFetchRequest> decode_device_fetch(std::string_view body);

/// So many bytes, at least one, go over the link now; with their checksum as of a tensor's.
struct DeviceChunk {
  uint64_t bytes = 0;
  Checksum sum;
};
std::string encode(const DeviceChunk& chunk);
Result<DeviceChunk> decode_device_chunk(std::string_view body);

}  // namespace ptc
