// Moves byte runs out of images, wherever they lie, into a memory of this node.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <utility>

#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/image/image_store.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

/// One rectangle of bytes: the runs of `copy` that fall into the target window [begin, end).
struct FetchItem {
  const Image* source = nullptr;  // held by the caller until fetch returns
  StridedCopy copy;
  uint64_t begin = 0;
  uint64_t end = 0;
  MemoryPointer target_at_begin = {};  // where target byte `begin` goes
  /// Whose mapping the target is, if it is one: long runs may go the cheaper way, by its write(),
  /// and before anything goes into the mapping space is taken.
  ImageWriter* writer = nullptr;
};

/// One call carries the whole list, whatever nodes its images are on, so that a transport over a
/// network sends one request to each node and receives one long stream from it.
///
/// Threads: any; calls run at the same time.
/// Lifetime: images and target memory outlive the call.
/// Cancellation: asked between runs; what arrived stays.
/// Errors: kInvalidArgument (a target is in a memory that this transport does not write to; the
/// message names it), kUnavailable (a node does not answer, or has the image no more: another
/// holder may), kCorrupt (an image is shorter than its runs), kCancelled. Then `begin` of each
/// item, and target_at_begin with it, has moved behind what has arrived: the same items can be
/// handed in once more, with other sources of the same bytes where need be, and nothing is sent
/// twice. After success begin = end.
class Transport {
 public:
  virtual ~Transport() = default;
  /// As long as a node that says nothing counts as alive.
  static constexpr std::chrono::milliseconds kUsualSilence = std::chrono::milliseconds::max();
  Result<> fetch(std::span<FetchItem> items, std::stop_token stop) {
    return fetch(items, std::move(stop), kUsualSilence);
  }
  /// For who has other holders to ask: gives a node up that has said nothing for `silence`.
  virtual Result<> fetch(std::span<FetchItem> items, std::stop_token stop,
                         std::chrono::milliseconds silence) = 0;
};

/// For a transport that writes to the host's memory alone: kInvalidArgument of a target elsewhere.
Result<> check_in_host_memory(std::span<const FetchItem> items);

/// The reference: every image is on this node. A memcpy for every run.
std::unique_ptr<Transport> make_loopback_transport();

}  // namespace ptc
