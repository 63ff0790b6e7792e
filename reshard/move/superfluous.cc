#include "reshard/move/superfluous.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <unordered_map>

#include "reshard/exec/executor.h"

namespace ptc {
namespace {

class Superfluous {
 public:
  Superfluous(const Checkpoint& checkpoint, const StoredState& stored, const WantedState& wanted,
              const std::vector<StateFile>& placed)
      : files_(checkpoint.manifest().files),
        element_bits_(checkpoint.manifest().element_bits()),
        stored_(stored),
        wanted_(wanted),
        placed_(placed),
        stays_(stored.images.size()) {
    for (const std::string& node : stored.nodes)
      in_service_.push_back(is_among(wanted.alive, node));
  }

  std::vector<uint32_t> find() {
    keep_other_files();
    // What is no file as it is wanted (one of a set, written by ranks) is kept for what is in it.
    std::vector<const StateFile*> not_exact;
    for (const StateFile& file : placed_)
      if (!keep_exact(file)) not_exact.push_back(&file);
    keep_parts(not_exact, /*of_its_state=*/true);
    if (going().empty()) return {};
    if (all_is_there()) return going();
    // Another state's file stands for one, as where all tensor-parallel ranks have the same.
    keep_parts(not_exact, /*of_its_state=*/false);
    return all_is_there() ? going() : std::vector<uint32_t>();
  }

 private:
  bool is_other_file(uint32_t image) const {
    const int32_t written = stored_.images[image].written;
    return written >= 0 && !files_[written].has_tensors;
  }
  bool is_in_service(uint32_t image) const {
    return stored_.images[image].image != nullptr && in_service_[stored_.layouts()[image].node];
  }
  static bool are_in_one_memory(const ImageLayout& a, const ImageLayout& b) {
    return a.node == b.node && a.memory == b.memory;
  }

  bool keep_exact(const StateFile& file) {
    const std::vector<StoredImage>& images = stored_.images;  // sorted by state and path
    const auto first = std::partition_point(images.begin(), images.end(), [&](const auto& one) {
      return std::tie(one.state, one.path) < std::tie(file.owner, file.path);
    });
    for (uint32_t i = first - images.begin();
         i < images.size() && images[i].state == file.owner && images[i].path == file.path; ++i) {
      const ImageLayout& held = stored_.layouts()[i];
      if (!are_in_one_memory(held, file.layout) || !is_in_service(i) || is_other_file(i) ||
          held.arrays != file.layout.arrays)
        continue;
      stays_[i] = true;
      return true;
    }
    return false;
  }

  /// All images that hold some of one of the files, in its memory.
  void keep_parts(const std::vector<const StateFile*>& files, bool of_its_state) {
    std::vector<ImageLayout> layouts;
    for (const StateFile* file : files) layouts.push_back(file->layout);
    const SourceIndex index(layouts, element_bits_);
    for (uint32_t i = 0; i < stored_.images.size(); ++i) {
      if (stays_[i] || !is_in_service(i) || is_other_file(i)) continue;
      const ImageLayout& held = stored_.layouts()[i];
      auto is_for = [&](const SourceIndex::Member& member) {
        return layouts[member.image].memory == held.memory &&
               (!of_its_state || files[member.image]->owner == stored_.images[i].state);
      };
      for (const ArraySlot& slot : held.arrays)
        for (const Piece& piece : slot.part->pieces) {
          if (stays_[i] || piece.global.empty()) continue;
          index.for_each_overlapping(slot.tensor, piece.global,
                                     [&](const SourceIndex::Held& wanted, const Box&) {
                                       const auto here = index.members_on(wanted.set, held.node);
                                       if (!stays_[i])
                                         stays_[i] = std::any_of(here.begin(), here.end(), is_for);
                                     });
        }
    }
  }

  /// Of each as many as are wanted: on the node of the rank that wrote it, if that has one, and
  /// then in the order of nodes.
  void keep_other_files() {
    const size_t wanted = std::min<size_t>(wanted_.replicas + size_t{1}, wanted_.alive.size());
    std::map<int32_t, std::vector<uint32_t>> copies;  // by written file
    for (uint32_t i = 0; i < stored_.images.size(); ++i)
      if (is_other_file(i) && is_in_service(i)) copies[stored_.images[i].written].push_back(i);
    for (auto& [written, images] : copies) {
      const uint64_t rank = files_[written].rank;
      const std::vector<MemoryPlace>& placed = wanted_.placement.place_of_rank;
      if (rank < placed.size())
        std::stable_partition(images.begin(), images.end(), [&](uint32_t image) {
          return stored_.images[image].node == placed[rank].node;
        });
      std::set<std::string> on;
      for (const uint32_t image : images)
        if (on.size() < wanted && on.insert(stored_.images[image].node).second)
          stays_[image] = true;
      too_few_ = too_few_ || on.size() < wanted;
    }
  }

  /// What is on nodes that are not in service is nobody's to remove here.
  std::vector<uint32_t> going() const {
    std::vector<uint32_t> images;
    for (uint32_t i = 0; i < stored_.images.size(); ++i)
      if (!stays_[i] && is_in_service(i)) images.push_back(i);
    return images;
  }

  bool all_is_there() const {
    if (too_few_) return false;
    std::vector<ImageLayout> left = stored_.layouts();
    for (uint32_t i = 0; i < left.size(); ++i)
      if (!stays_[i]) left[i].arrays.clear();
    const SourceIndex index(left, element_bits_);
    for (const StateFile& file : placed_)
      for (const ArraySlot& slot : file.layout.arrays)
        for (const Piece& piece : slot.part->pieces)
          if (index.missing_in_memory(slot.tensor, file.layout.node, file.layout.memory,
                                      {piece.global}) > 0)
            return false;
    return true;
  }

  const std::vector<WrittenFile>& files_;
  const std::vector<uint8_t> element_bits_;
  const StoredState& stored_;
  const WantedState& wanted_;
  const std::vector<StateFile>& placed_;
  std::vector<bool> in_service_;  // by node
  std::vector<bool> stays_;       // by image
  bool too_few_ = false;          // copies of some file without tensors
};

struct Touched {
  std::vector<bool> tensors;
  std::set<int32_t> files;  // without tensors
};

Touched touched_by(const Checkpoint& checkpoint, const StoredState& stored,
                   const std::vector<uint32_t>& images) {
  Touched touched{std::vector<bool>(checkpoint.tensor_facts().size()), {}};
  for (const uint32_t image : images) {
    const int32_t written = stored.images[image].written;
    if (written >= 0 && !checkpoint.manifest().files[written].has_tensors)
      touched.files.insert(written);
    for (const ArraySlot& slot : stored.layouts()[image].arrays)
      touched.tensors[slot.tensor] = true;
  }
  return touched;
}

}  // namespace

std::vector<uint32_t> superfluous_images(const Checkpoint& checkpoint, const StoredState& stored,
                                         const WantedState& wanted,
                                         const std::vector<StateFile>& placed) {
  return Superfluous(checkpoint, stored, wanted, placed).find();
}

std::map<std::string, std::vector<uint32_t>> copies_beside(const Checkpoint& checkpoint,
                                                           const StoredState& stored,
                                                           const std::vector<uint32_t>& going) {
  const Touched touched = touched_by(checkpoint, stored, going);
  std::map<std::string, std::vector<uint32_t>> beside;
  for (uint32_t i = 0; i < stored.images.size(); ++i) {
    const StoredImage& image = stored.images[i];
    if (image.image == nullptr || std::binary_search(going.begin(), going.end(), i)) continue;
    const SharedVector<ArraySlot>& arrays = stored.layouts()[i].arrays;
    if (touched.files.contains(image.written) ||
        std::any_of(arrays.begin(), arrays.end(),
                    [&](const ArraySlot& slot) { return touched.tensors[slot.tensor]; }))
      beside[image.node].push_back(i);
  }
  return beside;
}

bool are_good(const Checkpoint& checkpoint, const StoredState& stored,
              const std::vector<uint32_t>& going, const std::vector<ImageContent>& contents) {
  const Touched touched = touched_by(checkpoint, stored, going);
  const std::vector<TensorFacts>& facts = checkpoint.tensor_facts();
  std::set<uint32_t> to_read;
  for (const auto& [node, images] : copies_beside(checkpoint, stored, going))
    to_read.insert(images.begin(), images.end());
  std::vector<std::unordered_map<Box, Checksum, BoxHash>> boxes(facts.size());
  std::set<int32_t> files;
  for (const ImageContent& content : contents) {
    if (!content.problem.empty() || to_read.erase(content.image) == 0) return false;
    const int32_t written = stored.images[content.image].written;
    if (touched.files.contains(written)) {
      if (content.whole != checkpoint.manifest().files[written].checksum) return false;
      files.insert(written);
    }
    for (const auto& [tensor, box, sum] : content.sums) {
      if (tensor >= facts.size()) return false;
      const auto [known, is_new] = boxes[tensor].emplace(box, sum);
      if (!is_new && !(known->second == sum)) return false;  // two copies differ
    }
  }
  if (!to_read.empty() || files != touched.files) return false;
  for (uint32_t tensor = 0; tensor < facts.size(); ++tensor) {
    if (!touched.tensors[tensor]) continue;
    const auto elements = num_elements(facts[tensor].shape);
    uint64_t seen = 0;
    Checksum sum;
    for (const auto& [box, of_box] : boxes[tensor]) {
      seen += box.volume();
      sum += of_box;
    }
    if (elements.has_error() || seen != elements.value() || !(sum == facts[tensor].checksum))
      return false;
  }
  return true;
}

}  // namespace ptc
