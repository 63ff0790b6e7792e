// What the stored images of a checkpoint really contain, and which of them are damaged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/checkpoint/known_damage.h"
#include "reshard/plan/common_cuts.h"
#include "store/base/error.h"
#include "store/base/json.h"

namespace ptc {

/// What was read of one image.
struct ImageContent {
  uint32_t image = 0;   // of StoredState::images
  std::string problem;  // why it could not be read; empty: the rest holds
  struct Sum {
    uint32_t tensor;
    Box box;
    Checksum sum;
  };
  std::vector<Sum> sums;          // of the pieces of tensors in it, cut as those of the others
  std::optional<Checksum> whole;  // of a file without tensors
};

/// By which all copies of a tensor can be compared.
CommonCuts cuts_of(const StoredState& stored);
/// As nodes send them to each other: those that an image in `images` is cut by. Throws, as
/// Boost.JSON does, what the accessors of a value of another kind throw.
json::value to_json(const CommonCuts& cuts, const StoredState& stored,
                    const std::vector<uint32_t>& images);
CommonCuts cuts_from(const json::value& value);

/// As nodes send it to each other. kCorrupt: it is damaged.
std::string to_text(const std::vector<ImageContent>& contents);
Result<std::vector<ImageContent>> contents_from(std::string_view text);

/// A damaged image, and how its bytes would be right.
struct DamagedImage {
  uint32_t image = 0;
  bool all = false;  // it is not known which of its bytes are wrong: `right` has all of its pieces
  /// What pieces of tensors that are damaged should sum up to, by the boxes they are cut into.
  std::vector<ImageContent::Sum> right;
};
json::value to_json(const std::vector<DamagedImage>& images);
Result<std::vector<DamagedImage>> damaged_images_from(const json::value& value);

struct Findings {
  uint64_t images = 0, bytes = 0;  // that were read
  std::vector<std::string> away;   // nodes that hold copies, and were not within reach
  std::vector<uint32_t>
      replaceable;  // damaged images; all in them is also held by images that are not
  std::vector<DamagedImage> damaged;  // these
  std::vector<std::string> replaced;  // what is wrong with each of these
  std::vector<std::string> beyond;    // what is wrong and held nowhere else
  KnownDamage not_right;              // of what nothing within reach is right
  bool good() const { return replaceable.empty() && beyond.empty(); }
  std::string message() const;
};

/// Of `stored`, of which `contents` was read, cut by cuts_of(): all images within reach. Cost:
/// O(pieces of tensors), but where many copies of one tensor differ.
Result<Findings> find_damage(const Checkpoint& checkpoint, const StoredState& stored,
                             std::vector<ImageContent> contents);

/// The images that stay when those with these numbers (ascending) go.
std::vector<StoredImage> images_without(const StoredState& stored,
                                        const std::vector<uint32_t>& numbers);

}  // namespace ptc
