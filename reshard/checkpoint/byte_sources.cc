#include "reshard/checkpoint/byte_sources.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <iterator>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "reshard/exec/gather.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kLengthBytes = 8;  // in front of a header

/// The paths of images, each once.
class Sources {
 public:
  explicit Sources(const Checkpoint& checkpoint) : stored_(checkpoint.stored()) {
    for (size_t i = 0; i < stored_->images.size(); ++i)
      if (stored_->images[i].image != nullptr) index_.emplace(stored_->images[i].image.get(), i);
  }

  /// Its place among paths(); nullopt: it is no file of a rank, or not on this node.
  std::optional<uint64_t> place_of(const ImageRef& image) {
    const auto found = index_.find(image.get());
    return found == index_.end() ? std::nullopt : place_of(found->second);
  }
  /// Of one of stored().images.
  std::optional<uint64_t> place_of(size_t number) {
    const StoredImage& stored = stored_->images[number];
    const Image* const image = stored.image.get();
    if (image == nullptr || !image->is_here() || !image->has_host_bytes() || stored.path.empty())
      return std::nullopt;
    if (const auto known = places_.find(image); known != places_.end()) return known->second;
    const LayoutSpec& spec = stored_->spec;
    const uint64_t rank = rank_of(spec, state_at(spec, stored.state));
    paths_.emplace_back(fmt::format("layouts/{}/rank/{}/{}", spec.name(), rank, stored.path));
    return places_[image] = paths_.size() - 1;
  }
  const StoredState& stored() const { return *stored_; }
  json::array paths() && { return std::move(paths_); }

 private:
  const std::shared_ptr<const StoredState> stored_;
  std::unordered_map<const Image*, size_t> index_;
  std::unordered_map<const Image*, uint64_t> places_;
  json::array paths_;
};

// Texts are made as such, for values of JSON take many times as much memory.

/// Of a copy of which all is wanted, or one run of it. False: it is none.
bool describe(const Transfer& transfer, uint64_t source, std::string& text) {
  StridedCopy copy = transfer.copy;
  if (transfer.begin > copy.target_offset || transfer.end < copy.target_end()) {
    if (copy.level_count > 0) return false;
    const uint64_t from = std::max(transfer.begin, copy.target_offset);
    const uint64_t to = std::min(transfer.end, copy.target_offset + copy.run_bytes);
    copy.source_offset += from - copy.target_offset;
    copy.target_offset = from;
    copy.run_bytes = to - from;
  }
  auto out = std::back_inserter(text);
  fmt::format_to(out, "[{},{},{},{}", source, copy.source_offset, copy.target_offset,
                 copy.run_bytes);
  for (uint32_t level = 0; level < copy.level_count; ++level) {
    const StridedCopy::Level& one = copy.levels[level];
    fmt::format_to(out, ",{},{},{}", one.count, one.source_stride, one.target_stride);
  }
  text += ']';
  return true;
}

std::optional<std::string> described(const GatherProgram& program, Sources& sources) {
  const std::string_view header = program.literals().header();
  if (header.size() < kLengthBytes || program.literals().bytes() != header.size())
    return std::nullopt;
  std::string text = fmt::format(R"({{"bytes":{},"header":{},"copies":[)", program.bytes(),
                                 json::serialize(json::string(header.substr(kLengthBytes))));
  for (const Transfer& transfer : program.transfers()) {
    const auto source = sources.place_of(program.sources()[transfer.source_image]);
    if (!source) return std::nullopt;
    if (text.back() == ']') text += ',';
    if (!describe(transfer, *source, text)) return std::nullopt;
  }
  return std::move(text) + "]}";
}

}  // namespace

std::string byte_sources_text(const Checkpoint& checkpoint, const FileSet& files) {
  Sources sources(checkpoint);
  std::string described_files;
  for (size_t i = 0; i < files.entries().size(); ++i) {
    if (!files.entries()[i].path.ends_with(".safetensors")) continue;
    const Result<FileContentRef> content = files.open(i);
    if (content.has_error() || content.value()->program() == nullptr) continue;
    if (const auto file = described(*content.value()->program(), sources))
      described_files += fmt::format("{}{}:{}", described_files.empty() ? "" : ",",
                                     json::serialize(json::string(files.entries()[i].path)), *file);
  }
  return fmt::format(R"({{"files":{{{}}},"sources":{}}})", described_files,
                     json::serialize(std::move(sources).paths()));
}

std::string tensor_sources_text(const Checkpoint& checkpoint) {
  const std::vector<TensorInfo>& infos = checkpoint.model().tensors();
  Sources sources(checkpoint);
  std::vector<std::string> parts(infos.size());
  std::vector<std::unordered_set<Box, BoxHash>> known(infos.size());
  for (size_t i = 0; i < sources.stored().images.size(); ++i) {
    const auto source = sources.place_of(i);
    if (!source) continue;
    for (const ArraySlot& array : sources.stored().layouts()[i].arrays) {
      if (array.tensor >= infos.size()) continue;  // padding that is kept
      if (array.part->flat || dtype_bits(infos[array.tensor].dtype) % 8 != 0) continue;
      for (const Piece& piece : array.part->pieces) {
        if (!known[array.tensor].insert(piece.global).second) continue;
        std::string& text = parts[array.tensor];
        fmt::format_to(std::back_inserter(text), "{}[{},{},[{}],[{}],[{}],[{}]]",
                       text.empty() ? "" : ",", *source, array.byte_offset,
                       fmt::join(array.part->local_shape, ","), fmt::join(piece.local_offset, ","),
                       fmt::join(piece.global.offset, ","), fmt::join(piece.global.extent, ","));
      }
    }
  }
  std::string tensors;
  for (const std::string& of_tensor : parts)
    fmt::format_to(std::back_inserter(tensors), "{}[{}]", tensors.empty() ? "" : ",", of_tensor);
  return fmt::format(R"({{"tensors":[{}],"sources":{}}})", tensors,
                     json::serialize(std::move(sources).paths()));
}

}  // namespace ptc
