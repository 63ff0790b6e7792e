// Carries plans out: fills new images from old ones, in parallel, and checks what came out.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <vector>

#include "reshard/exec/gather.h"
#include "reshard/exec/thread_team.h"
#include "reshard/plan/common_cuts.h"
#include "reshard/plan/planner.h"
#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/tensor/checksum.h"
#include "store/tensor/dtype.h"
#include "store/transport/transport.h"

namespace ptc {

/// What is known of a tensor independent of any layout.
struct TensorFacts {
  DType dtype = DType::kF32;
  Shape shape;
  Checksum checksum;  // of all its bytes
};

/// Tensors to be summed up, by the numbers that arrays give them. All that it refers to outlives
/// it.
struct SummedTensors {
  const std::vector<TensorFacts>& facts;
  const CommonCuts& cuts;  // pieces that are cut are summed up by these boxes

  SummedTensors(const std::vector<TensorFacts>& tensors, const CommonCuts& cut_at = kNotCut)
      : facts(tensors), cuts(cut_at) {}

 private:
  static const CommonCuts kNotCut;
};

/// Adds up the checksums of a tensor's boxes. Equal boxes, held more than once, must agree; the sum
/// over distinct boxes must be the tensor's. Not thread-safe. Cost of add(): O(1).
class ChecksumLedger {
 public:
  /// kCorrupt when an equal box had another checksum.
  Result<> add(uint32_t tensor, const Box& box, const Checksum& checksum);
  /// Over all distinct boxes added, and how many elements those have.
  Checksum total(uint32_t tensor) const;
  uint64_t elements(uint32_t tensor) const;
  /// Calls visit(tensor, box, checksum) for every distinct box.
  template <class Visit>
  void for_each(Visit visit) const {
    for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor)
      for (const auto& [box, checksum] : tensors_[tensor].parts) visit(tensor, box, checksum);
  }

 private:
  struct Tensor {
    std::unordered_map<Box, Checksum, BoxHash> parts;
    Checksum total;
    uint64_t elements = 0;
  };
  std::vector<Tensor> tensors_;
};

/// Threads: any; calls run at the same time and share the threads of one team.
class Executor {
 public:
  Executor(unsigned threads, std::unique_ptr<Transport> transport);

  Transport& transport() { return *transport_; }
  ThreadTeam& team() { return team_; }

  struct Target {
    const ImageLayout* layout;
    const GatherProgram* program;
  };
  /// Writes the targets as new images, published in the order given. Each window is gathered into a
  /// buffer that stays in the cache, its arrays' checksums are added to `ledger` there, and it goes
  /// to its place past the caches: memory sees one read and one write a byte. `bytes_done` grows as
  /// bytes are written. Errors: also those of ImageStore::create(). On an error or cancellation no
  /// image stays behind. Peak memory: the images. What goes into a device's memory is gathered in
  /// the host's all the same; fetch_images() does it without.
  Result<std::vector<ImageRef>> materialise(ImageStore& images, const std::vector<Target>& targets,
                                            const SummedTensors& tensors, ChecksumLedger& ledger,
                                            std::atomic<uint64_t>& bytes_done,
                                            std::stop_token stop);

  struct StoredArrays {
    const ImageLayout* layout;
    const Image* image;
  };
  /// Sums every array of the images, wherever they lie, and adds the checksums of its pieces to
  /// `ledger`. Those in the memory of a device of this node are summed there.
  Result<> hash_images(const std::vector<StoredArrays>& images, const SummedTensors& tensors,
                       ChecksumLedger& ledger, std::stop_token stop);

 private:
  std::unique_ptr<Transport> transport_;
  ThreadTeam team_;
};

/// kCorrupt, naming up to three tensors, unless ledger totals equal the tensors' checksums. `name`
/// gives a tensor's name for the message.
Result<> compare_checksums(const ChecksumLedger& ledger, const std::vector<TensorFacts>& tensors,
                           const std::function<std::string(uint32_t)>& name);
/// The same of those tensors of which the ledger has every element.
Result<> compare_whole_tensors(const ChecksumLedger& ledger,
                               const std::vector<TensorFacts>& tensors,
                               const std::function<std::string(uint32_t)>& name);

}  // namespace ptc
