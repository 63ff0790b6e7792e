#include "dataset/tree/mds_text.h"

#include <boost/json/serialize.hpp>

#include "dataset/tree/sample_form.h"
#include "store/base/json.h"

namespace ptc {
namespace {

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

Result<> check_mds_bytes(uint64_t bytes) {
  if (bytes <= UINT32_MAX) return ok();
  return invalid_argument("an MDS shard of {} bytes: 4 GiB are the most; put fewer samples in it",
                          bytes);
}

}  // namespace ptc
