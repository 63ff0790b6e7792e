// The answering side of a fetch whose bytes go from a device of this node to one of another, over
// a link between the two. The connection says how far it is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/base/spare_threads.h"
#include "store/image/image_store.h"
#include "store/rpc/connection.h"
#include "store/rpc/device_links.h"
#include "store/rpc/messages.h"

namespace ptc {

/// Gathers the runs into one staging buffer while the other one is sent. For one request. Threads:
/// one, of the network; what waits for a device or for the link is done by `threads`. A peer that
/// is gone is noticed by the pings that it gets meanwhile; then the link is given up.
class DeviceSender {
 public:
  /// `links`: null: this node has none.
  DeviceSender(Connection& connection, DeviceLinks* links, ImageStore& images,
               SpareThreads& threads, std::string from_node);

  /// Errors are the connection's. All others are told to the peer behind the chunks before them.
  /// After one about an image (kNotFound, kCorrupt: shorter than its runs) the link is still good,
  /// after any other it is not kept. kInvalidArgument: this node can send nothing in this way.
  Task<> send(uint64_t request, const DeviceFetchRequest& fetch);

 private:
  Result<> check(const DeviceFetchRequest& fetch);
  Task<> send_chunks(uint64_t request, const DeviceFetchRequest& fetch);
  Result<> hears(Result<> sent);
  Task<> in_background(uint64_t request, std::function<Result<>()> work);
  Result<ConstMemoryPointer> source_of(const FetchRequest& fetch, const FetchPart& part);
  Result<DeviceChunk> gather(const FetchRequest& fetch, MemoryPointer buffer);

  Connection& connection_;
  DeviceLinks* const links_;
  ImageStore& images_;
  SpareThreads& threads_;
  const std::string from_node_;
  DeviceLinks::Held link_{nullptr, {nullptr}};  // given up by the network's thread alone
  uint64_t bytes_ = 0;                          // of all parts
  uint64_t chunk_bytes_ = 0;
  size_t part_ = 0;                   // the next bytes are of this one,
  uint64_t at_ = 0;                   // so many bytes of its string behind its begin
  std::vector<ImageRef> held_;        // as in FetchRequest::images
  std::optional<Error> image_error_;  // behind what was gathered
  std::optional<Error> gone_;         // the peer
};

}  // namespace ptc
