// What must hold of the metadata after every transaction: each decision is looked at when it is
// made.
#include <boost/json/parse.hpp>
#include <fstream>
#include <sstream>

#include "tests/sim/world.h"

namespace ptc::sim {
namespace {

using Entries = std::map<std::string, MetaEntry, std::less<>>;

const std::string kJob = "jobs/job/";

boost::json::object object_of(const std::string& text) {
  return boost::json::parse(text).as_object();
}
int64_t number_of(const boost::json::object& object, std::string_view key) {
  return object.at(key).to_number<int64_t>();
}
std::string text_of(const boost::json::object& object, std::string_view key) {
  const boost::json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->as_string()) : std::string();
}

std::optional<boost::json::object> entry(const Entries& entries, const std::string& key) {
  const auto found = entries.find(key);
  if (found == entries.end()) return std::nullopt;
  return object_of(found->second.value);
}

/// nullopt: what is in force from now on is what is wanted, or what it was; and `current` goes
/// forward.
std::optional<std::string> wrong_in_force(const Entries& now, const boost::json::object& before,
                                          const boost::json::object& after) {
  const auto layout = entry(now, kJob + "layout");
  if (!layout) return "there is no layout any more";
  if (number_of(after, "revision") != number_of(before, "revision") ||
      after.at("spec") != before.at("spec")) {
    if (number_of(after, "revision") != number_of(*layout, "revision"))
      return fmt::format("revision {} comes into force, {} is wanted", number_of(after, "revision"),
                         number_of(*layout, "revision"));
    const auto wanted = Layout::parse(text_of(*layout, "text"));
    const auto spec = LayoutSpec::from_json(after.at("spec").as_object());
    if (wanted.has_error() || spec.has_error() || !(wanted.value().spec == spec.value()))
      return "another layout comes into force than the one that is wanted";
  }
  const std::string was = text_of(before, "current"), is = text_of(after, "current");
  const auto old_one = entry(now, kJob + "checkpoints/" + was),
             new_one = entry(now, kJob + "checkpoints/" + is);
  if (!is.empty() && !new_one) return "current shows " + is + ", which there is not";
  if (was.empty() || was == is || !old_one) return std::nullopt;
  if (!new_one) return "current does not show " + was + " any more, which is there";
  if (number_of(*new_one, "sequence") < number_of(*old_one, "sequence"))
    return fmt::format("current goes back from {} to {}", was, is);
  return std::nullopt;
}

/// nullopt: no other checkpoint of its job has its place in the order.
std::optional<std::string> wrong_sequence(const Entries& now, const std::string& key,
                                          const boost::json::object& record) {
  const std::string all = key.substr(0, key.rfind('/') + 1);
  for (auto it = now.lower_bound(all); it != now.end() && it->first.starts_with(all); ++it)
    if (it->first != key &&
        number_of(object_of(it->second.value), "sequence") == number_of(record, "sequence"))
      return "it has the place of " + it->first;
  return std::nullopt;
}

int64_t mended_of(const boost::json::object& record) {
  const boost::json::value* mended = record.if_contains("mended");
  return mended != nullptr ? mended->to_number<int64_t>() : 0;
}

/// nullopt: it is the same checkpoint, and this was decided on after what was so before.
std::optional<std::string> wrong_record(const boost::json::object& before,
                                        const boost::json::object& after) {
  if (after.at("id") != before.at("id"))
    return "another checkpoint takes the place of one that is there";
  if (number_of(after, "sequence") != number_of(before, "sequence"))
    return "a checkpoint gets another place";
  const int64_t steps = number_of(after, "generation") - number_of(before, "generation");
  if (steps < 0 || steps > 1)
    return fmt::format("where its bytes lie goes on by {} decisions", steps);
  if ((steps == 0) != (after.at("stored") == before.at("stored")))
    return "two decisions on where its bytes lie are one";
  if (mended_of(after) < mended_of(before)) return "nobody knows any more that it was mended";
  if (after.at("pinned") != before.at("pinned") &&
      (steps != 0 || mended_of(after) != mended_of(before)))
    return "whether it is pinned changes with something else";
  return std::nullopt;
}

/// Of jobs/<job>/…
std::string job_key_of(const std::string& key) { return key.substr(0, key.find('/', 5)); }

std::optional<std::string> wrong_removal(const Entries& now, const std::string& key,
                                         const boost::json::object& before) {
  const std::string job = job_key_of(key), name = key.substr(key.rfind('/') + 1);
  if (!now.contains(job)) return std::nullopt;  // with all of it
  if (before.at("pinned").as_bool()) return "it is pinned";
  if (!now.contains("removed/checkpoints/" + text_of(before, "id")))
    return "it is another one than the one that is removed";
  const auto in_force = entry(now, job + "/in_force");
  return in_force && text_of(*in_force, "current") == name
             ? std::optional<std::string>("current shows it when it is removed")
             : std::nullopt;
}

std::optional<std::string> wrong_job(const Entries& now, const MetaEvent& event,
                                     const std::optional<MetaEntry>& before) {
  if (event.value)
    return before ? std::optional<std::string>("there is one of its name already") : std::nullopt;
  if (!now.contains("removed/jobs/" + text_of(object_of(before->value), "id")))
    return "it is another one than the one that is removed";
  const std::string checkpoints = event.key + "/checkpoints/";
  const auto left = now.lower_bound(checkpoints);
  if (left != now.end() && left->first.starts_with(checkpoints))
    return left->first + " was committed, and is left";
  return std::nullopt;
}

std::optional<std::string> wrong_drain(const Entries& now, unsigned nodes) {
  unsigned drained = 0;
  for (auto it = now.lower_bound(kDrainedKeys);
       it != now.end() && it->first.starts_with(kDrainedKeys); ++it)
    ++drained;
  return drained == nodes ? std::optional<std::string>("no node is left in service") : std::nullopt;
}

std::optional<std::string> wrong_layout(const Entries& now, const MetaEvent& event,
                                        const std::optional<MetaEntry>& before) {
  const boost::json::object after = object_of(*event.value);
  const std::string text = text_of(after, "text");
  if (before) {
    const boost::json::object old = object_of(before->value);
    const int64_t steps = number_of(after, "revision") - number_of(old, "revision");
    if (steps < 0 || steps > 1) return fmt::format("what is wanted goes on by {} edits", steps);
    if ((steps == 0) != (text == text_of(old, "text"))) return "two edits are one";
    if (steps == 0) return std::nullopt;
  }
  const auto layout = Layout::parse(text);
  if (layout.has_error()) return layout.error().message();
  for (const std::string& device : layout.value().devices)
    if (const std::string node = device.substr(0, device.find(':'));
        now.contains("drained/" + node))
      return node + " is being drained";
  return std::nullopt;
}

std::optional<std::string> wrong_attributes(const boost::json::object& before,
                                            const boost::json::object& after) {
  for (const auto& [name, value] : before)
    if (!after.contains(name)) return fmt::format("those of {} are lost", std::string_view(name));
  return std::nullopt;
}

/// nullopt: one more than before, of the whole record.
std::optional<std::string> wrong_data_set(const Entries& now, const MetaEvent& event,
                                          const std::optional<MetaEntry>& before) {
  const int64_t count = std::stoll(*event.value), last = before ? std::stoll(before->value) : 0;
  if (count != last + 1)
    return fmt::format("what was saved last was number {}, this is {}", last, count);
  const auto source = now.find(event.key.substr(0, event.key.rfind('/')) + "/source");
  if (source == now.end() || source->second.value != fmt::format("source {}", count))
    return "two decisions are mixed";
  return std::nullopt;
}

std::optional<std::string> wrong_leader(const MetaEvent& event,
                                        const std::optional<MetaEntry>& before,
                                        std::optional<unsigned> by) {
  // A key of its own is one that it could not delete.
  if (event.value)
    return before && before->value != *event.value
               ? std::optional<std::string>(before->value + " leads")
               : std::nullopt;
  if (by && before && before->value != SimCluster::name(*by))
    return fmt::format("{} ends the lead of {}", SimCluster::name(*by), before->value);
  return std::nullopt;
}

}  // namespace

/// Of a checkpoint of the job; nullopt: nobody has the file.
std::optional<boost::json::object> World::state_in(const std::string& id,
                                                   const std::string& stored) const {
  for (unsigned node = 0; node < options_.nodes; ++node) {
    std::ifstream file(cluster_.directory(node) / "jobs/job/checkpoints" / id / stored);
    if (!file) continue;
    std::stringstream text;
    text << file.rdbuf();
    return object_of(text.str());
  }
  return std::nullopt;
}

/// The images that it names, and where they lie. Empty: nobody has the file.
std::map<std::string, std::string> World::images_in(const std::string& id,
                                                    const std::string& stored) const {
  std::map<std::string, std::string> nodes;
  if (const auto state = state_in(id, stored))
    for (const auto& image : state->at("images").as_array())
      nodes.emplace(text_of(image.as_object(), "id"), text_of(image.as_object(), "node"));
  return nodes;
}

/// nullopt: where images go and none comes, nothing good in them was the last: each part of a
/// tensor is in another that lies on a node that lives and stays in service, and has the right
/// bytes.
std::optional<std::string> World::wrong_trim(const MetaEvent& event, const MetaEntry& before) {
  const boost::json::object old_record = object_of(before.value), record = object_of(*event.value);
  const std::string id = text_of(record, "id"), name = event.key.substr(event.key.rfind('/') + 1);
  const auto known = checkpoints_.find(name);
  const auto was = state_in(id, text_of(old_record, "stored")),
             is = state_in(id, text_of(record, "stored"));
  if (known == checkpoints_.end() || !was || !is || was->at("spec") != is->at("spec"))
    return std::nullopt;
  const auto spec = LayoutSpec::from_json(is->at("spec").as_object());
  if (spec.has_error()) return spec.error().message();
  std::map<std::string, const boost::json::object*> gone;
  for (const auto& image : was->at("images").as_array())
    gone.emplace(text_of(image.as_object(), "id"), &image.as_object());
  for (const auto& image : is->at("images").as_array())
    if (gone.erase(text_of(image.as_object(), "id")) == 0) return std::nullopt;
  if (gone.empty()) return std::nullopt;
  const Entries& now = cluster_.agreement().entries();
  using Parts = std::map<std::string, testing::SlowPart>;
  /// What is in it, as it should be; null: it is not, or its file is gone.
  auto good_parts = [&](const boost::json::object& image) -> const Parts* {
    const std::string node = text_of(image, "node");
    const unsigned number = static_cast<unsigned>(std::stoul(node.substr(1)));
    std::ifstream file(cluster_.directory(number) / "images" / text_of(image, "id"));
    if (!file) return nullptr;
    std::stringstream text;
    text << file.rdbuf();
    for (uint64_t rank = 0; rank < spec.value().sizes.world_size(); ++rank) {
      const LayoutSpec& layout = spec.value();
      if (state_index(layout, state_of(layout, layout.coords(rank))) !=
          static_cast<uint32_t>(number_of(image, "state")))
        continue;
      const testing::RankParts& files = parts_of(known->second, layout, rank);
      const auto expected = files.find(text_of(image, "path"));
      return expected != files.end() && !difference(text.str(), expected->second)
                 ? &expected->second
                 : nullptr;
    }
    return nullptr;
  };
  std::vector<const Parts*> left;
  for (const auto& image : is->at("images").as_array())
    if (!now.contains(std::string(kDrainedKeys) + text_of(image.as_object(), "node")))
      if (const Parts* parts = good_parts(image.as_object())) left.push_back(parts);
  for (const auto& [image_id, image] : gone) {
    const Parts* parts = good_parts(*image);
    if (parts == nullptr) continue;
    for (const auto& [tensor, part] : *parts) {
      const bool is_left = std::any_of(left.begin(), left.end(), [&](const Parts* others) {
        // By whatever name: tied ones have two.
        return std::any_of(others->begin(), others->end(),
                           [&](const auto& other) { return other.second.bytes == part.bytes; });
      });
      if (!is_left && !part.bytes.empty())
        return fmt::format("the last good copy of {} in {} of state {} goes, on {}", tensor,
                           text_of(*image, "path"), number_of(*image, "state"),
                           text_of(*image, "node"));
    }
  }
  return std::nullopt;
}

/// nullopt: nothing new lies on a node that is being drained.
std::optional<std::string> World::wrong_placement(const MetaEvent& event, bool is_new) {
  if (is_large(options_)) return std::nullopt;
  const boost::json::object record = object_of(*event.value);
  const std::string id = text_of(record, "id"), stored = text_of(record, "stored");
  std::map<std::string, std::string>& known = images_of_[id];
  if (is_new) known = images_in(id, "stored-1.json");  // what was written lies where it was written
  const std::map<std::string, std::string> images = images_in(id, stored);
  if (images.empty()) return std::nullopt;
  std::optional<std::string> wrong;
  for (const auto& [image, node] : images)
    if (!known.contains(image) && cluster_.agreement().entries().contains("drained/" + node))
      wrong = fmt::format("image {} is new on {}, which is being drained", image, node);
  known = images;
  return wrong;
}

std::optional<std::string> World::wrong_checkpoint(const MetaEvent& event,
                                                   const std::optional<MetaEntry>& before) {
  const Entries& now = cluster_.agreement().entries();
  if (!event.value) return wrong_removal(now, event.key, object_of(before->value));
  const boost::json::object record = object_of(*event.value);
  if (removed_ids_.contains(text_of(record, "id"))) return "it was removed";
  std::optional<std::string> wrong = before ? wrong_record(object_of(before->value), record)
                                            : wrong_sequence(now, event.key, record);
  if (!wrong && event.key.starts_with(kJob)) wrong = wrong_placement(event, !before);
  if (!wrong && event.key.starts_with(kJob) && before && !is_large(options_))
    wrong = wrong_trim(event, *before);
  return wrong;
}

void World::look_at_decision(const MetaEvent& event, const std::optional<MetaEntry>& before,
                             std::optional<unsigned> by) {
  constexpr std::string_view kRemoved = "removed/checkpoints/";
  const Entries& now = cluster_.agreement().entries();
  const std::string& key = event.key;
  std::optional<std::string> wrong;
  if (key.starts_with(kRemoved) && event.value) removed_ids_.insert(key.substr(kRemoved.size()));
  if (key.starts_with("leaders/")) {
    wrong = wrong_leader(event, before, by);
    if (event.value && by) note_begin(*by, chance(50) ? Decision::kFlip : Decision::kEndLead);
  } else if (is_job_key(key)) {
    wrong = wrong_job(now, event, before);
  } else if (key.starts_with("jobs/") && event.value && !now.contains(job_key_of(key))) {
    wrong = "there is no such job";
  } else if (is_checkpoint_key(key)) {
    wrong = wrong_checkpoint(event, before);
  } else if (key == kJob + "in_force" && event.value && before) {
    wrong = wrong_in_force(now, object_of(before->value), object_of(*event.value));
    if (by && leader() == by) note_begin(*by, Decision::kOlder);  // comes after the newest
  } else if (key.starts_with("jobs/") && key.ends_with("/layout") && event.value) {
    wrong = wrong_layout(now, event, before);
  } else if (key.starts_with("jobs/") && key.ends_with("/attributes") && event.value && before) {
    wrong = wrong_attributes(object_of(before->value), object_of(*event.value));
  }
  if (key.ends_with("/dataset/saved") && event.value && !wrong)
    wrong = wrong_data_set(now, event, before);
  if (key.starts_with(kDrainedKeys) && event.value) wrong = wrong_drain(now, options_.nodes);
  if (wrong) broken(fmt::format("decision on {}: {}", key, *wrong));
}

std::optional<unsigned> World::leader() const {
  const auto& entries = cluster_.agreement().entries();
  const auto found = entries.find("leaders/job");
  if (found == entries.end()) return std::nullopt;
  return static_cast<unsigned>(std::stoul(found->second.value.substr(1)));
}

}  // namespace ptc::sim
