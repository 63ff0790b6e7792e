// Bytes of a file that are no tensor's: a header in front, or also pieces between and behind
// tensors, as in a zip archive.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ptc {

/// Immutable; a copy is cheap, for it shares the bytes. Threads: any.
class Literals {
 public:
  struct Piece {
    uint64_t offset = 0;  // in the file
    std::string bytes;
    uint64_t end() const { return offset + bytes.size(); }
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  Literals() = default;
  Literals(const char* header) : Literals(std::string(header)) {}
  /// The bytes from 0 on.
  Literals(std::string header) {
    if (header.empty()) return;
    std::vector<Piece> pieces(1);
    pieces.front().bytes = std::move(header);
    pieces_ = std::make_shared<const std::vector<Piece>>(std::move(pieces));
  }
  /// Not empty ones, by offset and apart from each other.
  explicit Literals(std::vector<Piece> pieces)
      : pieces_(std::make_shared<const std::vector<Piece>>(std::move(pieces))) {}

  const std::vector<Piece>& pieces() const {
    static const std::vector<Piece> none;
    return pieces_ != nullptr ? *pieces_ : none;
  }
  /// Of all pieces together.
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const Piece& piece : pieces()) sum += piece.bytes.size();
    return sum;
  }
  /// The bytes from 0 on, up to the first that is not here.
  std::string_view header() const {
    const bool in_front = !pieces().empty() && pieces().front().offset == 0;
    return in_front ? std::string_view(pieces().front().bytes) : std::string_view();
  }

  /// visit(offset in the file, bytes) with what lies in [begin, end), in order.
  template <class Visit>
  void for_each(uint64_t begin, uint64_t end, Visit visit) const {
    const std::vector<Piece>& all = pieces();
    auto piece = std::partition_point(all.begin(), all.end(),
                                      [&](const Piece& one) { return one.end() <= begin; });
    for (; piece != all.end() && piece->offset < end; ++piece) {
      const uint64_t from = std::max(begin, piece->offset), to = std::min(end, piece->end());
      visit(from, std::string_view(piece->bytes).substr(from - piece->offset, to - from));
    }
  }

  /// What lies in [begin, end) of the file, as a file of its own. All that there is it shares.
  Literals within(uint64_t begin, uint64_t end) const {
    if (pieces().empty() || (begin == 0 && pieces().back().end() <= end)) return *this;
    std::vector<Piece> part;
    for_each(begin, end, [&](uint64_t offset, std::string_view bytes) {
      part.push_back({offset - begin, std::string(bytes)});
    });
    return Literals(std::move(part));
  }

  friend bool operator==(const Literals& a, const Literals& b) {
    return a.pieces_ == b.pieces_ || a.pieces() == b.pieces();
  }

 private:
  std::shared_ptr<const std::vector<Piece>> pieces_;
};

}  // namespace ptc
