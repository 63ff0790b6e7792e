// What must hold of the metadata after every transaction: each decision is looked at when it is made.
#include <boost/json/parse.hpp>

#include "tests/sim/world.h"

namespace ptc::sim {
namespace {

using Entries = std::map<std::string, MetaEntry, std::less<>>;

const std::string kJob = "jobs/job/";

boost::json::object object_of(const std::string& text) { return boost::json::parse(text).as_object(); }
int64_t number_of(const boost::json::object& object, std::string_view key) { return object.at(key).to_number<int64_t>(); }
std::string text_of(const boost::json::object& object, std::string_view key) {
  const boost::json::value* value = object.if_contains(key);
  return value != nullptr && value->is_string() ? std::string(value->as_string()) : std::string();
}

std::optional<boost::json::object> entry(const Entries& entries, const std::string& key) {
  const auto found = entries.find(key);
  if (found == entries.end()) return std::nullopt;
  return object_of(found->second.value);
}

/// nullopt: what is in force from now on is what is wanted, or what it was; and `current` goes forward.
std::optional<std::string> wrong_in_force(const Entries& now, const boost::json::object& before,
                                          const boost::json::object& after) {
  const auto layout = entry(now, kJob + "layout");
  if (!layout) return "there is no layout any more";
  if (number_of(after, "revision") != number_of(before, "revision") || after.at("spec") != before.at("spec")) {
    if (number_of(after, "revision") != number_of(*layout, "revision"))
      return fmt::format("revision {} comes into force, {} is wanted", number_of(after, "revision"),
                         number_of(*layout, "revision"));
    const auto wanted = Layout::parse(text_of(*layout, "text"));
    const auto spec = LayoutSpec::from_json(after.at("spec").as_object());
    if (wanted.has_error() || spec.has_error() || !(wanted.value().spec == spec.value()))
      return "another layout comes into force than the one that is wanted";
  }
  const std::string was = text_of(before, "current"), is = text_of(after, "current");
  const auto old_one = entry(now, kJob + "checkpoints/" + was), new_one = entry(now, kJob + "checkpoints/" + is);
  if (!is.empty() && !new_one) return "current shows " + is + ", which there is not";
  if (was.empty() || was == is || !old_one) return std::nullopt;
  if (!new_one) return "current does not show " + was + " any more, which is there";
  if (number_of(*new_one, "sequence") < number_of(*old_one, "sequence"))
    return fmt::format("current goes back from {} to {}", was, is);
  return std::nullopt;
}

/// nullopt: no other checkpoint has its place in the order.
std::optional<std::string> wrong_sequence(const Entries& now, const std::string& key, const boost::json::object& record) {
  for (auto it = now.lower_bound(kJob + "checkpoints/"); it != now.end() && it->first.starts_with(kJob + "checkpoints/"); ++it)
    if (it->first != key && number_of(object_of(it->second.value), "sequence") == number_of(record, "sequence"))
      return "it has the place of " + it->first;
  return std::nullopt;
}

/// nullopt: it is the same checkpoint, and where its bytes lie was decided on after what was so before.
std::optional<std::string> wrong_record(const boost::json::object& before, const boost::json::object& after) {
  if (after.at("id") != before.at("id")) return "another checkpoint takes the place of one that is there";
  if (number_of(after, "sequence") != number_of(before, "sequence")) return "a checkpoint gets another place";
  const int64_t steps = number_of(after, "generation") - number_of(before, "generation");
  if (steps < 0 || steps > 1) return fmt::format("where its bytes lie goes on by {} decisions", steps);
  if ((steps == 0) != (after.at("stored") == before.at("stored"))) return "two decisions on where its bytes lie are one";
  return std::nullopt;
}

}  // namespace

void World::look_at_decision(const MetaEvent& event, const std::optional<MetaEntry>& before) {
  const Entries& now = cluster_.agreement().entries();
  std::optional<std::string> wrong;
  if (event.key == kJob + "in_force" && event.value && before) {
    wrong = wrong_in_force(now, object_of(before->value), object_of(*event.value));
  } else if (event.key.starts_with(kJob + "checkpoints/")) {
    if (event.value && before) {
      wrong = wrong_record(object_of(before->value), object_of(*event.value));
    } else if (event.value) {
      wrong = wrong_sequence(now, event.key, object_of(*event.value));
    } else if (const auto in_force = entry(now, kJob + "in_force");
               !event.value && in_force && text_of(*in_force, "current") == event.key.substr(kJob.size() + 12)) {
      wrong = "current shows it when it is removed";
    }
  }
  if (wrong) broken(fmt::format("decision on {}: {}", event.key, *wrong));
}

std::optional<unsigned> World::leader() const {
  const auto& entries = cluster_.agreement().entries();
  const auto found = entries.find("leaders/job");
  if (found == entries.end()) return std::nullopt;
  return static_cast<unsigned>(std::stoul(found->second.value.substr(1)));
}

}  // namespace ptc::sim
