// A pickle as a torch file: in an archive with storages "0" to "15", the k-th of 16·(k + 1) bytes.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "fuzz.h"
#include "store/codec/zip.h"

namespace ptc::fuzz {

/// The tensors' bytes are not there, and nobody may want them; or they are zero.
struct TorchArchive {
  explicit TorchArchive(std::string_view pickle, bool has_tensors = false)
      : has_tensors(has_tensors) {
    ZipWriter writer;
    writer.add("a/data.pkl", pickle);
    for (int i = 0; i < 16; ++i) writer.add_later("a/data/" + std::to_string(i), 16 * (i + 1), 0);
    layout = std::move(writer).finish();
  }
  ReadAt read() const {
    return [this](uint64_t offset, std::span<std::byte> into) -> Result<> {
      for (const ZipWriter::Piece& piece : layout.pieces) {
        if (offset < piece.offset || offset + into.size() > piece.offset + piece.bytes.size())
          continue;
        std::copy_n(
            reinterpret_cast<const std::byte*>(piece.bytes.data()) + (offset - piece.offset),
            into.size(), into.data());
        return ok();
      }
      // The first bytes are read before it is known how long what they tell of is.
      if (has_tensors && offset > 0) {
        PTC_CHECK(offset + into.size() <= layout.file_bytes);
        std::ranges::fill(into, std::byte{0});
        return ok();
      }
      PTC_CHECK(offset == 0);
      std::copy_n(reinterpret_cast<const std::byte*>(layout.pieces[0].bytes.data()),
                  std::min(into.size(), layout.pieces[0].bytes.size()), into.data());
      return ok();
    };
  }
  ZipWriter::Layout layout;
  const bool has_tensors;
};

}  // namespace ptc::fuzz
