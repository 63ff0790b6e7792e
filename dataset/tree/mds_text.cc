#include "dataset/tree/mds_text.h"

#include <boost/json/serialize.hpp>

#include "dataset/tree/sample_form.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// The keys that index.json and a shard have in common.
json::object common_keys(const SampleSource& source) {
  json::array names, encodings, sizes;
  for (const MdsColumn& column : columns_of(source)) {
    names.emplace_back(column.name);
    encodings.emplace_back(column.encoding);
    sizes.emplace_back(column.bytes ? json::value(uint64_t{*column.bytes}) : json::value(nullptr));
  }
  return {{"column_encodings", std::move(encodings)},
          {"column_names", std::move(names)},
          {"column_sizes", std::move(sizes)},
          {"compression", nullptr},
          {"format", "mds"},
          {"hashes", json::array()},
          {"size_limit", nullptr},
          {"version", 2}};
}

}  // namespace

std::string mds_config(const SampleSource& source) { return json::serialize(common_keys(source)); }

std::string mds_index(const SampleSource& source, std::span<const MdsShard> shards) {
  // Written shard by shard: there may be a hundred thousand of them.
  std::string common = mds_config(source);
  common.pop_back();
  std::string text = "{\"shards\":[";
  for (const MdsShard& shard : shards) {
    const json::object raw_data{
        {"basename", shard.basename}, {"bytes", shard.bytes}, {"hashes", json::object()}};
    text += fmt::format("{}{},\"raw_data\":{},\"samples\":{},\"zip_data\":null}}", &shard == shards.data() ? "" : ",",
                        common, json::serialize(raw_data), shard.samples);
  }
  return text + "],\"version\":2}\n";
}

}  // namespace ptc
