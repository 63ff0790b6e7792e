#include "reshard/ptc/rule_set_parser.h"

#include <algorithm>
#include <charconv>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kRulesFormat = "ptc-rules/1";
constexpr uint64_t kMaxRuleNumber = UINT32_MAX;
constexpr uint64_t kMaxMultiple = 1 << 20;
// Every name of a model may be compared with all patterns behind all prefixes.
constexpr size_t kMaxPrefixes = 64;
constexpr size_t kMaxPatterns = 4096;
constexpr size_t kMaxTied = 64;     // rules with 'tied_head': each is held against every tensor
constexpr size_t kMaxKnownBy = 64;  // patterns: so is each of these
constexpr size_t kMaxStars = 32;    // keys with a '*': each looks at all of an object's members
constexpr size_t kMaxQuantisedParts = 64;
constexpr size_t kMaxProduct = 256;  // characters of "kv_heads*head_dim"

using Path = std::vector<std::string>;

Path operator/(Path path, std::string part) {
  path.push_back(std::move(part));
  return path;
}
Path operator/(Path path, size_t index) { return std::move(path) / std::to_string(index); }

/// Whether it is not the same to a pattern which number a component of a name is: it writes out
/// one, as in "mlp.0.weight" and "h.{0,x}" (and not in "w{1,2}"), or how many digits it has,
/// "*{expert}".
class NamesNumber {
 public:
  bool in(std::string_view pattern) {
    for (size_t i = 0; i < pattern.size(); ++i) {
      const char c = pattern[i];
      if (c == '.') end();
      else if (is_digit(c)) digit_ = true;
      else if (c == '{') i += 1 + braces(pattern.substr(i + 1, pattern.find('}', i) - i - 1));
      else if (c != '*') other_ = true;
      else if (i == 0 || pattern[i - 1] != '*') ++wild_;
    }
    end();
    return found_;
  }

 private:
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static bool is_number(std::string_view text) {  // also none
    return std::all_of(text.begin(), text.end(), is_digit);
  }
  void end() {
    found_ |= (digit_ || wild_ > 1) && !other_;
    digit_ = other_ = false;
    wild_ = 0;
  }

  size_t braces(std::string_view inside) {
    if (inside == "layer" || inside == "expert") {
      ++wild_;
      return inside.size();
    }
    const NamesNumber before = *this;
    bool digit = false, other = true;
    int wild = 0;
    for (size_t begin = 0; begin <= inside.size();) {
      const size_t end = std::min(inside.find(',', begin), inside.size());
      NamesNumber one = before;
      one.word(inside.substr(begin, end - begin));
      found_ |= one.found_;
      digit |= one.digit_;
      wild = std::max(wild, one.wild_);
      other &= one.other_;  // one that may be a number is enough
      begin = end + 1;
    }
    digit_ = digit;
    other_ = other;
    wild_ = wild;
    return inside.size();
  }
  void word(std::string_view text) {
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('.', begin), text.size());
      const std::string_view part = text.substr(begin, end - begin);
      if (!is_number(part)) other_ = true;
      else if (!part.empty()) digit_ = true;
      if (end < text.size()) this->end();
      begin = end + 1;
    }
  }

  bool digit_ = false;  // in the component
  bool other_ = false;  // and what is in no number
  int wild_ = 0;        // and what stands for several
  bool found_ = false;
};

bool names_number(std::string_view pattern) { return NamesNumber().in(pattern); }

}  // namespace

Error RuleSetParser::error(const Path& path, std::string_view message) const {
  return invalid_argument("{}: {}", json_place(text_, path), message);
}

Result<> RuleSetParser::known_keys(const json::object& object, const Path& path,
                                   const std::vector<std::string>& keys) const {
  for (const auto& member : object) {
    const std::string key(member.key());
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    const auto nearest = nearest_name(key, keys);
    return invalid_argument("{}: unknown key {}{}", json_place(text_, path / key, JsonPart::kKey),
                            ptc::quoted(key),
                            nearest ? fmt::format(" (did you mean '{}'?)", *nearest)
                                    : fmt::format("; known are {}", fmt::join(keys, ", ")));
  }
  return ok();
}

Result<std::string> RuleSetParser::text_member(const json::object& object, const std::string& key,
                                               const Path& path) const {
  const json::value* value = object.if_contains(key);
  if (!value) return std::string();
  if (!value->is_string() || value->get_string().empty()) {
    return error(path / key, fmt::format("'{}' must be a text that is not empty", key));
  }
  return std::string(std::string_view(value->get_string()));
}

Result<std::vector<std::string>> RuleSetParser::texts(const json::value& value,
                                                      const Path& path) const {
  if (!value.is_array()) {
    return error(path, fmt::format("{} must be a list of texts", ptc::quoted(path.back())));
  }
  std::vector<std::string> result;
  for (const json::value& item : value.get_array()) {
    if (!item.is_string()) return error(path / result.size(), "expected a text");
    result.emplace_back(std::string_view(item.get_string()));
  }
  return result;
}

Result<std::shared_ptr<const RuleSet>> RuleSetParser::parse() {
  PTC_TRY(const json::value value, parse_json(text_));
  if (!value.is_object()) return error({}, "a rule set is a JSON object: { … }");
  const json::object& object = value.get_object();
  PTC_TRY(known_keys(
      object, {},
      {"format", "family", "extends", "description", "model_types", "prefixes", "known_by",
       "mtp_layers", "wrappers", "facts", "tied", "scales", "quantised", "adapters", "rules"}));
  PTC_TRY(header(object));
  PTC_TRY(facts(object));
  PTC_TRY(tied(object));
  PTC_TRY(scales(object));
  PTC_TRY(quantised(object));
  PTC_TRY(adapters(object));
  PTC_TRY(wrappers(object));
  PTC_TRY(known_by(object));
  PTC_TRY(mtp_layers(object));
  PTC_TRY(rules(object));
  if (is_new_) {
    PTC_TRY(check_facts(object));
  }
  set_->text_ = extended_ ? merged_text(object) : std::string(text_);
  if (set_->text_.size() > JsonLimits().max_bytes) {
    return error({"extends"},
                 fmt::format("with what it extends the rule set has {} bytes; at most {} are "
                             "allowed",
                             set_->text_.size(), JsonLimits().max_bytes));
  }
  return std::shared_ptr<const RuleSet>(std::move(set_));
}

Result<> RuleSetParser::header(const json::object& object) {
  PTC_TRY(const std::string format, text_member(object, "format", {}));
  if (format != kRulesFormat) {
    return error({"format"}, fmt::format("'format' must be \"{}\"", kRulesFormat));
  }
  PTC_TRY(std::string description, text_member(object, "description", {}));
  PTC_TRY(const std::string base, text_member(object, "extends", {}));
  if (!base.empty()) {
    auto found = base_(base);
    if (!found) return error({"extends"}, found.error().message());
    extended_ = std::move(found).value();
    *set_ = *extended_;
    set_->rules_.clear();
    set_->adapter_rules_.clear();
  } else {
    set_->family_ = "custom";
    set_->prefixes_ = {""};
  }
  PTC_TRY(std::string family, text_member(object, "family", {}));
  if (!family.empty()) set_->family_ = std::move(family);
  if (!description.empty()) set_->description_ = std::move(description);
  if (const json::value* types = object.if_contains("model_types")) {
    PTC_TRY(set_->model_types_, texts(*types, {"model_types"}));
  }
  if (const json::value* prefixes = object.if_contains("prefixes")) {
    PTC_TRY(set_->prefixes_, texts(*prefixes, {"prefixes"}));
    auto& all = set_->prefixes_;
    if (std::find(all.begin(), all.end(), "") == all.end()) all.insert(all.begin(), "");
    if (all.size() > kMaxPrefixes) {
      return error({"prefixes"}, fmt::format("at most {} prefixes are allowed", kMaxPrefixes));
    }
  }
  return ok();
}

Result<> RuleSetParser::facts(const json::object& object) {
  const json::value* value = object.if_contains("facts");
  if (!value) return ok();
  if (!value->is_object()) return error({"facts"}, "'facts' must be an object");
  for (const auto& member : value->get_object()) {
    const std::string name(member.key());
    const Path path = {"facts", name};
    const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
    });
    if (!plain || (name[0] >= '0' && name[0] <= '9')) {
      return error(path, "a fact's name has small letters, digits and '_' only");
    }
    if (const auto number = whole_number(member.value())) {
      if (*number > kMaxRuleNumber) return error(path, "this number is too large");
      set_->fixed_facts_[name] = *number;
    } else if (member.value().is_array()) {
      PTC_TRY(set_->fact_keys_[name], texts(member.value(), path));
      for (const std::string& key : set_->fact_keys_[name])
        if (std::count(key.begin(), key.end(), '*') > 1)
          return error(path, fmt::format("{} has more than one '*'", ptc::quoted(key)));
      set_->fixed_facts_.erase(name);
    } else {
      return error(path, fmt::format("{} must be a whole number, or a list of config.json's keys "
                                     "that give it",
                                     ptc::quoted(name)));
    }
  }
  size_t stars = 0;
  for (const auto& [name, keys] : set_->fact_keys_)
    for (const std::string& key : keys) stars += key.find('*') != key.npos;
  if (stars > kMaxStars)
    return error({"facts"},
                 fmt::format("{} keys have a '*'; at most {} are allowed", stars, kMaxStars));
  return ok();
}

/// A number that no rule asks for is a name misspelt.
Result<> RuleSetParser::check_facts(const json::object& object) const {
  const json::value* own = object.if_contains("facts");
  if (!own || !extended_) return ok();
  std::vector<std::string> known = {"layers",         "experts",
                                    "vocab",          "act_order",
                                    "group_size",     "weight_bits",
                                    "heads",          "kv_heads",
                                    "head_dim",       "value_head_dim",
                                    "layer_heads",    "layer_kv_heads",
                                    "layer_head_dim", "layer_value_head_dim"};
  for (const auto& fact : extended_->fact_keys_) known.push_back(fact.first);
  for (const auto& fact : extended_->fixed_facts_) known.push_back(fact.first);
  const auto add = [&](const RuleNumber& number) {
    const auto* product = std::get_if<std::string>(&number);
    for (size_t begin = 0; product != nullptr && begin <= product->size();) {
      const size_t end = std::min(product->find('*', begin), product->size());
      known.push_back(product->substr(begin, end - begin));
      begin = end + 1;
    }
  };
  for (const Rule& rule : set_->rules_) {
    if (!rule.cut) continue;
    for (const CutPart& part : rule.cut->parts) {
      add(part.size);
      if (part.heads) add(*part.heads);
      for (const auto& fact : part.when) known.push_back(fact.first);
    }
  }
  for (const auto& fact : own->get_object()) {
    const std::string name(fact.key());
    if (fact.value().is_array() || std::find(known.begin(), known.end(), name) != known.end())
      continue;
    const auto nearest = nearest_name(name, known);
    return error({"facts", name},
                 fmt::format("no rule uses the fact {}{}", ptc::quoted(name),
                             nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : ""));
  }
  return ok();
}

Result<> RuleSetParser::tied(const json::object& object) {
  const json::value* value = object.if_contains("tied");
  if (!value) return ok();
  if (value->is_bool()) {
    set_->tied_keys_.clear();
    set_->tied_default_ = value->get_bool();
    return ok();
  }
  if (!value->is_object()) {
    return error({"tied"}, "'tied' must be true, false or {\"key\": …, \"default\": …}");
  }
  const json::object& tied = value->get_object();
  PTC_TRY(known_keys(tied, {"tied"}, {"key", "default", "default_of"}));
  set_->tied_keys_.clear();
  if (const json::value* keys = tied.if_contains("key"); keys && keys->is_array()) {
    PTC_TRY(set_->tied_keys_, texts(*keys, {"tied", "key"}));
  } else {
    PTC_TRY(std::string key, text_member(tied, "key", {"tied"}));
    if (!key.empty()) set_->tied_keys_.push_back(std::move(key));
  }
  set_->tied_default_.reset();
  if (tied.contains("default")) {
    PTC_TRY(set_->tied_default_, flag(tied, "default", {"tied"}));
  }
  set_->tied_types_.clear();
  if (const json::value* types = tied.if_contains("default_of")) {
    PTC_TRY(set_->tied_types_, texts(*types, {"tied", "default_of"}));
  }
  return ok();
}

Result<> RuleSetParser::scales(const json::object& object) {
  const json::value* value = object.if_contains("scales");
  if (!value) return ok();
  if (!value->is_object()) {
    return error({"scales"}, "'scales' must be {\"suffix\": …, \"block\": …}");
  }
  const json::object& scales = value->get_object();
  PTC_TRY(known_keys(scales, {"scales"}, {"suffix", "block"}));
  PTC_TRY(std::string suffix, text_member(scales, "suffix", {"scales"}));
  PTC_TRY(const auto block, whole(scales, "block", {"scales"}, 1, kMaxMultiple));
  if (suffix.empty() || !block) return error({"scales"}, "'scales' needs 'suffix' and 'block'");
  set_->scales_ = BlockScales{std::move(suffix), *block};
  return ok();
}

Result<> RuleSetParser::quantised(const json::object& object) {
  const json::value* value = object.if_contains("quantised");
  if (!value) return ok();
  if (!value->is_array()) return error({"quantised"}, "'quantised' must be a list of objects");
  if (value->get_array().size() > kMaxQuantisedParts) {
    return error({"quantised"},
                 fmt::format("at most {} kinds of parts are allowed", kMaxQuantisedParts));
  }
  set_->quantised_.clear();
  for (const json::value& item : value->get_array()) {
    const Path path = Path{"quantised"} / set_->quantised_.size();
    if (!item.is_object()) return error(path, "a quantised weight's part must be an object");
    const json::object& members = item.get_object();
    PTC_TRY(known_keys(members, path, {"names", "suffixes", "axes", "groups", "order"}));
    QuantisedPart part;
    for (auto [key, list] :
         {std::pair{"names", &part.names}, std::pair{"suffixes", &part.suffixes}}) {
      const json::value* words = members.if_contains(key);
      if (!words) continue;
      PTC_TRY(*list, texts(*words, path / key));
      for (size_t i = 0; i < list->size(); ++i) {
        if ((*list)[i].empty() || (*list)[i].find('.') != std::string::npos)
          return error(path / key / i, "this is a component of a name, or its end");
      }
    }
    if (part.names.empty() && part.suffixes.empty())
      return error(path, "a quantised weight's part needs 'names' or 'suffixes'");
    PTC_TRY(const std::string axes, text_member(members, "axes", path));
    using Axes = QuantisedPart::Axes;
    const std::pair<const char*, Axes> kinds[] = {
        {"weight", Axes::kWeight}, {"in_out", Axes::kInOut}, {"in", Axes::kIn},
        {"one", Axes::kOne},       {"heads", Axes::kHeads},  {"whole", Axes::kWhole}};
    const auto kind = std::find_if(std::begin(kinds), std::end(kinds),
                                   [&](const auto& each) { return each.first == axes; });
    if (kind == std::end(kinds)) {
      return error(
          path / "axes",
          "'axes' must be \"weight\", \"in_out\", \"in\", \"one\", \"heads\" or \"whole\"");
    }
    part.axes = kind->second;
    PTC_TRY(part.groups, flag(members, "groups", path));
    PTC_TRY(part.order, flag(members, "order", path));
    set_->quantised_.push_back(std::move(part));
  }
  return ok();
}

Result<> RuleSetParser::adapters(const json::object& object) {
  const json::value* value = object.if_contains("adapters");
  if (!value) return ok();
  if (!value->is_object()) {
    return error({"adapters"}, "'adapters' must be {\"in\": …, \"out\": …}");
  }
  const json::object& members = value->get_object();
  PTC_TRY(known_keys(members, {"adapters"}, {"prefix", "wrappers", "in", "out"}));
  Adapters adapters;
  PTC_TRY(adapters.prefix, text_member(members, "prefix", {"adapters"}));
  for (auto [key, list] : {std::pair{"wrappers", &adapters.wrappers}, std::pair{"in", &adapters.in},
                           std::pair{"out", &adapters.out}}) {
    const json::value* words = members.if_contains(key);
    if (!words) continue;
    PTC_TRY(*list, texts(*words, {"adapters", key}));
  }
  set_->adapters_ = std::move(adapters);
  return ok();
}

Result<> RuleSetParser::wrappers(const json::object& object) {
  const json::value* value = object.if_contains("wrappers");
  if (!value) return ok();
  if (!value->is_object()) {
    return error({"wrappers"},
                 "'wrappers' must be {\"leading\": …, \"anywhere\": …, \"holders\": …}");
  }
  const json::object& members = value->get_object();
  PTC_TRY(known_keys(members, {"wrappers"}, {"leading", "anywhere", "holders"}));
  Wrappers wrappers;
  set_->holders_.clear();
  for (auto [key, list] :
       {std::pair{"leading", &wrappers.leading}, std::pair{"anywhere", &wrappers.anywhere},
        std::pair{"holders", &set_->holders_}}) {
    const json::value* words = members.if_contains(key);
    if (!words) continue;
    PTC_TRY(*list, texts(*words, {"wrappers", key}));
    for (size_t i = 0; i < list->size(); ++i) {
      if ((*list)[i].empty() || (*list)[i].find('.') != std::string::npos) {
        return error({"wrappers", key, std::to_string(i)}, "a wrapper is one component of a name");
      }
    }
  }
  set_->wrappers_ = std::move(wrappers);
  return ok();
}

Result<> RuleSetParser::known_by(const json::object& object) {
  const json::value* value = object.if_contains("known_by");
  if (!value) return ok();
  if (!value->is_array()) return error({"known_by"}, "'known_by' must be a list of names");
  set_->known_by_.clear();
  for (const json::value& item : value->get_array()) {
    PTC_TRY(auto name, pattern(item, {"known_by", std::to_string(set_->known_by_.size())}));
    set_->known_by_.push_back(std::move(name));
    if (is_new_ && set_->known_by_.size() > kMaxKnownBy)
      return error({"known_by"}, fmt::format("at most {} names are allowed", kMaxKnownBy));
  }
  return ok();
}

Result<> RuleSetParser::mtp_layers(const json::object& object) {
  const json::value* value = object.if_contains("mtp_layers");
  if (!value) return ok();
  PTC_TRY(set_->mtp_layers_, texts(*value, {"mtp_layers"}));
  for (size_t i = 0; i < set_->mtp_layers_.size(); ++i) {
    const Path path{"mtp_layers", std::to_string(i)};
    PTC_TRY(const NamePattern layers, pattern(value->get_array()[i], path));
    if (layers.has_layer() || layers.text().find("{expert}") != std::string::npos)
      return error(path, "these are not numbered with the layers of the model: \"mtp.layers.*\"");
  }
  return ok();
}

Result<> RuleSetParser::rules(const json::object& object) {
  if (const json::value* value = object.if_contains("rules")) {
    if (!value->is_array()) return error({"rules"}, "'rules' must be a list of objects");
    for (const json::value& item : value->get_array()) {
      PTC_TRY(Rule parsed, rule(item, {"rules", std::to_string(set_->rules_.size())}));
      set_->rules_.push_back(std::move(parsed));
    }
  }
  if (extended_) {
    set_->rules_.insert(set_->rules_.end(), extended_->rules_.begin(),
                        extended_->rules_.begin() + extended_->written_rules_);
  }
  const auto check_patterns = [this](std::string_view which) -> Result<> {
    size_t patterns = 0;
    for (const Rule& rule : set_->rules_) patterns += rule.names.size();
    if (patterns <= kMaxPatterns) return ok();
    return error({"rules"}, fmt::format("the rules have {} name patterns{}; at most {} are allowed",
                                        patterns, which, kMaxPatterns));
  };
  PTC_TRY(check_patterns(""));
  const auto tied = std::count_if(set_->rules_.begin(), set_->rules_.end(),
                                  [](const Rule& rule) { return rule.tied_head.has_value(); });
  if (is_new_ && tied > static_cast<ptrdiff_t>(kMaxTied))
    return error({"rules"},
                 fmt::format("{} rules have 'tied_head'; at most {} are allowed", tied, kMaxTied));
  if (auto derived = set_->derive_mtp_rules(kMaxPatterns); !derived)
    return error({"mtp_layers"}, derived.error().message());
  set_->derive_adapter_rules();
  PTC_TRY(check_patterns(", with those that mtp_layers and adapters add"));
  for (const Rule& rule : set_->rules_)
    for (const NamePattern& name : rule.names) set_->numbers_matter_ |= names_number(name.text());
  for (const std::string& prefix : set_->prefixes_) set_->numbers_matter_ |= names_number(prefix);
  return ok();
}

Result<NamePattern> RuleSetParser::pattern(const json::value& value, const Path& path) const {
  if (!value.is_string()) return error(path, "a name pattern must be a text");
  auto parsed = NamePattern::parse(std::string_view(value.get_string()));
  if (!parsed) return error(path, parsed.error().message());
  return parsed;
}

Result<Rule> RuleSetParser::rule(const json::value& value, const Path& path) const {
  if (!value.is_object()) return error(path, "a rule must be an object");
  const json::object& object = value.get_object();
  PTC_TRY(known_keys(object, path,
                     {"names", "cut", "expert_axis", "experts_along", "folded_into", "stage",
                      "tied_head", "tied_when", "with_mtp", "not_with", "inputs_first", "buffer",
                      "or_one", "needs_type", "attention", "description"}));
  Rule rule;
  PTC_TRY(rule.stage, stage(object, path));
  const json::value* names = object.if_contains("names");
  if (!names || !names->is_array() || names->get_array().empty()) {
    return error(path / "names", "a rule needs 'names', a list of name patterns");
  }
  for (const json::value& name : names->get_array()) {
    const Path place = path / "names" / rule.names.size();
    PTC_TRY(NamePattern parsed, pattern(name, place));
    if (rule.stage == StagePlace::kLayer && !parsed.has_layer()) {
      return error(place, fmt::format("name pattern {} has no {{layer}}: say on which pipeline "
                                      "stage its tensors are, \"stage\": \"first\", \"last\" or "
                                      "\"all\"",
                                      ptc::quoted(parsed.text())));
    }
    rule.names.push_back(std::move(parsed));
  }
  if (const json::value* found = object.if_contains("cut")) {
    PTC_TRY(rule.cut, cut(*found, path / "cut"));
  }
  PTC_TRY(const auto expert_axis, whole(object, "expert_axis", path, 0, 7));
  if (expert_axis) rule.expert_axis = static_cast<uint32_t>(*expert_axis);
  if (rule.cut && rule.expert_axis == rule.cut->axis) {
    return error(path / "expert_axis", "'expert_axis' and the cut's 'axis' must differ");
  }
  PTC_TRY(const auto experts_along, whole(object, "experts_along", path, 0, 7));
  if (experts_along) rule.experts_along = static_cast<uint32_t>(*experts_along);
  if (experts_along && (rule.expert_axis || (rule.cut && rule.cut->axis == *experts_along)))
    return error(path / "experts_along", "'experts_along' is of an axis that nothing cuts");
  PTC_TRY(const auto folded_into, whole(object, "folded_into", path, 0, 6));
  if (folded_into) {
    if (rule.expert_axis != 0)
      return error(path / "folded_into", "'folded_into' needs \"expert_axis\": 0");
    rule.folded_into = static_cast<uint32_t>(*folded_into);
  }
  if (const json::value* found = object.if_contains("tied_head")) {
    PTC_TRY(rule.tied_head, pattern(*found, path / "tied_head"));
  }
  if (const json::value* found = object.if_contains("tied_when")) {
    PTC_TRY(rule.tied_when, pattern(*found, path / "tied_when"));
    if (!rule.tied_head) return error(path / "tied_when", "'tied_when' needs 'tied_head'");
  }
  PTC_TRY(rule.with_mtp, flag(object, "with_mtp", path));
  if (rule.with_mtp && rule.stage != StagePlace::kFirst)
    return error(path / "with_mtp", "'with_mtp' is of what is on the \"first\" stage");
  if (const json::value* sizes = object.if_contains("not_with")) {
    PTC_TRY(rule.not_with, texts(*sizes, path / "not_with"));
    for (const std::string& size : rule.not_with)
      if (size != "tp" && size != "pp" && size != "ep")
        return error(path / "not_with", "'not_with' is a list of \"tp\", \"pp\" and \"ep\"");
  }
  PTC_TRY(rule.inputs_first, flag(object, "inputs_first", path));
  PTC_TRY(rule.buffer, flag(object, "buffer", path));
  PTC_TRY(rule.or_one, flag(object, "or_one", path));
  PTC_TRY(rule.needs_type, flag(object, "needs_type", path));
  PTC_TRY(rule.attention, attention(object, path));
  PTC_TRY(rule.description, text_member(object, "description", path));
  return rule;
}

Result<AttentionPart> RuleSetParser::attention(const json::object& object, const Path& path) const {
  PTC_TRY(const std::string word, text_member(object, "attention", path));
  if (word.empty()) return AttentionPart::kNone;
  if (word == "queries") return AttentionPart::kQueries;
  if (word == "keys") return AttentionPart::kKeys;
  if (word == "values") return AttentionPart::kValues;
  if (word == "output") return AttentionPart::kOutput;
  if (word == "fused") return AttentionPart::kFused;
  return error(path / "attention",
               "'attention' must be \"queries\", \"keys\", \"values\", \"output\" or \"fused\"");
}

Result<StagePlace> RuleSetParser::stage(const json::object& object, const Path& path) const {
  PTC_TRY(const std::string word, text_member(object, "stage", path));
  if (word.empty() || word == "layer") return StagePlace::kLayer;
  if (word == "first") return StagePlace::kFirst;
  if (word == "last") return StagePlace::kLast;
  if (word == "mtp") return StagePlace::kMtp;
  if (word == "all") return StagePlace::kAll;
  return error(path / "stage",
               "'stage' must be \"layer\", \"first\", \"last\", \"mtp\" or \"all\"");
}

Result<TensorCut> RuleSetParser::cut(const json::value& value, const Path& path) const {
  if (!value.is_object()) return error(path, "'cut' must be an object");
  const json::object& object = value.get_object();
  PTC_TRY(known_keys(
      object, path,
      {"axis", "heads", "share", "split", "parts", "block", "vocab_multiple", "pad_single_rank"}));
  TensorCut cut;
  PTC_TRY(const auto axis, whole(object, "axis", path, 0, 7));
  if (!axis) return error(path, "'cut' needs 'axis'");
  cut.axis = static_cast<uint32_t>(*axis);
  PTC_TRY(const auto block, whole(object, "block", path, 1, kMaxMultiple));
  cut.block = block.value_or(1);
  PTC_TRY(vocabulary(object, path, cut));
  const json::value* parts = object.if_contains("parts");
  if (!parts) {
    PTC_TRY(CutPart single, part(object, path));
    cut.parts.push_back(std::move(single));
    return cut;
  }
  for (const char* key : {"heads", "share", "split", "vocab_multiple"}) {
    if (object.contains(key)) {
      return error(path / key, fmt::format("'{}' and 'parts' exclude each other", key));
    }
  }
  if (!parts->is_array() || parts->get_array().empty()) {
    return error(path / "parts", "'parts' must be a list of objects");
  }
  for (const json::value& item : parts->get_array()) {
    const Path place = path / "parts" / cut.parts.size();
    if (!item.is_object()) return error(place, "a part must be an object");
    PTC_TRY(known_keys(item.get_object(), place, {"size", "heads", "share", "split", "when"}));
    PTC_TRY(CutPart parsed, part(item.get_object(), place));
    cut.parts.push_back(std::move(parsed));
  }
  return cut;
}

Result<> RuleSetParser::vocabulary(const json::object& object, const Path& path,
                                   TensorCut& cut) const {
  PTC_TRY(cut.vocab_multiple, whole(object, "vocab_multiple", path, 1, kMaxMultiple));
  PTC_TRY(cut.pad_single_rank, flag(object, "pad_single_rank", path));
  if (cut.pad_single_rank && !cut.vocab_multiple) {
    return error(path / "pad_single_rank", "'pad_single_rank' needs 'vocab_multiple'");
  }
  if (cut.vocab_multiple && (object.contains("heads") || cut.block != 1)) {
    return error(path / "vocab_multiple", "a vocabulary has neither 'heads' nor 'block'");
  }
  return ok();
}

Result<CutPart> RuleSetParser::part(const json::object& object, const Path& path) const {
  CutPart part;
  if (const json::value* size = object.if_contains("size")) {
    PTC_TRY(part.size, rule_number(*size, path / "size", 0));
  }
  if (const json::value* heads = object.if_contains("heads")) {
    PTC_TRY(part.heads, rule_number(*heads, path / "heads", 1));
  }
  PTC_TRY(part.share, flag(object, "share", path));
  PTC_TRY(part.split, flag(object, "split", path));
  if (part.share && !part.heads) return error(path / "share", "'share' needs 'heads'");
  if (part.split && !part.heads) return error(path / "split", "'split' needs 'heads'");
  if (part.share && part.split)
    return error(path / "split", "'share' and 'split' exclude each other");
  if (const json::value* when = object.if_contains("when")) {
    if (!when->is_object()) return error(path / "when", "'when' must be an object of facts");
    for (const auto& [fact, value] : when->get_object()) {
      PTC_TRY(rule_number(json::value(fact), path / "when" / fact, 0));
      PTC_TRY(const auto number, whole(when->get_object(), fact, path / "when", 0, kMaxRuleNumber));
      part.when.emplace_back(fact, number.value_or(0));
    }
  }
  return part;
}

Result<RuleNumber> RuleSetParser::rule_number(const json::value& value, const Path& path,
                                              uint64_t min) const {
  if (const auto number = whole_number(value)) {
    if (*number < min || *number > kMaxRuleNumber) {
      return error(path, fmt::format("this number must be from {} to {}", min, kMaxRuleNumber));
    }
    return RuleNumber(*number);
  }
  if (!value.is_string()) return error(path, "expected a whole number or a fact's name");
  const std::string_view text(value.get_string());
  if (text.size() > kMaxProduct) {
    return error(path, fmt::format("a product has at most {} characters", kMaxProduct));
  }
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('*', begin), text.size());
    const std::string_view factor = text.substr(begin, end - begin);
    begin = end + 1;
    uint32_t number = 0;
    auto [last, failed] = std::from_chars(factor.data(), factor.data() + factor.size(), number);
    if (failed == std::errc() && last == factor.data() + factor.size() && number > 0) continue;
    if (set_->fixed_facts_.contains(factor) || set_->fact_keys_.contains(std::string(factor)))
      continue;
    std::vector<std::string> known;
    for (const auto& fact : set_->fact_keys_) known.push_back(fact.first);
    for (const auto& fact : set_->fixed_facts_) known.push_back(fact.first);
    const auto nearest = nearest_name(factor, known);
    return error(path, fmt::format("unknown fact {}{}", quoted(factor),
                                   nearest ? fmt::format(" (did you mean '{}'?)", *nearest)
                                           : std::string("; name it in 'facts'")));
  }
  return RuleNumber(std::string(text));
}

Result<std::optional<uint64_t>> RuleSetParser::whole(const json::object& object,
                                                     const std::string& key, const Path& path,
                                                     uint64_t min, uint64_t max) const {
  const json::value* value = object.if_contains(key);
  if (!value) return std::optional<uint64_t>();
  const auto number = whole_number(*value);
  if (!number || *number < min || *number > max) {
    return error(path / key,
                 fmt::format("'{}' must be a whole number from {} to {}", key, min, max));
  }
  return number;
}

Result<bool> RuleSetParser::flag(const json::object& object, const std::string& key,
                                 const Path& path) const {
  const json::value* value = object.if_contains(key);
  if (!value) return false;
  if (!value->is_bool()) return error(path / key, fmt::format("'{}' must be true or false", key));
  return value->get_bool();
}

std::string RuleSetParser::merged_text(const json::object& object) const {
  auto base = parse_json(extended_->text());
  PTC_CHECK(base.has_value());  // it was parsed before
  json::object merged = std::move(base.value().as_object());
  merged["family"] = set_->family_;
  for (const char* key : {"description", "model_types", "prefixes", "known_by", "mtp_layers",
                          "wrappers", "tied", "scales", "quantised", "adapters"}) {
    if (const json::value* value = object.if_contains(key)) merged[key] = *value;
  }
  if (const json::value* facts = object.if_contains("facts")) {
    if (!merged.contains("facts")) merged["facts"] = json::object();
    for (const auto& fact : facts->get_object()) {
      merged["facts"].as_object()[fact.key()] = fact.value();
    }
  }
  json::array rules;
  if (const json::value* own = object.if_contains("rules")) rules = own->get_array();
  if (const json::value* inherited = merged.if_contains("rules")) {
    for (const json::value& rule : inherited->get_array()) rules.push_back(rule);
  }
  merged["rules"] = std::move(rules);
  return pretty_json(merged);
}

}  // namespace ptc
