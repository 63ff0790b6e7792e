#include "reshard/checkpoint/examine.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "reshard/checkpoint/json_numbers.h"

namespace ptc {
namespace {

constexpr size_t kMaxChoices = 1 << 12;  // ways to put a tensor together that are tried

/// The copies of one piece of a tensor: what their checksums are, and who has it so.
struct Copies {
  std::vector<std::pair<Checksum, std::vector<uint32_t>>> versions;

  void add(const Checksum& sum, uint32_t image) {
    for (auto& [known, images] : versions)
      if (known == sum) return images.push_back(image);
    versions.push_back({sum, {image}});
  }
};
using Pieces = std::unordered_map<Box, Copies, BoxHash>;

/// Of each piece the versions that may be right.
using Options = std::vector<std::vector<size_t>>;

/// The one choice that gives the tensor its checksum; empty: none does, several do, or there are
/// too many to try.
std::vector<size_t> only_choice(const std::vector<const Copies*>& pieces, const Options& options,
                                const Checksum& expected) {
  size_t choices = 1;
  for (const std::vector<size_t>& of_piece : options) {
    choices *= of_piece.size();
    if (choices == 0 || choices > kMaxChoices) return {};
  }
  std::vector<size_t> right, chosen(pieces.size());
  size_t matches = 0;
  for (size_t choice = 0; choice < choices; ++choice) {
    size_t rest = choice;
    Checksum sum;
    for (size_t i = 0; i < pieces.size(); ++i) {
      chosen[i] = options[i][rest % options[i].size()];
      rest /= options[i].size();
      sum += pieces[i]->versions[chosen[i]].first;
    }
    if (sum == expected && ++matches == 1) right = chosen;
  }
  return matches == 1 ? right : std::vector<size_t>();
}

/// Which version of each piece gives the tensor its checksum; empty: none does, or several do.
/// Where there is too much to try, one image may be wrong in all that it has: without it there is
/// less.
std::vector<size_t> right_versions(const std::vector<const Copies*>& pieces,
                                   const Checksum& expected) {
  Options all(pieces.size());
  size_t choices = 1;
  std::set<uint32_t> suspects;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& versions = pieces[i]->versions;
    for (size_t version = 0; version < versions.size(); ++version) {
      all[i].push_back(version);
      if (versions.size() > 1 && versions[version].second.size() == 1)
        suspects.insert(versions[version].second.front());
    }
    choices = std::min(choices * versions.size(), kMaxChoices + 1);
  }
  if (choices <= kMaxChoices) return only_choice(pieces, all, expected);
  for (const uint32_t suspect : suspects) {
    Options without = all;
    for (size_t i = 0; i < pieces.size(); ++i)
      if (without[i].size() > 1)
        std::erase_if(without[i], [&](size_t version) {
          return pieces[i]->versions[version].second == std::vector<uint32_t>{suspect};
        });
    if (std::vector<size_t> right = only_choice(pieces, without, expected); !right.empty())
      return right;
  }
  return {};
}

bool holds_all(const std::vector<TensorFacts>& tensors, const std::vector<WrittenFile>& files,
               const StoredState& stored) {
  for (uint32_t t = 0; t < tensors.size(); ++t)
    if (stored.index().missing(t, {Box::whole(tensors[t].shape)}) > 0) return false;
  for (uint32_t i = 0; i < files.size(); ++i)
    if (!files[i].has_tensors && stored.find_other(i) < 0) return false;
  return true;
}

class Examination {
 public:
  Examination(const Checkpoint& checkpoint, const StoredState& stored)
      : checkpoint_(checkpoint),
        manifest_(checkpoint.manifest()),
        facts_(checkpoint.tensor_facts()),
        stored_(stored) {}

  Result<Findings> run(const std::vector<ImageContent>& contents) {
    std::vector<Pieces> tensors(facts_.size());
    for (const ImageContent& content : contents) {
      if (content.image >= stored_.images.size())
        return make_error(Code::kCorrupt, "an answer names an image that there is not");
      const StoredImage& image = stored_.images[content.image];
      ++found_.images;
      found_.bytes += stored_.layouts()[content.image].bytes;
      if (!content.problem.empty()) {
        blame(content.image, content.problem);
        beside_tensors_.insert(content.image);
      } else if (content.whole && image.written >= 0 &&
                 *content.whole != manifest_.files[image.written].checksum) {
        blame(content.image, "its bytes do not have the checksum they had");
      }
      for (const ImageContent::Sum& sum : content.sums) {
        if (sum.tensor >= tensors.size())
          return make_error(Code::kCorrupt, "an answer names a tensor that there is not");
        tensors[sum.tensor][sum.box].add(sum.sum, content.image);
      }
    }
    for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
      PTC_TRY(check_tensor(tensor, tensors[tensor]));
    }
    PTC_TRY(sort_out());
    for (uint32_t image : found_.replaceable) {
      PTC_TRY(auto damaged, how_it_would_be_right(image, tensors));
      found_.damaged.push_back(std::move(damaged));
    }
    return std::move(found_);
  }

 private:
  void blame(uint32_t image, const std::string& why) { blamed_.try_emplace(image, why); }

  Result<> check_tensor(uint32_t tensor, const Pieces& pieces) {
    PTC_TRY(auto elements, num_elements(facts_[tensor].shape));
    uint64_t seen = 0;
    std::vector<const Copies*> copies;
    for (const auto& [box, of_box] : pieces) {
      seen += box.volume();
      copies.push_back(&of_box);
    }
    if (seen != elements)
      return ok();  // a part is not within reach: there is nothing to compare with
    const std::vector<size_t> right = right_versions(copies, facts_[tensor].checksum);
    if (right.size() != copies.size()) {
      wrong_.push_back(manifest_.tensor_name(tensor));
      found_.not_right.tensors.push_back(tensor);
      return ok();
    }
    for (size_t i = 0; i < copies.size(); ++i)
      for (size_t version = 0; version < copies[i]->versions.size(); ++version)
        if (version != right[i])
          for (uint32_t image : copies[i]->versions[version].second) {
            in_tensors_[image].push_back(tensor);
            blame(image, fmt::format("{} at byte {} is not what was committed",
                                     manifest_.tensor_name(tensor), offset_in(image, tensor)));
          }
    return ok();
  }

  Result<DamagedImage> how_it_would_be_right(uint32_t image,
                                             const std::vector<Pieces>& tensors) const {
    DamagedImage damaged{image, !in_tensors_.contains(image) || beside_tensors_.contains(image)};
    const ImageLayout& layout = stored_.layouts()[image];
    std::set<uint32_t> done;
    for (const ArraySlot& slot : layout.arrays) {
      if (!done.insert(slot.tensor).second) continue;
      std::vector<const Copies*> copies;
      for (const auto& [box, of_box] : tensors[slot.tensor]) copies.push_back(&of_box);
      const std::vector<size_t> right = right_versions(copies, facts_[slot.tensor].checksum);
      if (right.empty()) continue;  // not within reach as a whole
      std::vector<ImageContent::Sum> sums;
      std::vector<const Box*> wrong;
      size_t i = 0;
      for (const auto& [box, of_box] : tensors[slot.tensor]) {
        const auto& [sum, images] = of_box.versions[right[i++]];
        sums.push_back({slot.tensor, box, sum});
        if (has_another(of_box, image) &&
            std::find(images.begin(), images.end(), image) == images.end())
          wrong.push_back(&box);
      }
      // A piece is written over as a whole, so that all of it is compared before.
      std::vector<const Box*> pieces;
      for (const ArraySlot& other : layout.arrays)
        if (other.tensor == slot.tensor)
          for (const Piece& piece : other.part->pieces)
            if (damaged.all || std::any_of(wrong.begin(), wrong.end(), [&](const Box* box) {
                  return is_in(*box, piece.global);
                }))
              pieces.push_back(&piece.global);
      for (const ImageContent::Sum& sum : sums)
        if (std::any_of(pieces.begin(), pieces.end(),
                        [&](const Box* piece) { return is_in(sum.box, *piece); }))
          damaged.right.push_back(sum);
    }
    return damaged;
  }

  static bool is_in(const Box& box, const Box& whole) { return intersect(box, whole) == box; }

  static bool has_another(const Copies& copies, uint32_t image) {
    return std::any_of(copies.versions.begin(), copies.versions.end(), [&](const auto& version) {
      return std::find(version.second.begin(), version.second.end(), image) != version.second.end();
    });
  }

  uint64_t offset_in(uint32_t image, uint32_t tensor) const {
    for (const ArraySlot& slot : stored_.layouts()[image].arrays)
      if (slot.tensor == tensor) return slot.byte_offset;
    return 0;
  }

  std::string place(uint32_t number) const {
    const StoredImage& image = stored_.images[number];
    const std::string file = image.written >= 0
                                 ? fmt::format("rank/{}/{}", manifest_.files[image.written].rank,
                                               manifest_.files[image.written].path)
                                 : fmt::format("{} of state {}", image.path, image.state);
    return fmt::format("{} (image {}{}{})", file, image.id, image.node.empty() ? "" : " on ",
                       image.node);
  }

  /// Damaged images go together if the others hold everything; else one by one, as long as they do.
  Result<> sort_out() {
    std::vector<uint32_t> all;
    for (const auto& [image, why] : blamed_) all.push_back(image);
    auto can_go = [&](const std::vector<uint32_t>& numbers) -> Result<bool> {
      PTC_TRY(auto left, checkpoint_.make_stored(stored_.spec, images_without(stored_, numbers)));
      return holds_all(facts_, manifest_.files, *left);
    };
    std::vector<uint32_t> going;
    if (!all.empty()) {
      PTC_TRY(bool together, can_go(all));
      if (together) going = all;
    }
    for (uint32_t image : all) {
      if (going.size() == all.size()) break;
      std::vector<uint32_t> more = going;
      more.push_back(image);
      PTC_TRY(bool goes, can_go(more));
      if (goes) going = std::move(more);
    }
    for (const auto& [image, why] : blamed_) {
      const bool goes = std::binary_search(going.begin(), going.end(), image);
      (goes ? found_.replaced : found_.beyond).push_back(fmt::format("{}: {}", place(image), why));
      if (!goes) note_not_right(image);
    }
    for (auto* list : {&found_.not_right.tensors, &found_.not_right.files}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
    std::sort(found_.not_right.images.begin(), found_.not_right.images.end());
    found_.replaceable = std::move(going);
    if (!wrong_.empty()) {
      const size_t named = std::min<size_t>(wrong_.size(), 3);
      found_.beyond.push_back(fmt::format(
          "the bytes of {} tensor{} do not have the checksum they had when they were committed: "
          "{}{}",
          wrong_.size(), wrong_.size() == 1 ? "" : "s",
          fmt::join(wrong_.begin(), wrong_.begin() + static_cast<ptrdiff_t>(named), ", "),
          wrong_.size() > named ? ", …" : ""));
    }
    return ok();
  }

  /// Of an image that stays although it is damaged. Where its tensors are right somewhere they are
  /// not read from it: a file that is it is gathered.
  void note_not_right(uint32_t number) {
    const StoredImage& image = stored_.images[number];
    if (image.written >= 0 && !manifest_.files[image.written].has_tensors)
      found_.not_right.files.push_back(image.written);
    else found_.not_right.images.push_back(image.id);
    if (const auto wrong = in_tensors_.find(number); wrong != in_tensors_.end())
      found_.not_right.tensors.insert(found_.not_right.tensors.end(), wrong->second.begin(),
                                      wrong->second.end());
  }

  const Checkpoint& checkpoint_;
  const Manifest& manifest_;
  const std::vector<TensorFacts>& facts_;  // of the model's tensors, and of padding that is kept
  const StoredState& stored_;
  std::map<uint32_t, std::string> blamed_;                // image → why
  std::map<uint32_t, std::vector<uint32_t>> in_tensors_;  // of these: which are wrong in them
  std::set<uint32_t> beside_tensors_;                     // of these: something else is
  std::vector<std::string> wrong_;                        // tensors of which no copy is right
  Findings found_;
};

}  // namespace

std::string Findings::message() const {
  constexpr size_t kNamed = 3;
  std::string text;
  auto add = [&](const std::vector<std::string>& list, std::string_view note) {
    for (size_t i = 0; i < std::min(list.size(), kNamed); ++i)
      text += fmt::format("{}{}", text.empty() ? "" : "; ", list[i]);
    if (list.size() > kNamed) text += fmt::format("; and {} more", list.size() - kNamed);
    if (!list.empty()) text += note;
  };
  add(beyond, "; no other copy has it right");
  add(replaced, "; another copy has it right (ptc verify --repair)");
  return text;
}

std::vector<StoredImage> images_without(const StoredState& stored,
                                        const std::vector<uint32_t>& numbers) {
  std::vector<StoredImage> images;
  for (uint32_t i = 0; i < stored.images.size(); ++i)
    if (!std::binary_search(numbers.begin(), numbers.end(), i)) images.push_back(stored.images[i]);
  return images;
}

Result<Findings> find_damage(const Checkpoint& checkpoint, const StoredState& stored,
                             std::vector<ImageContent> contents) {
  return Examination(checkpoint, stored).run(contents);
}

namespace {

json::array sums_to_json(const std::vector<ImageContent::Sum>& list) {
  json::array sums;
  for (const ImageContent::Sum& sum : list)
    sums.push_back(json::array{sum.tensor, to_array(sum.box.offset), to_array(sum.box.extent),
                               json::value(sum.sum.to_hex())});
  return sums;
}

/// Throws what the accessors of a value of another kind throw.
Result<std::vector<ImageContent::Sum>> sums_from(const json::value& value) {
  std::vector<ImageContent::Sum> sums;
  for (const json::value& part : value.as_array()) {
    const json::array& sum = part.as_array();
    PTC_TRY(auto checksum, Checksum::from_hex(std::string_view(sum.at(3).as_string())));
    sums.push_back({sum.at(0).to_number<uint32_t>(), box_from(sum.at(1), sum.at(2)), checksum});
  }
  return sums;
}

}  // namespace

CommonCuts cuts_of(const StoredState& stored) {
  std::vector<const ImageLayout*> layouts;
  for (const ImageLayout& layout : stored.layouts()) layouts.push_back(&layout);
  return CommonCuts::between(layouts);
}

json::value to_json(const CommonCuts& cuts, const StoredState& stored,
                    const std::vector<uint32_t>& images) {
  json::array list;
  if (cuts.empty()) return list;
  std::set<const Box*> said;
  for (const uint32_t image : images)
    for (const ArraySlot& slot : stored.layouts()[image].arrays)
      for (const Piece& piece : slot.part->pieces)
        for (const Box* cell : cuts.of(slot.tensor, piece.global))
          if (said.insert(cell).second)
            list.push_back(
                json::array{slot.tensor, to_array(cell->offset), to_array(cell->extent)});
  return list;
}

CommonCuts cuts_from(const json::value& value) {
  std::vector<std::pair<uint32_t, Box>> cells;
  for (const json::value& entry : value.as_array()) {
    const json::array& cell = entry.as_array();
    cells.emplace_back(cell.at(0).to_number<uint32_t>(), box_from(cell.at(1), cell.at(2)));
  }
  return CommonCuts(std::move(cells));
}

std::string to_text(const std::vector<ImageContent>& contents) {
  json::array list;
  for (const ImageContent& content : contents) {
    json::object object{{"image", content.image},
                        {"problem", content.problem},
                        {"sums", sums_to_json(content.sums)}};
    if (content.whole) object["whole"] = content.whole->to_hex();
    list.push_back(std::move(object));
  }
  return json::serialize(json::object{{"images", std::move(list)}});
}

Result<std::vector<ImageContent>> contents_from(std::string_view text) {
  std::vector<ImageContent> contents;
  try {
    PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{1} << 30}));
    for (const json::value& entry : value.as_object().at("images").as_array()) {
      const json::object& object = entry.as_object();
      ImageContent content{object.at("image").to_number<uint32_t>()};
      content.problem = std::string(object.at("problem").as_string());
      if (const json::value* whole = object.if_contains("whole")) {
        PTC_TRY(content.whole, Checksum::from_hex(std::string_view(whole->as_string())));
      }
      PTC_TRY(content.sums, sums_from(object.at("sums")));
      contents.push_back(std::move(content));
    }
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "what a node says of its images is damaged: {}",
                      error.what());
  }
  return contents;
}

json::value to_json(const std::vector<DamagedImage>& images) {
  json::array list;
  for (const DamagedImage& image : images)
    list.push_back(json::object{
        {"image", image.image}, {"all", image.all}, {"right", sums_to_json(image.right)}});
  return list;
}

Result<std::vector<DamagedImage>> damaged_images_from(const json::value& value) {
  std::vector<DamagedImage> images;
  try {
    for (const json::value& entry : value.as_array()) {
      const json::object& object = entry.as_object();
      DamagedImage image{object.at("image").to_number<uint32_t>(), object.at("all").as_bool()};
      PTC_TRY(image.right, sums_from(object.at("right")));
      images.push_back(std::move(image));
    }
  } catch (const std::exception& error) {
    return make_error(Code::kCorrupt, "what a node says of damaged images cannot be read: {}",
                      error.what());
  }
  return images;
}

}  // namespace ptc
