#include "store/meta/etcd_json.h"

#include <array>
#include <charconv>

#include "store/meta/backend.h"

namespace ptc {
namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<int8_t, 256> kSixBits = [] {
  std::array<int8_t, 256> bits{};
  bits.fill(-1);
  for (size_t i = 0; i < kAlphabet.size(); ++i)
    bits[static_cast<unsigned char>(kAlphabet[i])] = static_cast<int8_t>(i);
  return bits;
}();

std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  bytes.reserve(text.size() * 3 / 4);
  uint32_t pending = 0;
  int pending_bits = 0;
  for (char c : text) {
    int8_t bits = kSixBits[static_cast<unsigned char>(c)];
    if (bits < 0) return std::nullopt;
    pending = pending << 6 | static_cast<uint32_t>(bits);
    pending_bits += 6;
    if (pending_bits < 8) continue;
    pending_bits -= 8;
    bytes += static_cast<char>(pending >> pending_bits & 0xFF);
  }
  return bytes;
}

Error strange(std::string_view name) {
  return make_error(Code::kCorrupt, "etcd's answer has a field '{}' of a wrong kind", name);
}

}  // namespace

std::string to_base64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    auto byte = [&](size_t at) -> uint32_t {
      return at < bytes.size() ? static_cast<unsigned char>(bytes[at]) : 0;
    };
    uint32_t group = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    for (int shift = 18; shift >= 0; shift -= 6) text += kAlphabet[group >> shift & 63];
  }
  for (size_t i = text.size(), missing = (3 - bytes.size() % 3) % 3; missing > 0; --missing)
    text[--i] = '=';
  return text;
}

Result<std::string> bytes_field(const json::object& object, std::string_view name) {
  const json::value* value = object.if_contains(name);
  if (value == nullptr) return std::string();
  const json::string* text = value->if_string();
  auto bytes = text == nullptr ? std::nullopt : from_base64(*text);
  if (!bytes) return strange(name);
  return std::move(*bytes);
}

Result<int64_t> number_field(const json::object& object, std::string_view name) {
  const json::value* value = object.if_contains(name);
  if (value == nullptr) return int64_t{0};
  if (value->is_int64()) return value->get_int64();
  const json::string* text = value->if_string();
  int64_t number = 0;
  if (text == nullptr) return strange(name);
  auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || end != text->data() + text->size()) return strange(name);
  return number;
}

bool true_field(const json::object& object, std::string_view name) {
  const json::value* value = object.if_contains(name);
  return value != nullptr && value->is_bool() && value->get_bool();
}

const json::object& object_field(const json::object& object, std::string_view name) {
  static const json::object kNone;
  const json::value* value = object.if_contains(name);
  return value != nullptr && value->is_object() ? value->get_object() : kNone;
}

const json::array& array_field(const json::object& object, std::string_view name) {
  static const json::array kNone;
  const json::value* value = object.if_contains(name);
  return value != nullptr && value->is_array() ? value->get_array() : kNone;
}

Result<MetaEntry> entry_of(const json::object& key_value, std::string_view prefix) {
  MetaEntry entry;
  PTC_TRY(entry.key, bytes_field(key_value, "key"));
  PTC_TRY(entry.value, bytes_field(key_value, "value"));
  PTC_TRY(entry.revision, number_field(key_value, "mod_revision"));
  if (!entry.key.starts_with(prefix)) return strange("key");
  entry.key.erase(0, prefix.size());
  return entry;
}

json::object range_of(std::string_view prefix) {
  return {{"key", to_base64(prefix)}, {"range_end", to_base64(prefix_end(prefix))}};
}

std::optional<EtcdFailure> failure_of(const json::object& answer) {
  // {"error", "message", "code"} or, from etcd 3.6 on, {"message", "code"}; in a stream, {"error":
  // {…}}.
  const json::value* error = answer.if_contains("error");
  if (error == nullptr && !answer.contains("message")) return std::nullopt;
  const json::object& fields =
      error != nullptr && error->is_object() ? error->get_object() : answer;
  EtcdFailure failure{.message = "no reason given"};
  for (const char* name : {"error", "message"})
    if (const json::value* text = fields.if_contains(name); text != nullptr && text->is_string())
      failure.message = text->get_string();
  for (const char* name : {"code", "grpc_code"})
    if (auto code = number_field(fields, name); code && code.value() != 0)
      failure.grpc_code = code.value();
  return failure;
}

}  // namespace ptc
