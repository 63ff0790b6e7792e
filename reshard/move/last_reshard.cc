#include "reshard/move/last_reshard.h"

#include <boost/json/object.hpp>

#include "store/base/json.h"

namespace ptc {

std::optional<LastReshard> LastReshard::of(const PlanTexts& plan) {
  try {
    auto value = parse_json(plan.json, {.max_bytes = size_t{1} << 28});
    if (!value || !value.value().is_object() || value.value().get_object().empty())
      return std::nullopt;
    const json::object& object = value.value().get_object();
    const json::object& bytes = object.at("bytes").as_object();
    LastReshard last{std::string(object.at("checkpoint").as_string()),
                     std::string(object.at("from").as_string()),
                     std::string(object.at("to").as_string()),
                     {},
                     object.at("seconds").to_number<double>()};
    last.totals.total_bytes = bytes.at("total").to_number<uint64_t>();
    last.totals.kept_bytes = bytes.at("kept").to_number<uint64_t>();
    last.totals.local_bytes = bytes.at("local").to_number<uint64_t>();
    last.totals.moved_bytes = bytes.at("moved").to_number<uint64_t>();
    last.totals.minimum_bytes = bytes.at("minimum").to_number<uint64_t>();
    return last;
  } catch (const std::exception&) {  // of another version
    return std::nullopt;
  }
}

}  // namespace ptc
