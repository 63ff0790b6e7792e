// New images of one node, of bytes that lie here and on other nodes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <vector>

#include "reshard/exec/executor.h"

namespace ptc {

/// One image to make.
struct FetchTarget {
  uint32_t number = 0;  // among the targets of the plan; growing
  const ImageLayout* layout = nullptr;
  std::vector<Transfer> transfers;
};

struct FetchSources {
  std::vector<ImageRef> images;  // by Transfer::source_image; null where no transfer uses it
  /// Another image with the same bytes as image `i`, on another node, once that one failed: asked with
  /// growing `attempt` from 1; nullptr: there is none.
  std::function<ImageRef(uint32_t i, uint32_t attempt)> alternative;
};

/// Makes the targets, published in their order, and adds the checksums of their arrays to `ledger`.
/// What lies here is copied by all threads; meanwhile everything that lies elsewhere comes in one
/// Transport::fetch, so in one stream from each node, straight into the new images; then what one
/// target has of another is copied; then all is hashed. A node that fails is replaced by another holder,
/// and what arrived is not sent again. `bytes_done` grows by the bytes written. On an error no image
/// stays behind.
Result<std::vector<ImageRef>> fetch_images(ImageStore& images, Executor& executor,
                                           const std::vector<FetchTarget>& targets,
                                           const FetchSources& sources,
                                           const std::vector<TensorFacts>& tensors,
                                           ChecksumLedger& ledger,
                                           std::atomic<uint64_t>& bytes_done, std::stop_token stop);

}  // namespace ptc
