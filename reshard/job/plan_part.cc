#include "reshard/job/plan_part.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "reshard/checkpoint/json_numbers.h"
#include "store/base/json.h"

namespace ptc {
namespace {

json::array pairs_of(const std::vector<std::pair<uint32_t, std::string>>& pairs) {
  json::array array;
  for (const auto& [number, id] : pairs) array.push_back(json::array{number, json::value(id)});
  return array;
}

std::vector<std::pair<uint32_t, std::string>> pairs_from(const json::value& value) {
  std::vector<std::pair<uint32_t, std::string>> pairs;
  for (const json::value& pair : value.as_array())
    pairs.emplace_back(pair.as_array().at(0).to_number<uint32_t>(),
                       std::string(pair.as_array().at(1).as_string()));
  return pairs;
}

}  // namespace

std::string PlanPart::to_text() const {
  json::array all;
  for (const Sum& sum : sums)
    all.push_back(json::array{sum.tensor, to_array(sum.box.offset), to_array(sum.box.extent),
                              json::value(sum.sum.to_hex())});
  return json::serialize(json::object{{"plan", plan},
                                      {"images", pairs_of(images)},
                                      {"copies", pairs_of(copies)},
                                      {"sums", std::move(all)}});
}

Result<PlanPart> PlanPart::from_text(std::string_view text) {
  PlanPart part;
  try {
    PTC_TRY(auto value, parse_json(text, {.max_bytes = size_t{1} << 30}));
    const json::object& object = value.as_object();
    part.plan = std::string(object.at("plan").as_string());
    part.images = pairs_from(object.at("images"));
    part.copies = pairs_from(object.at("copies"));
    for (const json::value& entry : object.at("sums").as_array()) {
      const json::array& sum = entry.as_array();
      PTC_TRY(auto checksum, Checksum::from_hex(std::string_view(sum.at(3).as_string())));
      part.sums.push_back(
          {sum.at(0).to_number<uint32_t>(), box_from(sum.at(1), sum.at(2)), checksum});
    }
  } catch (const std::exception& error) {
    return invalid_argument("a part of a plan is damaged: {}", error.what());
  }
  return part;
}

}  // namespace ptc
