// A file that is gathered out of images on this node, planned piece by piece as it is read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/checkpoint/manifest.h"
#include "reshard/exec/gather.h"
#include "reshard/plan/source_index.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/transport/transport.h"

namespace ptc {

/// Whether all images of a state are here: then each byte of the checkpoint is, and a file of it
/// can be opened before it is known where its bytes lie.
bool all_are_here(const StoredState& stored);

/// The bytes of one file. What is in front of its tensors, which is all that many look at, needs no
/// plan. Threads: any; two that come to the same piece at the same time may both plan it.
class PlannedFile {
 public:
  /// To plan a piece takes some 0.1 ms, and of very small tensors not much more memory than they.
  static constexpr size_t kArraysOfPiece = 512;
  /// `stored`: all_are_here().
  PlannedFile(ImageLayout layout, std::shared_ptr<const StoredState> stored,
              size_t arrays_of_piece = kArraysOfPiece);

  uint64_t bytes() const { return layout_.bytes; }
  /// visit(program, offset in it, part of `out`) for what lies in the window, in order; its first
  /// error is returned. kCorrupt: some bytes are nowhere.
  template <class Visit>
  Result<> for_each_piece(uint64_t offset, std::span<std::byte> out, Visit visit) const {
    for (size_t i = piece_at(offset); !out.empty(); ++i) {
      PTC_TRY(const std::shared_ptr<const GatherProgram> program, piece(i));
      const uint64_t in_piece = offset - pieces_[i].begin;
      const auto part = out.first(std::min<uint64_t>(out.size(), program->bytes() - in_piece));
      PTC_TRY(visit(*program, in_piece, part));
      offset += part.size();
      out = out.subspan(part.size());
    }
    return ok();
  }
  /// All of it as one program, made when it is first asked for; null: some bytes are nowhere.
  const GatherProgram* whole() const;

 private:
  struct Piece {
    uint64_t begin = 0;      // in the file
    size_t first_array = 0;  // of layout_
  };
  size_t piece_at(uint64_t offset) const;
  Result<std::shared_ptr<const GatherProgram>> piece(size_t number) const;
  Result<GatherProgram> plan(uint64_t begin, uint64_t end, size_t first, size_t last) const;

  const ImageLayout layout_;  // its arrays by offset
  const std::shared_ptr<const StoredState> stored_;
  std::vector<Piece> pieces_;  // by begin; no array lies in two
  mutable Mutex mutex_;
  /// By piece; null: not planned yet.
  mutable std::vector<std::shared_ptr<const GatherProgram>> programs_ PTC_GUARDED_BY(mutex_);
  mutable std::unique_ptr<const GatherProgram> whole_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
