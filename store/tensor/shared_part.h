// A part of a tensor that many arrays have in common: experts that are cut alike, ranks' states.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/tensor/box.h"

namespace ptc {

/// A SubTensor that does not change; a copy shares it, and who shares it is found equal at once.
/// Threads: any.
class SharedPart {
 public:
  SharedPart() = default;  // an empty one
  SharedPart(SubTensor part) : part_(std::make_shared<const SubTensor>(std::move(part))) {}
  SharedPart(Shape local_shape, std::vector<Piece> pieces)
      : SharedPart(SubTensor{std::move(local_shape), std::move(pieces)}) {}

  const SubTensor& operator*() const {
    static const SubTensor empty;
    return part_ != nullptr ? *part_ : empty;
  }
  const SubTensor* operator->() const { return &**this; }
  operator const SubTensor&() const { return **this; }

  friend bool operator==(const SharedPart& a, const SharedPart& b) {
    return a.part_ == b.part_ || *a == *b;
  }

 private:
  std::shared_ptr<const SubTensor> part_;
};

/// Of equal parts keeps one, which all share. Threads: one.
class DistinctParts {
 public:
  SharedPart one_of(SubTensor part);

 private:
  std::unordered_multimap<size_t, SharedPart> parts_;  // by hash
};

}  // namespace ptc
