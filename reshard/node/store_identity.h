// Which store this is, and which cluster it belongs to: both know it of each other.
//
//   <store>/identity.json   {"format": "ptc-store/1", "store": "<16 hex>", "node": "w1", "starts":
//                           7,
//                            "cluster": {"id": "<16 hex>", "name": "ptcfs", "history": 1}}
//                              alone: without "cluster"
// and among what is agreed on:
//   identity                {"id": "<16 hex>", "history": 1, …}    made once, with the cluster
//   stores/<store>          {"node": "w1", "done": 31, "starts": 7}    up to which revision it has
//                           carried out tombstones
//
// `history` grows when what was agreed was lost and made anew (recover.h); `starts` with each
// start, first in the file, so that the file of an older copy of a store is behind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

struct StoreIdentity {
  std::string store;  // its id
  std::string node;
  std::string cluster, cluster_name;  // empty: it is alone
  int64_t history = 0;
  int64_t starts = 0;  // in a cluster
};

/// nullopt: there is none yet.
Result<std::optional<StoreIdentity>> read_store_identity(const std::string& directory);
Result<> write_store_identity(const std::string& directory, const StoreIdentity& identity);
/// The path of the copy of what was agreed.
std::string agreed_facts_path(const std::string& directory);

constexpr const char* kIdentityKey = "identity";

struct ClusterIdentity {
  std::string id;
  int64_t history = 1;
  bool recovering = false;  // what was agreed is being made anew, and not all of it is there yet
  /// Of each history but the first: of which store's knowledge it was made, and of what revision
  /// that was.
  struct Recovered {
    int64_t history = 0;
    std::string store;
    int64_t revision = 0;
  };
  std::vector<Recovered> recovered;
  int64_t meta_revision = 0;  // of its key

  std::string to_text() const;
};
Result<std::optional<ClusterIdentity>> read_cluster_identity(MetaClient& meta);

constexpr std::string_view kStores = "stores/";
std::string store_key(const std::string& store);
struct RegisteredStore {
  std::string store, node;
  int64_t done = 0, starts = 0;
  int64_t meta_revision = 0;

  std::string to_text() const;
};
Result<std::vector<RegisteredStore>> read_stores(MetaClient& meta);
RegisteredStore registered_store_of(const MetaEntry& entry);

}  // namespace ptc
