#include "reshard/checkpoint/planned_file.h"

#include <algorithm>
#include <utility>

namespace ptc {

bool all_are_here(const StoredState& stored) {
  return !stored.images.empty() &&
         std::all_of(stored.images.begin(), stored.images.end(), [](const StoredImage& one) {
           return one.image != nullptr && one.image->is_here();
         });
}

namespace {

/// A file that ranks wrote has its arrays in the order of their names there, wherever they lie.
ImageLayout in_order(ImageLayout layout) {
  const auto before = [](const ArraySlot& a, const ArraySlot& b) {
    return a.byte_offset < b.byte_offset;
  };
  if (std::is_sorted(layout.arrays.begin(), layout.arrays.end(), before)) return layout;
  std::vector<ArraySlot> arrays(layout.arrays.begin(), layout.arrays.end());
  sort_arrays(arrays);
  layout.arrays = std::move(arrays);
  return layout;
}

}  // namespace

PlannedFile::PlannedFile(ImageLayout layout, std::shared_ptr<const StoredState> stored,
                         size_t arrays_of_piece)
    : layout_(in_order(std::move(layout))), stored_(std::move(stored)) {
  const SourceIndex& index = stored_->index();
  pieces_.push_back({0, 0});
  uint64_t end = 0;  // of all arrays so far: another name, or padding, lies in one before it
  for (size_t i = 0; i < layout_.arrays.size(); ++i) {
    const ArraySlot& slot = layout_.arrays[i];
    const bool begins = pieces_.size() == 1 || i - pieces_.back().first_array >= arrays_of_piece;
    if (begins && slot.byte_offset >= end && slot.byte_offset > pieces_.back().begin)
      pieces_.push_back({slot.byte_offset, i});
    const uint64_t bits =
        Box::whole(slot.part->local_shape).volume() * index.element_bits(slot.tensor);
    end = std::max(end, slot.byte_offset + bits / 8);
  }
  MutexLock lock(mutex_);
  programs_.resize(pieces_.size());
}

size_t PlannedFile::piece_at(uint64_t offset) const {
  const auto behind =
      std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                       [](uint64_t at, const Piece& piece) { return at < piece.begin; });
  return static_cast<size_t>(behind - pieces_.begin()) - 1;
}

Result<GatherProgram> PlannedFile::plan(uint64_t begin, uint64_t end, size_t first,
                                        size_t last) const {
  ImageLayout part;
  part.node = stored_->here;
  std::vector<ArraySlot> arrays(layout_.arrays.begin() + first, layout_.arrays.begin() + last);
  for (ArraySlot& slot : arrays) slot.byte_offset -= begin;
  part.arrays = std::move(arrays);
  PTC_TRY(auto transfers, stored_->index().plan_image(part));
  return GatherProgram(layout_.literals.within(begin, end), end - begin, std::move(transfers),
                       stored_->image_refs());
}

Result<std::shared_ptr<const GatherProgram>> PlannedFile::piece(size_t number) const {
  const Piece& piece = pieces_[number];
  {
    MutexLock lock(mutex_);
    if (programs_[number] != nullptr) return programs_[number];
  }
  const bool is_last = number + 1 == pieces_.size();
  PTC_TRY(auto planned,
          plan(piece.begin, is_last ? layout_.bytes : pieces_[number + 1].begin, piece.first_array,
               is_last ? layout_.arrays.size() : pieces_[number + 1].first_array));
  auto program = std::make_shared<const GatherProgram>(std::move(planned));
  MutexLock lock(mutex_);
  return programs_[number] = std::move(program);
}

const GatherProgram* PlannedFile::whole() const {
  {
    MutexLock lock(mutex_);
    if (whole_ != nullptr) return whole_.get();
  }
  auto planned = plan(0, layout_.bytes, 0, layout_.arrays.size());
  if (planned.has_error()) return nullptr;
  MutexLock lock(mutex_);
  if (whole_ == nullptr) whole_ = std::make_unique<const GatherProgram>(std::move(planned).value());
  return whole_.get();
}

}  // namespace ptc
