#include "reshard/job/part_request.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/json.h"

namespace ptc {
namespace {

/// [place, how many ranks in a row are there, …]: ranks of a node follow each other, most often,
/// and each node is told of all.
json::array runs_of(const std::vector<MemoryPlace>& places) {
  json::array runs;
  for (size_t begin = 0; begin < places.size();) {
    size_t end = begin;
    while (end < places.size() && places[end] == places[begin]) ++end;
    runs.push_back(json::value(places[begin].to_string()));
    runs.push_back(end - begin);
    begin = end;
  }
  return runs;
}

/// Of so many ranks at most; no more are of any request.
Result<std::vector<MemoryPlace>> places_from(const json::array& runs, uint64_t most) {
  std::vector<MemoryPlace> places;
  for (size_t i = 0; i < runs.size(); i += 2) {
    PTC_TRY(const auto place, MemoryPlace::parse(std::string_view(runs.at(i).as_string())));
    const auto count = runs.at(i + 1).to_number<uint64_t>();
    if (count > most - places.size()) return invalid_argument("it has more ranks than its layout");
    places.insert(places.end(), count, place);
  }
  return places;
}

json::object plan_json(const PartRequest& request) {
  json::array alive;
  for (const std::string& node : request.wanted.alive) alive.push_back(json::value(node));
  return {{"id", request.id},
          {"generation", request.generation},
          {"stored", request.stored},
          {"revision", request.revision},
          {"spec", request.wanted.spec.to_json()},
          {"ranks", runs_of(request.wanted.placement.place_of_rank)},
          {"replicas", request.wanted.replicas},
          {"alive", std::move(alive)}};
}

}  // namespace

std::string PartRequest::plan_text() const { return json::serialize(plan_json(*this)); }

std::string PartRequest::to_text() const {
  json::object object = plan_json(*this);
  object["epoch"] = epoch;
  if (commit) {
    object["from"] = commit->from;
    object["fence"] = commit->fence;
  }
  return json::serialize(object);
}

Result<PartRequest> PartRequest::from_text(std::string_view text) {
  PartRequest request;
  WantedState& wanted = request.wanted;
  try {
    PTC_TRY(const auto value, parse_json(text, {.max_bytes = size_t{1} << 28}));
    const json::object& object = value.as_object();
    request.id = std::string(object.at("id").as_string());
    request.generation = object.at("generation").to_number<int64_t>();
    request.stored = std::string(object.at("stored").as_string());
    request.revision = object.at("revision").to_number<int64_t>();
    PTC_TRY(wanted.spec, LayoutSpec::from_json(object.at("spec").as_object()));
    wanted.replicas = object.at("replicas").to_number<uint32_t>();
    PTC_TRY(wanted.placement.place_of_rank,
            places_from(object.at("ranks").as_array(), wanted.spec.sizes.world_size()));
    for (const json::value& node : object.at("alive").as_array())
      wanted.alive.emplace_back(node.as_string());
    request.epoch = object.at("epoch").to_number<int64_t>();
    if (object.contains("from"))
      request.commit = {std::string(object.at("from").as_string()),
                        object.at("fence").to_number<int64_t>()};
  } catch (const std::exception& error) {
    return invalid_argument("the request for a part of a plan is damaged: {}", error.what());
  }
  if (request.id.empty() || request.id[0] == '.' || request.id.find('/') != std::string::npos ||
      !request.stored.starts_with("stored-") || request.stored.find('/') != std::string::npos ||
      wanted.placement.place_of_rank.size() != wanted.spec.sizes.world_size())
    return invalid_argument("the request for a part of a plan is damaged");
  return request;
}

}  // namespace ptc
