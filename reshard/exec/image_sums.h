// Checksums of the tensors in one image, added up window by window while its bytes pass by.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
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
  /// `layout` and `tensors.cuts` outlive the sums. kCorrupt when an array reaches beyond the
  /// image's bytes.
  static Result<ImageSums> make(const ImageLayout& layout, const SummedTensors& tensors);

  /// Adds what lies in `window`, the image's bytes from `offset` on. Threads: any, at the same
  /// time; each byte of the image once.
  void add(uint64_t offset, std::span<const std::byte> window);

  /// Adds all of an image in the memory of a device of this node, summed there; what has very short
  /// runs is read, some MiB at a time.
  Result<> add_on_device(const Image& image, std::stop_token stop);

  /// Adds each piece's sum to the ledger, once all of the image has been added.
  Result<> give_to(ChecksumLedger& ledger) const;

  /// Calls visit(tensor, box, begin, end, sum) for every piece, or part of one that is cut: it lies
  /// within the image's bytes [begin, end), and `sum` is of what has been added of it.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const PieceSum& piece : pieces_)
      visit(piece.tensor, *piece.box, piece.from_logical.target_offset,
            piece.from_logical.target_end(),
            Checksum{{piece.lane[0].load(), piece.lane[1].load()}});
  }

  /// The checksum of what lies in `window` and is neither a literal nor of a piece. Zeros count
  /// nothing: over all of the image it adds up to Checksum() where all padding is zero. Cost: where
  /// there is any, each byte twice.
  Checksum beside(uint64_t offset, std::span<const std::byte> window) const;

  /// Whether that, padding, is zero in all of an image. Cost: where there is any, each byte twice.
  bool padding_is_zero(std::span<const std::byte> image) const;
  /// The same of one in the memory of a device of this node, which sums it.
  Result<bool> padding_is_zero_on_device(const Image& image) const;

 private:
  struct PieceSum {
    uint32_t tensor;
    const Box* box;
    StridedCopy from_logical;  // from the whole tensor in C order to the image
    uint64_t end_so_far;       // greatest end in the image of this piece and those before it
    bool other_name;           // its bytes are those of a piece of another tensor, too
    std::atomic<uint64_t> lane[2] = {0, 0};

    PieceSum(uint32_t number, const Box* of, const StridedCopy& copy, bool is_other_name)
        : tensor(number),
          box(of),
          from_logical(copy),
          end_so_far(copy.target_end()),
          other_name(is_other_name) {}
    PieceSum(PieceSum&& other) noexcept
        : tensor(other.tensor),
          box(other.box),
          from_logical(other.from_logical),
          end_so_far(other.end_so_far),
          other_name(other.other_name) {}  // only before anything is added
    PieceSum& operator=(PieceSum&& other) noexcept {
      tensor = other.tensor, box = other.box, from_logical = other.from_logical;
      end_so_far = other.end_so_far, other_name = other.other_name;
      return *this;
    }
  };
  static void add_to(PieceSum& piece, const Checksum& sum);

  std::vector<PieceSum> pieces_;  // by target offset
  Literals literals_;
  bool padded_ = false;
};

}  // namespace ptc
