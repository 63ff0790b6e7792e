#include "reshard/node/store_identity.h"

#include <fcntl.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMaxBytes = 1 << 20;
constexpr const char* kFormat = "ptc-store/1";

std::string path_of(const std::string& directory) { return directory + "/identity.json"; }

int64_t number_in(const json::object& object, std::string_view key) {
  auto number = json_uint(object, key, INT64_MAX);
  return number.has_value() ? static_cast<int64_t>(number.value().value_or(0)) : 0;
}

Result<json::object> object_of(std::string_view text, std::string_view what) {
  auto value = parse_json(text);
  if (value.has_error() || !value.value().is_object())
    return make_error(Code::kCorrupt, "{} is damaged", what);
  return std::move(value.value().get_object());
}

}  // namespace

Result<std::optional<StoreIdentity>> read_store_identity(const std::string& directory) {
  Result<std::string> text = read_text_file(AT_FDCWD, path_of(directory), kMaxBytes);
  if (text.has_error() && text.error().code() == Code::kNotFound)
    return std::optional<StoreIdentity>();
  if (text.has_error()) return std::move(text).error();
  PTC_TRY(auto object, object_of(text.value(), path_of(directory)));
  StoreIdentity identity;
  identity.store = json_text(object, "store");
  identity.node = json_text(object, "node");
  identity.starts = number_in(object, "starts");
  if (identity.store.empty() || json_text(object, "format") != kFormat)
    return make_error(Code::kCorrupt, "{} is damaged, or of a newer ptcfs", path_of(directory));
  if (const json::value* cluster = object.if_contains("cluster");
      cluster != nullptr && cluster->is_object()) {
    identity.cluster = json_text(cluster->get_object(), "id");
    identity.cluster_name = json_text(cluster->get_object(), "name");
    identity.history = number_in(cluster->get_object(), "history");
  }
  return std::optional(std::move(identity));
}

Result<> write_store_identity(const std::string& directory, const StoreIdentity& identity) {
  json::object object{{"format", kFormat}, {"store", identity.store}, {"node", identity.node}};
  if (!identity.cluster.empty()) {
    object["starts"] = identity.starts;
    object["cluster"] = json::object{
        {"id", identity.cluster}, {"name", identity.cluster_name}, {"history", identity.history}};
  }
  return write_file_atomically(AT_FDCWD, path_of(directory), pretty_json(object));
}

std::string agreed_facts_path(const std::string& directory) { return directory + "/agreed.jsonl"; }

std::string ClusterIdentity::to_text() const {
  json::object object{{"id", id}, {"history", history}};
  if (recovering) object["recovering"] = true;
  json::array list;
  for (const Recovered& one : recovered)
    list.push_back(
        json::object{{"history", one.history}, {"store", one.store}, {"revision", one.revision}});
  if (!list.empty()) object["recovered"] = std::move(list);
  return json::serialize(object);
}

Result<std::optional<ClusterIdentity>> read_cluster_identity(MetaClient& meta) {
  PTC_TRY(auto entry, meta.get(kIdentityKey));
  if (!entry) return std::optional<ClusterIdentity>();
  PTC_TRY(auto object, object_of(entry->value, "the identity of the cluster"));
  ClusterIdentity identity;
  identity.id = json_text(object, "id");
  identity.history = number_in(object, "history");
  identity.recovering = object.contains("recovering");
  identity.meta_revision = entry->revision;
  if (const json::value* list = object.if_contains("recovered");
      list != nullptr && list->is_array())
    for (const json::value& one : list->get_array())
      if (one.is_object())
        identity.recovered.push_back({number_in(one.get_object(), "history"),
                                      json_text(one.get_object(), "store"),
                                      number_in(one.get_object(), "revision")});
  if (identity.id.empty())
    return make_error(Code::kCorrupt, "the identity of the cluster is damaged");
  return std::optional(std::move(identity));
}

std::string store_key(const std::string& store) { return fmt::format("{}{}", kStores, store); }

std::string RegisteredStore::to_text() const {
  return json::serialize(json::object{{"node", node}, {"done", done}, {"starts", starts}});
}

RegisteredStore registered_store_of(const MetaEntry& entry) {
  RegisteredStore store;
  store.store = entry.key.substr(kStores.size());
  store.meta_revision = entry.revision;
  if (auto object = object_of(entry.value, entry.key); object.has_value()) {
    store.node = json_text(object.value(), "node");
    store.done = number_in(object.value(), "done");
    store.starts = number_in(object.value(), "starts");
  }
  return store;
}

Result<std::vector<RegisteredStore>> read_stores(MetaClient& meta) {
  PTC_TRY(auto entries, meta.list(kStores));
  std::vector<RegisteredStore> stores;
  for (const MetaEntry& entry : entries) stores.push_back(registered_store_of(entry));
  return stores;
}

}  // namespace ptc
