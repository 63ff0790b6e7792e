// Moves byte runs out of images, wherever they lie, into local memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>

#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

/// One rectangle of bytes: the runs of `copy` that fall into the target window [begin, end).
struct FetchItem {
  const Image* source = nullptr;  // held by the caller until fetch returns
  StridedCopy copy;
  uint64_t begin = 0;
  uint64_t end = 0;
  std::byte* target_at_begin = nullptr;  // where target byte `begin` goes
};

/// Fetches from one node. One call carries the whole list, so that a transport over a network sends
/// one request and receives one stream.
///
/// Threads: any; calls run at the same time.
/// Lifetime: images and target memory outlive the call.
/// Cancellation: asked between runs; what arrived stays.
/// Errors: kUnavailable (the node does not answer: another holder may), kCorrupt (an image is shorter
/// than its runs), kCancelled.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual Result<> fetch(std::span<const FetchItem> items, std::stop_token stop) = 0;
};

/// The reference: every image is on this node. A memcpy for every run.
std::unique_ptr<Transport> make_loopback_transport();

}  // namespace ptc
