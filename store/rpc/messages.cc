#include "store/rpc/messages.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "store/base/bytes.h"
#include "store/device/device_link.h"
#include "store/tensor/packed_copy.h"

namespace ptc {
namespace {

constexpr size_t kImageIdBytes = 16;
constexpr size_t kMaxErrorBytes = 32 << 10;
constexpr size_t kProofBytes = 32;
constexpr size_t kPartBytes = 4 + 4 + 4 * 8;  // without its levels

/// On the wire: never renumber.
constexpr std::array<std::pair<Code, uint16_t>, 13> kCodes{{
    {Code::kInvalidArgument, 1},
    {Code::kNotFound, 2},
    {Code::kAlreadyExists, 3},
    {Code::kBusy, 4},
    {Code::kConflict, 5},
    {Code::kNoSpace, 6},
    {Code::kPermissionDenied, 7},
    {Code::kReadOnly, 8},
    {Code::kUnavailable, 9},
    {Code::kCorrupt, 10},
    {Code::kCancelled, 11},
    {Code::kInternal, 12},
    {Code::kInDoubt, 13},
}};

constexpr uint16_t kTooBusy = 14;

Error malformed(std::string_view what) {
  return make_error(Code::kCorrupt, "a {} that cannot be read", what);
}

bool is_name(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

/// The levels of a part, its target offsets filled in; false when a number is impossible.
bool read_part(ByteReader& in, FetchPart& part) {
  part.image = in.number<uint32_t>();
  StridedCopy& runs = part.runs;
  runs.level_count = in.number<uint32_t>();
  runs.source_offset = in.number<uint64_t>();
  runs.run_bytes = in.number<uint64_t>();
  part.begin = in.number<uint64_t>();
  part.end = in.number<uint64_t>();
  if (!in.good() || runs.level_count > kMaxAxes || runs.run_bytes == 0) return false;
  uint64_t source_end = 0, total = runs.run_bytes;
  if (__builtin_add_overflow(runs.source_offset, runs.run_bytes, &source_end)) return false;
  for (uint32_t level = 0; level < runs.level_count; ++level) {
    StridedCopy::Level& loop = runs.levels[level];
    loop.count = in.number<uint64_t>();
    loop.source_stride = in.number<uint64_t>();
    uint64_t reach = 0;
    if (loop.count == 0 || __builtin_mul_overflow(loop.count - 1, loop.source_stride, &reach) ||
        __builtin_add_overflow(source_end, reach, &source_end) ||
        __builtin_mul_overflow(total, loop.count, &total))
      return false;
  }
  runs = packed(runs);
  return in.good() && part.begin <= part.end && part.end <= total && total <= kMostPartBytes;
}

void write_fetch(ByteWriter& out, const FetchRequest& request) {
  out.number(static_cast<uint32_t>(request.images.size()));
  for (const std::string& image : request.images) out.text(image);
  out.number(static_cast<uint32_t>(request.parts.size()));
  for (const FetchPart& part : request.parts) {
    out.number(part.image);
    out.number(part.runs.level_count);
    for (uint64_t number : {part.runs.source_offset, part.runs.run_bytes, part.begin, part.end})
      out.number(number);
    for (uint32_t level = 0; level < part.runs.level_count; ++level) {
      out.number(part.runs.levels[level].count);
      out.number(part.runs.levels[level].source_stride);
    }
  }
}

/// All that is left.
Result<FetchRequest> read_fetch(ByteReader& in) {
  FetchRequest request;
  const size_t images = in.number<uint32_t>();
  if (images > kMaxFetchItems || images > in.left() / (4 + kImageIdBytes))
    return malformed("list of images");
  request.images.reserve(images);
  for (size_t i = 0; i < images; ++i) request.images.emplace_back(in.text(kImageIdBytes));
  const size_t parts = in.number<uint32_t>();
  if (!in.good() || parts > kMaxFetchItems || parts > in.left() / kPartBytes)
    return malformed("list of runs");
  request.parts.resize(parts);
  for (size_t i = 0; i < parts; ++i) {
    if (!read_part(in, request.parts[i]) || request.parts[i].image >= images)
      return make_error(Code::kCorrupt, "run {} of a fetch cannot be", i);
  }
  if (!in.done()) return malformed("fetch");
  return request;
}

}  // namespace

std::string encode(const Hello& hello) {
  ByteWriter out;
  for (const std::string* text : {&hello.cluster, &hello.node, &hello.nonce, &hello.proof})
    out.text(*text);
  return out.take();
}

Result<Hello> decode_hello(std::string_view body) {
  ByteReader in(body);
  Hello hello;
  hello.cluster = in.text(kMaxNameBytes);
  hello.node = in.text(kMaxNameBytes);
  hello.nonce = in.text(kNonceBytes);
  hello.proof = in.text(kProofBytes);
  if (!in.done() || !is_name(hello.cluster) || !is_name(hello.node) ||
      hello.nonce.size() != kNonceBytes)
    return malformed("greeting");
  return hello;
}

Error too_busy(std::string message) {
  return Error(Code::kUnavailable, std::move(message), EUSERS);
}

bool is_too_busy(const Error& error) {
  return error.code() == Code::kUnavailable && error.errno_value() == EUSERS;
}

std::string encode(const Error& error) {
  ByteWriter out;
  for (auto [code, number] : kCodes)
    if (code == error.code()) out.number(is_too_busy(error) ? kTooBusy : number);
  out.text(std::string_view(error.message()).substr(0, kMaxErrorBytes));
  return out.take();
}

std::optional<Error> decode_error(std::string_view body) {
  ByteReader in(body);
  const uint16_t wire = in.number<uint16_t>();
  std::string message(in.text(kMaxErrorBytes));
  if (!in.done()) return std::nullopt;
  if (wire == kTooBusy) return too_busy(std::move(message));
  Code of_wire = Code::kInternal;
  for (auto [code, number] : kCodes)
    if (number == wire) of_wire = code;
  return Error(of_wire, std::move(message));
}

std::string encode(const CallHeader& call) {
  ByteWriter out;
  out.text(call.method);
  out.number(call.body_bytes);
  return out.take();
}

Result<CallHeader> decode_call(std::string_view body) {
  ByteReader in(body);
  CallHeader call;
  call.method = in.text(kMaxNameBytes);
  call.body_bytes = in.number<uint64_t>();
  if (!in.done()) return malformed("call");
  return call;
}

std::string encode(const FetchRequest& request) {
  ByteWriter out;
  write_fetch(out, request);
  return out.take();
}

Result<FetchRequest> decode_fetch(std::string_view body) {
  ByteReader in(body);
  return read_fetch(in);
}

std::string encode(const DeviceFetchRequest& request) {
  ByteWriter out;
  out.text(request.links);
  out.number(request.device);
  out.number(request.link);
  out.text(request.id);
  out.number(request.chunk_bytes);
  write_fetch(out, request.fetch);
  return out.take();
}

Result<DeviceFetchRequest> decode_device_fetch(std::string_view body) {
  ByteReader in(body);
  DeviceFetchRequest request;
  request.links = in.text(kMaxNameBytes);
  request.device = in.number<uint32_t>();
  request.link = in.number<uint64_t>();
  request.id = in.text(DeviceLinkMaker::kMostIdBytes);
  request.chunk_bytes = in.number<uint64_t>();
  if (!in.good() || request.device >= NodeMemory::kMostDevices ||
      request.chunk_bytes < kLeastChunkBytes || request.chunk_bytes > kMostChunkBytes)
    return malformed("fetch on a device");
  PTC_TRY(request.fetch, read_fetch(in));
  return request;
}

std::string encode(const DeviceChunk& chunk) {
  ByteWriter out;
  for (const uint64_t number : {chunk.bytes, chunk.sum.lane[0], chunk.sum.lane[1]})
    out.number(number);
  return out.take();
}

Result<DeviceChunk> decode_device_chunk(std::string_view body) {
  ByteReader in(body);
  DeviceChunk chunk;
  for (uint64_t* number : {&chunk.bytes, &chunk.sum.lane[0], &chunk.sum.lane[1]})
    *number = in.number<uint64_t>();
  if (!in.done() || chunk.bytes == 0) return malformed("chunk of a device");
  return chunk;
}

}  // namespace ptc
