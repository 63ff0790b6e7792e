#include "reshard/checkpoint/byte_sources.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <memory>
#include <optional>
#include <unordered_map>
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
    if (const auto known = places_.find(image.get()); known != places_.end()) return known->second;
    const auto found = index_.find(image.get());
    if (found == index_.end() || !image->is_here() || !image->has_host_bytes()) return std::nullopt;
    const StoredImage& stored = stored_->images[found->second];
    if (stored.path.empty()) return std::nullopt;
    const LayoutSpec& spec = stored_->spec;
    const StateCoords state = state_at(spec, stored.state);
    const uint64_t rank = spec.order.global_rank(
        spec.sizes, RankCoords{.tp = state.tp, .pp = state.pp, .dp = state.dp, .ep = state.ep});
    paths_.emplace_back(fmt::format("layouts/{}/rank/{}/{}", spec.name(), rank, stored.path));
    return places_[image.get()] = paths_.size() - 1;
  }
  json::array paths() && { return std::move(paths_); }

 private:
  const std::shared_ptr<const StoredState> stored_;
  std::unordered_map<const Image*, size_t> index_;
  std::unordered_map<const Image*, uint64_t> places_;
  json::array paths_;
};

/// Of a copy of which all is wanted, or one run of it.
std::optional<json::array> described(const Transfer& transfer, uint64_t source) {
  StridedCopy copy = transfer.copy;
  if (transfer.begin > copy.target_offset || transfer.end < copy.target_end()) {
    if (copy.level_count > 0) return std::nullopt;
    const uint64_t from = std::max(transfer.begin, copy.target_offset);
    const uint64_t to = std::min(transfer.end, copy.target_offset + copy.run_bytes);
    copy.source_offset += from - copy.target_offset;
    copy.target_offset = from;
    copy.run_bytes = to - from;
  }
  json::array text{source, copy.source_offset, copy.target_offset, copy.run_bytes};
  for (uint32_t level = 0; level < copy.level_count; ++level) {
    const StridedCopy::Level& one = copy.levels[level];
    for (uint64_t number : {one.count, one.source_stride, one.target_stride})
      text.emplace_back(number);
  }
  return text;
}

std::optional<json::object> described(const GatherProgram& program, Sources& sources) {
  const std::string_view header = program.literals().header();
  if (header.size() < kLengthBytes || program.literals().bytes() != header.size())
    return std::nullopt;
  json::array copies;
  copies.reserve(program.transfers().size());
  for (const Transfer& transfer : program.transfers()) {
    const auto source = sources.place_of(program.sources()[transfer.source_image]);
    if (!source) return std::nullopt;
    auto copy = described(transfer, *source);
    if (!copy) return std::nullopt;
    copies.emplace_back(*std::move(copy));
  }
  return json::object{{"bytes", program.bytes()},
                      {"header", header.substr(kLengthBytes)},
                      {"copies", std::move(copies)}};
}

}  // namespace

std::string byte_sources_text(const Checkpoint& checkpoint, const FileSet& files) {
  Sources sources(checkpoint);
  json::object described_files;
  for (size_t i = 0; i < files.entries().size(); ++i) {
    if (!files.entries()[i].path.ends_with(".safetensors")) continue;
    const Result<FileContentRef> content = files.open(i);
    if (content.has_error() || content.value()->program() == nullptr) continue;
    if (auto file = described(*content.value()->program(), sources))
      described_files.emplace(files.entries()[i].path, *std::move(file));
  }
  return json::serialize(
      json::object{{"files", std::move(described_files)}, {"sources", std::move(sources).paths()}});
}

}  // namespace ptc
