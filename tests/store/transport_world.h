// Nodes, their images, and a transport between them, for tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "expect_error.h"
#include "store/transport/transport.h"

namespace ptc {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(size_t count, std::mt19937_64& random) {
  Bytes bytes(count + 7);
  for (size_t i = 0; i < count; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, sizeof word);
  }
  bytes.resize(count);
  return bytes;
}

/// Nodes with image directories, and a transport that reads them all.
class TransportWorld {
 public:
  TransportWorld() {
    char path[] = "/tmp/ptcfs-transport-XXXXXX";
    directory_ = ::mkdtemp(path);
  }
  virtual ~TransportWorld() { (void)remove_tree(AT_FDCWD, directory_); }

  virtual size_t nodes() const = 0;
  virtual ImageStore& store(size_t node) = 0;
  /// The image as the fetching node sees it.
  virtual ImageRef seen(size_t node, const ImageRef& image) = 0;
  virtual Transport& transport() = 0;
  /// Which memories a node has, one after another: the host's, or its devices' as well.
  NodeMemory memory(size_t node, size_t number) {
    const auto& devices = store(node).devices();
    if (devices == nullptr) return {};
    const auto memories = devices->memories();
    number %= memories.size() + 1;
    return number == 0 ? NodeMemory::host() : memories[number - 1];
  }

  /// In one memory of the node after the other.
  ImageRef publish(size_t node, const Bytes& bytes) {
    ImageWriter writer =
        store(node)
            .create(bytes.size(), ImageStore::TakeSpace::kNow, memory(node, published_++))
            .value();
    EXPECT_TRUE(is_ok(writer.write(0, bytes)));
    return store(node).publish(std::move(writer)).value();
  }
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
  std::atomic<size_t> published_ = 0;
};

/// One run of `bytes` from the start of an image.
inline StridedCopy whole_copy(uint64_t bytes) {
  StridedCopy copy;
  copy.run_bytes = bytes;
  return copy;
}

}  // namespace ptc
