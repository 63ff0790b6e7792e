#include "reshard/job/shard_index.h"

#include <boost/json/serialize.hpp>
#include <filesystem>

#include "store/base/json.h"

namespace ptc {
namespace {

/// Whether a path leads down from where it is, and is written in the only way it can be.
bool leads_down(const std::string& path) {
  const std::filesystem::path whole(path);
  return whole.is_relative() && whole.has_filename() && whole == whole.lexically_normal() &&
         *whole.begin() != ".." && *whole.begin() != ".";
}

}  // namespace

Result<ShardIndex> parse_shard_index(std::string_view text) {
  PTC_TRY(auto parsed, parse_json(text, {.max_bytes = kMaxShardIndexBytes, .max_depth = 8}));
  const json::value* map =
      parsed.is_object() ? parsed.get_object().if_contains("weight_map") : nullptr;
  if (map == nullptr || !map->is_object()) return invalid_argument("there is no 'weight_map'");
  ShardIndex index;
  for (const auto& [tensor, file] : map->get_object()) {
    std::string name = file.is_string() ? std::string(std::string_view(file.get_string())) : "";
    if (!leads_down(name)) {
      return invalid_argument("tensor {} is said to be in {}, which is not the name of a file beside "
                              "the index", ptc::quoted(tensor), ptc::quoted(json::serialize(file)));
    }
    index[std::move(name)].emplace_back(std::string_view(tensor));
  }
  return index;
}

}  // namespace ptc
