// Checksums of the tensors in one image, added up window by window while its bytes pass by.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/plan/planner.h"
#include "store/base/error.h"
#include "store/tensor/checksum.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

/// Cost: each byte once, in whatever order and by whatever thread; O(log pieces) a window.
class ImageSums {
 public:
  /// `layout` outlives the sums; `tensors` are those that its arrays number. kCorrupt when an array
  /// reaches beyond the image's bytes.
  static Result<ImageSums> make(const ImageLayout& layout, const std::vector<TensorFacts>& tensors);

  /// Adds what lies in `window`, the image's bytes from `offset` on. Threads: any, at the same time;
  /// each byte of the image once.
  void add(uint64_t offset, std::span<const std::byte> window);

  /// Adds each piece's sum to the ledger, once all of the image has been added.
  Result<> give_to(ChecksumLedger& ledger) const;

  /// Whether what belongs to no piece, padding, is zero from `begin` on. `image` is all of its bytes. Cost: where
  /// there is any, each byte twice.
  bool padding_is_zero(std::span<const std::byte> image, uint64_t begin) const;

 private:
  struct PieceSum {
    uint32_t tensor;
    const Piece* piece;
    StridedCopy from_logical;  // from the whole tensor in C order to the image
    uint64_t end_so_far;       // greatest end in the image of this piece and those before it
    std::atomic<uint64_t> lane[2] = {0, 0};

    PieceSum(uint32_t number, const Piece* of, const StridedCopy& copy)
        : tensor(number), piece(of), from_logical(copy), end_so_far(copy.target_end()) {}
    PieceSum(PieceSum&& other) noexcept
        : tensor(other.tensor), piece(other.piece), from_logical(other.from_logical),
          end_so_far(other.end_so_far) {}  // only before anything is added
    PieceSum& operator=(PieceSum&& other) noexcept {
      tensor = other.tensor, piece = other.piece, from_logical = other.from_logical;
      end_so_far = other.end_so_far;
      return *this;
    }
  };
  std::vector<PieceSum> pieces_;  // by target offset
};

}  // namespace ptc
