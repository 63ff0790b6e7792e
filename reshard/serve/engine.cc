#include "reshard/serve/engine.h"

#include <fmt/args.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "reshard/serve/builtin_engines.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kFormat = "ptc-engine/1";
constexpr std::string_view kAny = "{x}", kExpert = "{expert}";

std::optional<uint32_t> number_in(std::string_view text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (text.size() > 1 && text[0] == '0') return std::nullopt;
  return number;
}

}  // namespace

Result<NameTail> NameTail::parse(std::string_view text) {
  NameTail tail;
  while (true) {
    const size_t dot = text.find('.');
    const std::string_view component = text.substr(0, dot);
    const bool special = component == kAny || component == kExpert;
    if (component.empty() || (!special && component.find_first_of("{}*") != component.npos))
      return invalid_argument("'{}' is no component of a name", component);
    tail.components_.emplace_back(component);
    if (dot == text.npos) return tail;
    text.remove_prefix(dot + 1);
  }
}

std::optional<NameTail::Match> NameTail::match(std::string_view name) const {
  Match match;
  size_t end = name.size();
  for (auto component = components_.rbegin(); component != components_.rend(); ++component) {
    if (end == std::string_view::npos) return std::nullopt;
    const size_t dot = end == 0 ? name.npos : name.rfind('.', end - 1);
    match.begin = dot == name.npos ? 0 : dot + 1;
    const std::string_view here = name.substr(match.begin, end - match.begin);
    if (*component == kAny) match.x = here;
    else if (*component == kExpert) match.expert = number_in(here);
    if (*component == kExpert ? !match.expert : *component != kAny && *component != here)
      return std::nullopt;
    end = dot;
  }
  return match;
}

std::string NameTail::put(std::string_view name, const Match& match) const {
  std::string text(name.substr(0, match.begin));
  for (size_t i = 0; i < components_.size(); ++i) {
    if (i > 0) text += '.';
    text += components_[i] == kAny ? match.x : std::string_view(components_[i]);
  }
  return text;
}

bool NameTail::has_expert() const {
  return std::find(components_.begin(), components_.end(), kExpert) != components_.end();
}

/// Reads engines/*.json, which are ours: an error says what, and not where.
class EngineParser {
 public:
  static Result<Engine> parse(std::string_view text) {
    PTC_TRY(const json::value value, parse_json(text));
    if (!value.is_object()) return invalid_argument("an engine is a JSON object");
    const json::object& object = value.get_object();
    PTC_TRY(check_keys(object, {"format", "engine", "version", "sizes", "experts_of_neighbours",
                                "vocabulary_multiple", "vocabulary_times_tp", "remaining_layers",
                                "file", "file_of_stage", "tied", "joins", "constants", "unused",
                                "on_all_stages", "fp8_blocks", "families"}));
    if (json_text(object, "format") != kFormat)
      return invalid_argument("'format' must be \"{}\"", kFormat);
    Engine engine;
    engine.name_ = json_text(object, "engine");
    engine.version_ = json_text(object, "version");
    engine.file_ = json_text(object, "file");
    engine.file_of_stage_ = json_text(object, "file_of_stage");
    if (engine.name_.empty() || engine.file_.empty())
      return invalid_argument("'engine' and 'file' are required");
    const std::string sizes = json_text(object, "sizes");
    if (sizes != "" && sizes != "within_tp")
      return invalid_argument("'sizes' must be \"within_tp\", or left out");
    if (sizes != "") engine.sizes_ = Engine::Sizes::kWithinTp;
    PTC_TRY(engine.experts_of_neighbours_, flag(object, "experts_of_neighbours", true));
    PTC_TRY(engine.vocabulary_times_tp_, flag(object, "vocabulary_times_tp", false));
    PTC_TRY(const auto multiple, json_uint(object, "vocabulary_multiple", UINT32_MAX));
    engine.vocabulary_multiple_ = std::max<uint64_t>(multiple.value_or(1), 1);
    const std::string rest = json_text(object, "remaining_layers");
    if (rest != "before_last" && rest != "last")
      return invalid_argument("'remaining_layers' must be \"before_last\" or \"last\"");
    engine.rest_ = rest == "last" ? Engine::Rest::kLast : Engine::Rest::kBeforeLast;
    if (const json::value* blocks = object.if_contains("fp8_blocks")) {
      if (!blocks->is_object()) return invalid_argument("'fp8_blocks' is an object");
      PTC_TRY(check_keys(blocks->get_object(), {"constants"}));
      PTC_TRY(engine.fp8_blocks_, read_constants(blocks->get_object()));
    }
    Engine::Family common;
    PTC_TRY(read_names(object, common));
    if (const json::value* tied = object.if_contains("tied")) {
      if (!tied->is_object()) return invalid_argument("'tied' is an object");
      PTC_TRY(check_keys(tied->get_object(), {"embedding", "head"}));
      PTC_TRY(common.tied_embedding, NameTail::parse(json_text(tied->get_object(), "embedding")));
      PTC_TRY(common.tied_head, NameTail::parse(json_text(tied->get_object(), "head")));
    }
    PTC_TRY(const auto families, list(object, "families"));
    for (const json::value& one : families) {
      if (!one.is_object()) return invalid_argument("'families' has objects");
      const json::object& of = one.get_object();
      PTC_TRY(check_keys(of, {"model_types", "joins", "constants", "unused", "on_all_stages",
                              "without_head", "tied", "attention"}));
      Engine::Family family;
      PTC_TRY(family.model_types, words(of, "model_types"));
      PTC_TRY(read_names(of, family));
      // Its own come first.
      family.joins.insert(family.joins.end(), common.joins.begin(), common.joins.end());
      family.constants.insert(family.constants.end(), common.constants.begin(),
                              common.constants.end());
      family.unused.insert(family.unused.end(), common.unused.begin(), common.unused.end());
      family.on_all_stages.insert(family.on_all_stages.end(), common.on_all_stages.begin(),
                                  common.on_all_stages.end());
      const std::string tied = json_text(of, "tied");
      if (tied == "never") family.tied = Engine::Family::Tied::kNever;
      else if (tied == "in_one_stage") family.tied = Engine::Family::Tied::kInOneStage;
      else if (!tied.empty())
        return invalid_argument("'tied' of a family is \"in_one_stage\" or \"never\"");
      PTC_TRY(family.attention, tails(of, "attention"));
      PTC_TRY(const bool without_head, flag(of, "without_head", false));
      if (!without_head) {
        family.tied_embedding = common.tied_embedding;
        family.tied_head = common.tied_head;
      }
      engine.families_.push_back(std::move(family));
    }
    return engine;
  }

 private:
  static Result<> check_keys(const json::object& object, const std::vector<std::string>& known) {
    for (const auto& member : object)
      if (std::find(known.begin(), known.end(), std::string_view(member.key())) == known.end())
        return invalid_argument("unknown key '{}'", std::string_view(member.key()));
    return ok();
  }

  static Result<json::array> list(const json::object& object, std::string_view key) {
    const json::value* value = object.if_contains(key);
    if (value == nullptr) return json::array();
    if (!value->is_array()) return invalid_argument("'{}' is a list", key);
    return value->get_array();
  }

  static Result<std::vector<std::string>> words(const json::object& object, std::string_view key) {
    std::vector<std::string> texts;
    PTC_TRY(const auto values, list(object, key));
    for (const json::value& value : values) {
      if (!value.is_string()) return invalid_argument("'{}' has texts", key);
      texts.emplace_back(std::string_view(value.get_string()));
    }
    return texts;
  }

  static Result<std::vector<NameTail>> tails(const json::object& object, std::string_view key) {
    std::vector<NameTail> found;
    PTC_TRY(const auto texts, words(object, key));
    for (const std::string& text : texts) {
      PTC_TRY(found.emplace_back(), NameTail::parse(text));
    }
    return found;
  }

  static Result<bool> flag(const json::object& object, std::string_view key, bool otherwise) {
    const json::value* value = object.if_contains(key);
    if (value == nullptr) return otherwise;
    if (!value->is_bool()) return invalid_argument("'{}' is true or false", key);
    return value->get_bool();
  }

  static Result<std::vector<Engine::Constant>> read_constants(const json::object& object) {
    std::vector<Engine::Constant> found;
    PTC_TRY(const auto constants, list(object, "constants"));
    for (const json::value& value : constants) {
      if (!value.is_object()) return invalid_argument("'constants' has objects");
      const json::object& one = value.get_object();
      PTC_TRY(check_keys(one, {"to", "beside", "value"}));
      Engine::Constant constant;
      PTC_TRY(constant.to, NameTail::parse(json_text(one, "to")));
      PTC_TRY(constant.beside, NameTail::parse(json_text(one, "beside")));
      const json::value* number = one.if_contains("value");
      if (number == nullptr || !number->is_number()) return invalid_argument("'value' is a number");
      constant.value = static_cast<float>(number->to_number<double>());
      found.push_back(std::move(constant));
    }
    return found;
  }

  static Result<> read_names(const json::object& object, Engine::Family& family) {
    PTC_TRY(const auto joins, list(object, "joins"));
    for (const json::value& value : joins) {
      if (!value.is_object()) return invalid_argument("'joins' has objects");
      const json::object& one = value.get_object();
      PTC_TRY(check_keys(one, {"to", "of"}));
      Engine::Join join;
      PTC_TRY(join.to, NameTail::parse(json_text(one, "to")));
      PTC_TRY(const auto of, words(one, "of"));
      if (of.empty()) return invalid_argument("'of' has one tail of a name at least");
      for (const std::string& text : of) {
        PTC_TRY(join.of.emplace_back(), NameTail::parse(text));
        if (join.of.back().has_expert() != join.of.front().has_expert())
          return invalid_argument("of '{}' all have an expert's number, or none", text);
      }
      family.joins.push_back(std::move(join));
    }
    PTC_TRY(family.constants, read_constants(object));
    PTC_TRY(family.unused, tails(object, "unused"));
    PTC_TRY(family.on_all_stages, tails(object, "on_all_stages"));
    return ok();
  }
};

Result<Engine> Engine::parse(std::string_view text) { return EngineParser::parse(text); }

std::span<const Engine> Engine::all() {
  static const std::vector<Engine> engines = [] {
    std::vector<Engine> parsed;
    for (const BuiltinEngine& one : builtin_engines()) {
      Result<Engine> engine = parse(one.text);
      if (engine.has_error()) {  // found by its test
        fmt::print(stderr, "reshard/serve/engines/{}.json: {}\n", one.name,
                   engine.error().message());
        std::abort();
      }
      parsed.push_back(std::move(engine).value());
    }
    return parsed;
  }();
  return engines;
}

const Engine* Engine::find(std::string_view name) {
  for (const Engine& engine : all())
    if (engine.name() == name) return &engine;
  return nullptr;
}

const Engine::Family* Engine::family(std::string_view model_type) const {
  for (const Family& family : families_)
    for (const std::string& type : family.model_types)
      if (type == model_type) return &family;
  return nullptr;
}

std::vector<std::string> Engine::model_types() const {
  std::vector<std::string> types;
  for (const Family& family : families_)
    types.insert(types.end(), family.model_types.begin(), family.model_types.end());
  std::sort(types.begin(), types.end());
  return types;
}

std::vector<std::string> Engine::attention_types() const {
  std::vector<std::string> types;
  for (const Family& family : families_)
    if (!family.attention.empty())
      types.insert(types.end(), family.model_types.begin(), family.model_types.end());
  std::sort(types.begin(), types.end());
  return types;
}

Result<uint64_t> Engine::padded_vocabulary(uint64_t rows, uint32_t tp) const {
  const auto padded_to = [rows](uint64_t multiple) {
    return rows / multiple * multiple + (rows % multiple != 0 ? multiple : 0);
  };
  uint64_t padded = padded_to(vocabulary_multiple_);
  if (padded % tp != 0 && vocabulary_times_tp_) padded = padded_to(vocabulary_multiple_ * tp);
  if (padded % tp != 0)
    return invalid_argument("{} pads a vocabulary of {} to {}, which tp = {} does not divide",
                            name_, rows, padded, tp);
  return padded;
}

std::vector<uint32_t> Engine::stages(uint32_t layers, uint32_t pp) const {
  std::vector<uint32_t> stages(pp, layers / pp);
  const uint32_t rest = layers % pp, last = rest_ == Rest::kLast ? 0 : 1;
  for (uint32_t i = 0; i < rest; ++i) ++stages[pp - 1 - last - i];
  return stages;
}

std::string Engine::file_name(uint32_t tp, uint32_t pp, uint32_t stages) const {
  return fmt::format(fmt::runtime(stages > 1 && has_stage_files() ? file_of_stage_ : file_),
                     fmt::arg("tp", tp), fmt::arg("pp", pp));
}

}  // namespace ptc
