// The fields of etcd's JSON gateway: bytes in base64, 64-bit numbers in strings, zero left out.
#pragma once

#include <boost/json/object.hpp>

#include "store/base/json.h"
#include "store/meta/meta_client.h"

namespace ptc {

std::string to_base64(std::string_view bytes);

/// Absent: empty, or 0. Anything that is not what it should be: kCorrupt.
Result<std::string> bytes_field(const json::object& object, std::string_view name);
Result<int64_t> number_field(const json::object& object, std::string_view name);
bool true_field(const json::object& object, std::string_view name);
/// Absent: an empty one.
const json::object& object_field(const json::object& object, std::string_view name);
const json::array& array_field(const json::object& object, std::string_view name);

/// A "kv" whose key begins with `prefix`, which is taken off.
Result<MetaEntry> entry_of(const json::object& key_value, std::string_view prefix);

/// The members "key" and "range_end" that stand for every key that begins with `prefix`, not empty.
json::object range_of(std::string_view prefix);

/// What the gateway answers instead, or nullopt: it is no error.
struct EtcdFailure {
  int64_t grpc_code = 0;
  std::string message;
};
std::optional<EtcdFailure> failure_of(const json::object& answer);

}  // namespace ptc
