#include "store/tensor/shared_part.h"

namespace ptc {

SharedPart DistinctParts::one_of(SubTensor part) {
  size_t hash = BoxHash{}(Box::whole(part.local_shape)) + (part.flat ? part.flat->begin : 0);
  for (const Piece& piece : part.pieces) hash = hash * 31 + BoxHash{}(piece.global);
  const auto [begin, end] = parts_.equal_range(hash);
  for (auto known = begin; known != end; ++known)
    if (*known->second == part) return known->second;
  return parts_.emplace(hash, std::move(part))->second;
}

}  // namespace ptc
