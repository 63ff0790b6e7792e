// New images of one node, of bytes that lie here and on other nodes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/exec/executor.h"

namespace ptc {

/// One image to make.
struct FetchTarget {
  uint32_t number = 0;  // among the targets of the plan; growing
  const ImageLayout* layout = nullptr;
  SharedVector<Transfer> transfers;
};

/// The other nodes that make images of the same plan, where it has relays. A window is named by its
/// target and the byte at which it begins. Threads: any.
class Relays {
 public:
  virtual ~Relays() = default;
  /// On which node a target is made: the same number means the same node.
  virtual uint32_t node_of(uint32_t target) const = 0;
  /// The image on another node that becomes the target, once the window is in it. An error: take it
  /// from the source, and ask this node no more.
  virtual Result<ImageRef> wait_for(uint32_t target, uint64_t window, std::stop_token stop) = 0;
  /// A window that others may want has come, into an image on this node that can be read under this
  /// id.
  virtual void arrived(uint32_t target, uint64_t window, const ImageId& image) = 0;
};

struct FetchSources {
  std::vector<ImageRef> images;  // by Transfer::source_image; null where no transfer uses it
  /// Another image with the same bytes as image `i`, on another node, once that one failed: asked
  /// with growing `attempt` from 1; nullptr: there is none.
  std::function<ImageRef(uint32_t i, uint32_t attempt)> alternative;
  Relays* relays = nullptr;  // where a transfer has a window
  std::string self = {};     // this node's name, as others' images have it
};

/// Makes the targets, published in their order, and adds the checksums of their arrays to `ledger`.
/// What lies here is copied by all threads; meanwhile what lies elsewhere comes straight into the
/// new images, from some nodes at a time, and from what others relay (remote_fetch.h); meanwhile
/// what is whole is hashed (incoming_sums.h). Last, what one target has of another, or elsewhere of
/// its own, is copied. A node that fails is replaced by another holder, one that relays by the
/// source, and what arrived is not sent again. `bytes_done` grows by the bytes written. An image
/// for a device's memory is filled there by the executor's transport, and summed there once it is
/// whole. Errors: also those of ImageStore::create(). On an error no image stays behind.
Result<std::vector<ImageRef>> fetch_images(ImageStore& images, Executor& executor,
                                           const std::vector<FetchTarget>& targets,
                                           const FetchSources& sources,
                                           const SummedTensors& tensors, ChecksumLedger& ledger,
                                           std::atomic<uint64_t>& bytes_done, std::stop_token stop);

}  // namespace ptc
