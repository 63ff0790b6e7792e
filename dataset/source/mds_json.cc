#include "dataset/source/mds_json.h"

#include <algorithm>

#include "dataset/source/indexer.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

/// Reads one entry of "shards".
class MdsShardParser {
 public:
  MdsShardParser(const json::object& shard) : shard_(shard) {}

  Result<> parse(MdsListing& listing) const {
    if (text("format") != "mds") return error("'format' is not \"mds\"");
    const json::value* version = shard_.if_contains("version");
    if (!version || whole_number(*version).value_or(0) != 2) return error("'version' is not 2");
    if (!is_null("compression") || !is_null("zip_data")) {
      return error(
          "its shards are compressed, which cannot be read in the middle; write them again with "
          "MDSWriter(compression=None)");
    }
    PTC_TRY(columns(listing));
    const json::value* raw = shard_.if_contains("raw_data");
    const json::value* samples = shard_.if_contains("samples");
    const uint64_t count = samples ? whole_number(*samples).value_or(UINT64_MAX) : UINT64_MAX;
    if (!raw || !raw->is_object()) return error("'raw_data' is missing");
    const json::value* name = raw->get_object().if_contains("basename");
    const json::value* bytes = raw->get_object().if_contains("bytes");
    const uint64_t size = bytes ? whole_number(*bytes).value_or(UINT64_MAX) : UINT64_MAX;
    if (count > UINT32_MAX) return error("'samples' is not the number of samples");
    if (size == UINT64_MAX) return error("'raw_data' has no 'bytes'");
    if (!name || !name->is_string() || !is_below(name->get_string()))
      return error("'basename' is not the name of a file beside or below index.json");
    listing.shards.push_back({std::string(name->get_string()), count, size});
    return ok();
  }

 private:
  static Error error(std::string_view what) { return invalid_argument("{}", what); }

  bool is_null(std::string_view key) const {
    const json::value* value = shard_.if_contains(key);
    return !value || value->is_null();
  }
  std::string_view text(std::string_view key) const {
    const json::value* value = shard_.if_contains(key);
    return value && value->is_string() ? std::string_view(value->get_string()) : std::string_view();
  }
  static bool is_plain(std::string_view name) {
    return !name.empty() && name != "." && name != ".." && name.size() <= kMaxFieldBytes &&
           name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
  }
  /// As merge_index() of several directories writes them: "part-0/shard.00000.mds".
  static bool is_below(std::string_view path) {
    constexpr size_t kMostBytes = 4096, kMostOfName = 255;
    if (path.size() > kMostBytes) return false;
    while (true) {
      const std::string_view name = path.substr(0, path.find('/'));
      if (name.empty() || name == "." || name == ".." || name.size() > kMostOfName ||
          name.find('\0') != name.npos)
        return false;
      if (name.size() == path.size()) return true;
      path.remove_prefix(name.size() + 1);
    }
  }
  Result<const json::array*> list(std::string_view key) const {
    const json::value* value = shard_.if_contains(key);
    if (!value || !value->is_array()) return invalid_argument("'{}' is not a list", key);
    return &value->get_array();
  }

  Result<> columns(MdsListing& listing) const {
    PTC_TRY(const json::array* names, list("column_names"));
    PTC_TRY(const json::array* encodings, list("column_encodings"));
    PTC_TRY(const json::array* sizes, list("column_sizes"));
    if (names->empty() || names->size() > kMaxFields || encodings->size() != names->size() ||
        sizes->size() != names->size())
      return error("'column_names', 'column_encodings' and 'column_sizes' do not go together");
    std::vector<MdsColumn> found;
    for (size_t i = 0; i < names->size(); ++i) {
      const json::value &name = (*names)[i], &encoding = (*encodings)[i], &size = (*sizes)[i];
      if (!name.is_string() || !is_plain(name.get_string()))
        return error("a name of a column is empty, longer than 128 bytes, or has a '/'");
      if (!encoding.is_string()) return error("an encoding of a column is not a text");
      const auto bytes = whole_number(size);
      if (!size.is_null() && (!bytes || *bytes > UINT32_MAX))
        return error("a size of a column is neither null nor a number of bytes");
      found.push_back({std::string(name.get_string()), std::string(encoding.get_string()), {}});
      if (bytes) found.back().bytes = static_cast<uint32_t>(*bytes);
      if (i > 0 && found[i - 1].name >= found[i].name) return error("'column_names' is not sorted");
    }
    if (listing.shards.empty()) listing.columns = std::move(found);
    else if (listing.columns != found)
      return error("its columns are not those of the shards before it");
    return ok();
  }

  const json::object& shard_;
};

}  // namespace

Result<MdsListing> parse_mds_json(std::string_view text) {
  PTC_TRY(const json::value value, parse_json(text, {.max_bytes = kMaxMdsIndexBytes}));
  const json::value* shards =
      value.is_object() ? value.get_object().if_contains("shards") : nullptr;
  if (!shards || !shards->is_array()) return invalid_argument("there is no list 'shards'");
  MdsListing listing;
  for (const json::value& shard : shards->get_array()) {
    auto parsed = shard.is_object() ? MdsShardParser(shard.get_object()).parse(listing)
                                    : Result<>(invalid_argument("not an object"));
    if (!parsed)
      return std::move(parsed).error().with_context(fmt::format("shard {}", listing.shards.size()));
  }
  return listing;
}

}  // namespace ptc
