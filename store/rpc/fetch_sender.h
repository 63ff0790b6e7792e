// The answering side of a fetch: runs of images as one stream of checked chunks.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "store/base/spare_threads.h"
#include "store/image/image_store.h"
#include "store/rpc/connection.h"
#include "store/rpc/messages.h"

namespace ptc {

/// Chunks cross from one part into the next. Runs of a page and more are sent from the mapped
/// image, the others gathered first; one chunk is in memory at a time. For one request. Threads:
/// one, which other connections have, too: so they come between any two chunks, and what must come
/// from a disk or a device first is read by a reader.
class FetchSender {
 public:
  FetchSender(Connection& connection, ImageStore& images, SpareThreads& readers);

  /// Errors are the connection's. One about an image (kNotFound, kCorrupt: shorter than its runs)
  /// is told to the peer behind the bytes before it, and ends the answer.
  Task<> send(uint64_t request, const FetchRequest& fetch);

 private:
  Result<ConstMemoryPointer> source_of(const FetchRequest& fetch, const FetchPart& part);
  Task<> add_of_device(const FetchPart& part, ConstMemoryPointer source, uint64_t begin,
                       uint64_t end);
  asio::awaitable<void> bring_in(const FetchPart& part, const std::byte* source, uint64_t begin,
                                 uint64_t end);
  void add_bytes(const FetchPart& part, const std::byte* source, uint64_t begin, uint64_t end);
  Task<> flush(uint64_t request);

  Connection& connection_;
  ImageStore& images_;
  SpareThreads& readers_;
  std::vector<std::byte> buffer_;  // gathered bytes of the chunk
  size_t gathered_ = 0;
  std::vector<iovec> pieces_;
  size_t chunk_bytes_ = 0;
  struct Held {
    uint32_t index;  // in FetchRequest::images
    ImageRef image;
  };
  std::vector<Held> held_;  // what pieces_ point into, and what the next parts may be of
};

}  // namespace ptc
