// Checksums of images that are being filled from several sides, taken chunk by chunk as these
// become whole.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/exec/image_sums.h"
#include "store/base/mutex.h"

namespace ptc {

/// Bytes [begin, end) of an image.
struct ImagePart {
  size_t image;
  uint64_t begin, end;
};

/// Images are numbered as they were added. First add() and expect() everything, then start();
/// came() of each part once; finish() when all has come. A thread of its own hashes meanwhile.
class IncomingSums {
 public:
  IncomingSums() = default;

  /// `layout` and `memory`, the whole image in a shared mapping of its file, outlive this. What is
  /// hashed is taken out of the process's memory; who touches it again gets it from the file.
  Result<> add(const ImageLayout& layout, std::span<const std::byte> memory,
               const SummedTensors& tensors);
  /// Of an image in the memory of a device of this node: it is summed there, by finish().
  Result<> add_on_device(const ImageLayout& layout, ImageRef image, const SummedTensors& tensors);
  /// Something will be written into bytes [begin, end) of the image.
  void expect(const ImagePart& part);
  void start();
  /// They were written. Threads: any.
  void came(std::span<const ImagePart> parts);
  /// Hashes what is left, with all threads of the team, and adds the sums to the ledger.
  Result<> finish(ThreadTeam& team, ChecksumLedger& ledger, std::stop_token stop);

 private:
  struct ImageChunks {
    ImageSums sums;
    std::span<const std::byte> memory;
    std::vector<uint32_t> expected;  // by chunk
    ImageRef on_device = nullptr;    // then it has no chunks
  };
  struct Chunk {
    size_t image, number;
  };
  void hash(const Chunk& chunk);
  void hash_all(std::stop_token stop);

  std::vector<ImageChunks> images_;  // `expected` is guarded by mutex_ from start() on
  Mutex mutex_;
  StoppableConditionVariable more_;
  std::deque<Chunk> whole_ PTC_GUARDED_BY(mutex_);
  std::jthread thread_;  // last
};

}  // namespace ptc
