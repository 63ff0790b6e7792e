#include "fs/report/autoscale_note.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/json/object.hpp>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr size_t kMostOfANote = 64 << 10, kMostOfAState = 16, kMostOfAReason = 256;

uint64_t count_of(const json::object& object, std::string_view key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr ? whole_number(*value).value_or(0) : 0;
}

const json::object& part_of(const json::object& object, std::string_view key) {
  static const json::object kNothing;
  const json::value* value = object.if_contains(key);
  return value != nullptr && value->is_object() ? value->get_object() : kNothing;
}

}  // namespace

std::optional<AutoscaleNote> read_autoscale_note(const std::string& files_dir) {
  const auto text =
      read_text_file(AT_FDCWD, files_dir + "/autoscale.json", kMostOfANote, FileKind::kOwn);
  if (text.has_error()) return std::nullopt;
  const auto value = parse_json(text.value(), {kMostOfANote, 16});
  if (value.has_error() || !value.value().is_object()) return std::nullopt;
  const json::object& object = value.value().get_object();
  if (json_text(object, "format") != "ptc-autoscale/1") return std::nullopt;
  AutoscaleNote note;
  note.state = json_text(object, "state");
  const bool is_word = std::all_of(note.state.begin(), note.state.end(),
                                   [](char c) { return (c >= 'a' && c <= 'z') || c == ' '; });
  if (!is_word || note.state.empty() || note.state.size() > kMostOfAState) return std::nullopt;
  const json::object& has = part_of(object, "has");
  note.gpus = count_of(has, "gpus");
  note.batch = count_of(has, "batch");
  note.changes = count_of(object, "changes");
  note.failures = count_of(object, "failures");
  const json::object& decision = part_of(object, "decision");
  note.why = printable(json_text(decision, "why"), kMostOfAReason);
  note.from_gpus = count_of(part_of(decision, "from"), "gpus");
  note.to_gpus = count_of(part_of(decision, "to"), "gpus");
  const json::value* price = decision.if_contains("price_s");
  if (price != nullptr && price->is_number()) note.price_s = price->to_number<double>();
  return note;
}

}  // namespace ptc
