#include "reshard/job/part_request.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/json.h"

namespace ptc {
namespace {

json::object plan_json(const PartRequest& request) {
  json::array ranks, alive;
  for (const MemoryPlace& place : request.wanted.placement.place_of_rank)
    ranks.push_back(json::value(place.to_string()));
  for (const std::string& node : request.wanted.alive) alive.push_back(json::value(node));
  return {{"id", request.id},
          {"generation", request.generation},
          {"stored", request.stored},
          {"revision", request.revision},
          {"spec", request.wanted.spec.to_json()},
          {"ranks", std::move(ranks)},
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
    for (const json::value& place : object.at("ranks").as_array()) {
      PTC_TRY(wanted.placement.place_of_rank.emplace_back(),
              MemoryPlace::parse(std::string_view(place.as_string())));
    }
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
