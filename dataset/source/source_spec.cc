#include "dataset/source/source_spec.h"

#include <algorithm>
#include <array>

#include "store/base/json_settings.h"

namespace ptc {
namespace {

const std::vector<std::string> kSourceKeys = {"format", "shards", "on_error", "fingerprint"};
constexpr std::array kAllFormats = {SourceFormat::kTar,      SourceFormat::kMds,
                                    SourceFormat::kMegatron, SourceFormat::kTfrecord,
                                    SourceFormat::kJsonl,    SourceFormat::kFiles};

/// Reads source.json; every error has its place.
class SourceParser : JsonSettings {
 public:
  SourceParser(std::string_view text, const json::object& object) : JsonSettings(text, object) {}

  Result<SourceSpec> parse() const {
    PTC_TRY(check_keys(kSourceKeys));
    SourceSpec spec;
    PTC_TRY(format(spec));
    PTC_TRY(shards(spec));
    if (const json::value* value = object_.if_contains("on_error")) {
      const std::string_view word = word_of(*value);
      if (word != "refuse" && word != "skip")
        return error({"on_error"}, "'on_error' must be \"refuse\" or \"skip\"");
      if (word == "skip") spec.on_error = OnError::kSkip;
    }
    if (const json::value* value = object_.if_contains("fingerprint")) {
      const std::string_view word = word_of(*value);
      if (word != "places" && word != "content")
        return error({"fingerprint"}, "'fingerprint' must be \"places\" or \"content\"");
      spec.fingerprint_of_all_content = word == "content";
    }
    return spec;
  }

 private:
  static std::string_view word_of(const json::value& value) {
    return value.is_string() ? std::string_view(value.get_string()) : std::string_view();
  }

  Result<> format(SourceSpec& spec) const {
    const json::value* value = object_.if_contains("format");
    if (!value || word_of(*value) == "auto") return ok();
    for (SourceFormat known : kAllFormats)
      if (word_of(*value) == format_name(known)) spec.format = known;
    if (!spec.format) {
      return error({"format"},
                   "'format' must be \"auto\", \"tar\", \"mds\", \"megatron\", \"tfrecord\", "
                   "\"jsonl\" or \"files\"");
    }
    return ok();
  }

  Result<> shards(SourceSpec& spec) const {
    const json::value* value = object_.if_contains("shards");
    if (!value) {
      return error({}, "'shards' is missing: a directory, a glob, a file, or a list of these");
    }
    if (!value->is_array()) return shard(*value, {"shards"}, spec);
    const json::array& list = value->get_array();
    if (list.empty()) return error({"shards"}, "'shards' is an empty list");
    for (size_t i = 0; i < list.size(); ++i) {
      PTC_TRY(shard(list[i], {"shards", std::to_string(i)}, spec));
    }
    return ok();
  }

  Result<> shard(const json::value& value, const std::vector<std::string>& path,
                 SourceSpec& spec) const {
    const bool good = value.is_string() && value.get_string().starts_with('/') &&
                      value.get_string().find('\0') == json::string::npos;
    if (!good) return error(path, "a path of shards must be a text that begins with '/'");
    spec.shards.emplace_back(std::string_view(value.get_string()));
    return ok();
  }
};

}  // namespace

std::string_view format_name(SourceFormat format) {
  switch (format) {
    case SourceFormat::kTar:
      return "tar";
    case SourceFormat::kMds:
      return "mds";
    case SourceFormat::kMegatron:
      return "megatron";
    case SourceFormat::kTfrecord:
      return "tfrecord";
    case SourceFormat::kJsonl:
      return "jsonl";
    case SourceFormat::kFiles:
      break;
  }
  return "files";
}

Result<SourceSpec> parse_source(std::string_view text) {
  PTC_TRY(const json::value value, parse_json(text));
  if (!value.is_object()) {
    return invalid_argument("{}: a source is a JSON object: {{\"shards\": …}}",
                            json_place(text, {}));
  }
  return SourceParser(text, value.get_object()).parse();
}

}  // namespace ptc
