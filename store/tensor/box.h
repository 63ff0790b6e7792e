// Shapes and boxes in elements. A Box is half-open: [offset, offset + extent) on every axis.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// Most axes a tensor may have.
inline constexpr size_t kMaxAxes = 8;

/// A short list of element counts, held in place: a shape, an offset or an extent.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<uint64_t> values);
  explicit Dims(size_t size, uint64_t value = 0);

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  uint64_t operator[](size_t axis) const { return values_[axis]; }
  uint64_t& operator[](size_t axis) { return values_[axis]; }
  void push_back(uint64_t value);
  const uint64_t* begin() const { return values_.data(); }
  const uint64_t* end() const { return values_.data() + size_; }
  friend bool operator==(const Dims& a, const Dims& b);

  /// "[4, 8]"
  std::string to_string() const;

 private:
  std::array<uint64_t, kMaxAxes> values_{};
  uint8_t size_ = 0;
};
using Shape = Dims;

/// Product of all counts; 1 for a scalar. Overflow is kInvalidArgument, also of the counts beside
/// a zero.
Result<uint64_t> num_elements(const Shape& shape);
/// Bits of an array. Overflow is kInvalidArgument.
Result<uint64_t> num_bits(const Shape& shape, uint32_t element_bits);

struct Box {
  Dims offset;
  Dims extent;

  static Box whole(const Shape& shape);
  size_t axes() const { return extent.size(); }
  bool empty() const;
  uint64_t volume() const;  // elements; the caller has checked num_elements of the tensor
  friend bool operator==(const Box&, const Box&) = default;
  std::string to_string() const;  // "[0:4, 8:16]"
};

struct BoxHash {
  size_t operator()(const Box& box) const;
};

/// The common part, or nullopt when there is none. Same number of axes required.
std::optional<Box> intersect(const Box& a, const Box& b);

/// What is left of `from` without `hole`, as at most 2·axes disjoint boxes.
std::vector<Box> subtract(const Box& from, const Box& hole);

/// The elements [begin, end) of a C-order array of this shape, as at most 2·axes − 1 disjoint boxes
/// in growing order.
std::vector<Box> boxes_of_run(const Shape& shape, uint64_t begin, uint64_t end);

/// A box of a global tensor and where it lies in a local one: same extent, other offset.
struct Piece {
  Box global;
  Dims local_offset;
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// What one rank holds of a tensor: a local C-order array, and where its parts are in the global
/// tensor. Pieces are disjoint in both. Elements of the local array that no piece covers are
/// padding and hold zero.
struct SubTensor {
  /// Of a flat cut: a C-order array of shape `of` is cut as one row of elements, and the local
  /// array is its elements from number `begin` on, of one axis or of others than `of` has. The
  /// pieces' local offsets are in `of`.
  struct Flat {
    Shape of;
    uint64_t begin = 0;
    friend bool operator==(const Flat&, const Flat&) = default;
  };
  Shape local_shape;
  std::vector<Piece> pieces;
  std::optional<Flat> flat = std::nullopt;
  friend bool operator==(const SubTensor&, const SubTensor&) = default;

  static SubTensor whole(const Shape& shape);
};

}  // namespace ptc
