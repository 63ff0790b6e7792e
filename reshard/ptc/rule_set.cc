#include "reshard/ptc/rule_set.h"

#include <algorithm>
#include <unordered_set>

#include "reshard/ptc/builtin_rules.h"
#include "reshard/ptc/rule_set_parser.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr uint32_t kNoRule = UINT32_MAX;
constexpr std::string_view kNone = "none";

const JsonLimits kConfigLimits = {.max_bytes = 4 << 20, .max_depth = 32};

/// `name` with every component that is a number as '#'.
void without_numbers(std::string_view name, std::string& key) {
  key.clear();
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view component = name.substr(begin, end - begin);
    // Only what {layer} and {expert} accept too: no superfluous zeros, below 2³¹.
    const bool number = !component.empty() && component.size() <= 9 &&
                        (component[0] != '0' || component.size() == 1) &&
                        std::all_of(component.begin(), component.end(),
                                    [](char c) { return c >= '0' && c <= '9'; });
    key += number ? std::string_view("#") : component;
    if (end < name.size()) key += '.';
    begin = end + 1;
  }
}

Result<std::shared_ptr<const RuleSet>> parse_with_base(std::string_view text, int depth,
                                                       bool is_new = false);

Result<std::shared_ptr<const RuleSet>> parse_builtin(std::string_view family, int depth) {
  if (family == kNone) return RuleSet::none();
  for (const BuiltinRules& rules : builtin_rules()) {
    if (rules.family != family) continue;
    if (static_cast<size_t>(depth) > std::size(builtin_rules()))
      return invalid_argument("rule sets extend each other in a circle");
    auto parsed = parse_with_base(rules.text, depth);
    if (!parsed) return std::move(parsed).error().with_context(fmt::format("{}.json", family));
    return parsed;
  }
  const std::vector<std::string> families = RuleSet::builtin_families();
  const auto nearest = nearest_name(family, families);
  return make_error(Code::kNotFound, "no rule set {} is built in{}; there are {}", quoted(family),
                    nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : std::string(),
                    fmt::join(families, ", "));
}

Result<std::shared_ptr<const RuleSet>> parse_with_base(std::string_view text, int depth,
                                                       bool is_new) {
  const auto base = [depth](std::string_view family) { return parse_builtin(family, depth + 1); };
  return RuleSetParser(text, base, is_new).parse();
}

using Builtins = std::vector<Result<std::shared_ptr<const RuleSet>>>;

/// Parsed once, in the order of builtin_rules().
const Builtins& parsed_builtins() {
  static const Builtins all = [] {
    Builtins parsed;
    for (const BuiltinRules& rules : builtin_rules()) {
      parsed.push_back(parse_builtin(rules.family, 0));
    }
    return parsed;
  }();
  return all;
}

/// "text_config.num_attention_heads": within the object of that name.
/// "per_layer_config.*.head_dim": within the first object there that has it.
/// "head_dim?num_attention_heads": if that stands beside it.
const json::value* value_at(const json::object& config, std::string_view key) {
  const size_t dot = key.find('.');
  if (dot == std::string_view::npos) {
    const size_t mark = key.find('?');
    if (mark != key.npos && !config.contains(key.substr(mark + 1))) return nullptr;
    return config.if_contains(key.substr(0, mark));
  }
  const std::string_view behind = key.substr(dot + 1);
  const auto within = [&](const json::value& inner) {
    return inner.is_object() ? value_at(inner.get_object(), behind) : nullptr;
  };
  if (key.substr(0, dot) != "*") {
    const json::value* inner = config.if_contains(key.substr(0, dot));
    return inner ? within(*inner) : nullptr;
  }
  for (const auto& member : config)
    if (const json::value* value = within(member.value())) return value;
  return nullptr;
}

std::optional<uint64_t> fact_value(const json::value& value) {
  if (value.is_bool()) return value.get_bool() ? 1 : 0;
  uint64_t number = UINT64_MAX;
  if (value.is_uint64()) number = value.get_uint64();
  if (value.is_int64() && value.get_int64() >= 0) {
    number = static_cast<uint64_t>(value.get_int64());
  }
  if (number > UINT32_MAX) return std::nullopt;
  return number;
}

}  // namespace

Result<std::shared_ptr<const RuleSet>> RuleSet::parse(std::string_view text) {
  return parse_with_base(text, 0);
}

Result<std::shared_ptr<const RuleSet>> RuleSet::parse_new(std::string_view text) {
  return parse_with_base(text, 0, /*is_new=*/true);
}

Result<std::shared_ptr<const RuleSet>> RuleSet::builtin(std::string_view family) {
  for (size_t i = 0; i < builtin_rules().size(); ++i) {
    if (builtin_rules()[i].family == family) return parsed_builtins()[i];
  }
  return parse_builtin(family, 0);
}

std::vector<std::string> RuleSet::builtin_families() {
  std::vector<std::string> families;
  for (const BuiltinRules& rules : builtin_rules()) families.emplace_back(rules.family);
  return families;
}

std::shared_ptr<const RuleSet> RuleSet::none() {
  static const std::shared_ptr<const RuleSet> rules = [] {
    auto parsed = RuleSet::parse(R"({"format": "ptc-rules/1", "family": "none",
        "wrappers": {"leading": ["module"], "anywhere": ["_orig_mod"]}, "rules": []})");
    PTC_CHECK(parsed.has_value());
    return parsed.value();
  }();
  return rules;
}

namespace {

std::shared_ptr<const RuleSet> builtin_of_type(std::string_view model_type) {
  for (const auto& rules : parsed_builtins()) {
    if (!rules) continue;
    const auto& types = rules.value()->model_types();
    if (std::find(types.begin(), types.end(), model_type) != types.end()) return rules.value();
  }
  return nullptr;
}

/// One name of each kind: they differ in more than numbers.
std::vector<std::string_view> one_of_each_kind(const std::vector<std::string>& names) {
  std::unordered_set<std::string> kinds;
  std::vector<std::string_view> chosen;
  std::string key;
  for (const std::string& name : names) {
    without_numbers(name, key);
    if (kinds.insert(key).second) chosen.push_back(name);
  }
  return chosen;
}

}  // namespace

/// How many of the names the rules know, and which share of the rules these are.
struct RuleSet::Knowledge {
  size_t names = 0;
  double share = 0;
  bool layers = false;  // of some name
  bool certain = true;  // none is known by a rule that needs the model's type
};

RuleSet::Knowledge RuleSet::knowledge_of(const std::vector<std::string_view>& names) const {
  Knowledge known;
  const auto is_there = [&](const NamePattern& pattern) {
    return std::any_of(names.begin(), names.end(),
                       [&](std::string_view name) { return matches(pattern, name); });
  };
  if (!known_by_.empty() && std::none_of(known_by_.begin(), known_by_.end(), is_there))
    return known;
  RuleFinder finder(*this);
  std::unordered_set<const Rule*> used;
  for (std::string_view name : names) {
    const auto match = finder.find(name);
    if (!match) continue;
    ++known.names;
    used.insert(match->rule);
    known.layers |= match->name.layer.has_value();
    known.certain &= !match->rule->needs_type;
  }
  known.share = static_cast<double>(used.size()) / static_cast<double>(written_rules_);
  return known;
}

/// Names of optimizer state have a parameter's between dots.
bool RuleSet::has_parameter_in(std::string_view name) const {
  for (size_t begin = 0; begin != std::string_view::npos; begin = name.find('.', begin + 1)) {
    const std::string_view rest = name.substr(begin == 0 ? 0 : begin + 1);
    if (find(rest) || find(rest.substr(0, rest.rfind('.')))) return true;
  }
  return false;
}

std::shared_ptr<const RuleSet> RuleSet::choose(std::optional<std::string_view> model_type,
                                               const std::vector<std::string>& tensor_names) {
  if (model_type) {
    if (auto rules = builtin_of_type(*model_type)) return rules;
  }
  const std::vector<std::string_view> names = one_of_each_kind(tensor_names);
  std::shared_ptr<const RuleSet> best;
  Knowledge most;
  for (const auto& parsed : parsed_builtins()) {
    if (!parsed) continue;
    const Knowledge known = parsed.value()->knowledge_of(names);
    if (!known.layers || known.names < most.names ||
        (known.names == most.names && known.share <= most.share))
      continue;
    if (model_type && !known.certain) continue;
    best = parsed.value();
    most = known;
  }
  if (!model_type || best == nullptr) return best;
  const bool all = std::all_of(names.begin(), names.end(),
                               [&](std::string_view name) { return best->has_parameter_in(name); });
  return all ? best : nullptr;
}

namespace {

/// The name without these components, and where they were; nullopt: it has none.
template <class Removed>
std::optional<std::string> without(std::string_view name, const std::vector<std::string>& words,
                                   Removed removed) {
  std::optional<std::string> left;
  size_t kept = 0;  // up to here the name is in `left`, or was removed
  for (const std::string& word : words)
    if (name.find(word) != std::string_view::npos) left.emplace();
  if (!left) return left;
  bool any = false;
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    if (end < name.size() &&
        std::find(words.begin(), words.end(), name.substr(begin, end - begin)) != words.end()) {
      left->append(name.substr(kept, begin - kept));
      kept = end + 1;
      removed(left->size(), kept - begin);
      any = true;
    }
    begin = end + 1;
  }
  if (!any) return std::nullopt;
  left->append(name.substr(kept));
  return left;
}

}  // namespace

size_t RuleSet::leading_wrapper(std::string_view name) const {
  for (const auto* words : {&wrappers_.leading, &wrappers_.anywhere})
    for (const std::string& word : *words)
      if (name.size() > word.size() + 1 && name.starts_with(word) && name[word.size()] == '.')
        return word.size() + 1;
  return 0;
}

std::vector<std::string> RuleSet::without_wrappers(std::vector<std::string> names) const {
  std::vector<std::string> plain = names;
  while (!plain.empty() && std::all_of(plain.begin(), plain.end(), [&](const std::string& name) {
    return leading_wrapper(name) > 0;
  }))
    for (std::string& name : plain) name.erase(0, leading_wrapper(name));
  const bool held = !plain.empty() &&
                    std::all_of(plain.begin(), plain.end(),
                                [&](const std::string& name) { return holder(name) > 0; }) &&
                    std::any_of(plain.begin(), plain.end(), [&](const std::string& name) {
                      return !find_behind(name, false) && find_behind(name, true);
                    });
  for (std::string& name : plain) name.erase(0, held ? holder(name) : 0);
  for (std::string& name : plain)
    if (auto left = without(name, wrappers_.anywhere, [](size_t, size_t) {}))
      name = *std::move(left);
  const std::unordered_set<std::string_view> different(plain.begin(), plain.end());
  return different.size() == plain.size() ? plain : names;
}

/// Where in the tensor's name what begins at `at` of its plain name begins.
size_t RuleSet::in_tensor_name(size_t at, const PlainName& plain) {
  size_t missing = plain.prefix_length;
  for (const PlainName::Gap& gap : plain.gaps)
    if (gap.at <= at) missing += gap.bytes;
  return at + missing;
}

void RuleSet::plain_name(std::string_view tensor_name, PlainName& plain) const {
  plain.name = tensor_name;
  const auto take_off = [&](size_t bytes) {
    plain.prefix_length += bytes;
    plain.name.remove_prefix(bytes);
  };
  while (const size_t bytes = leading_wrapper(plain.name)) take_off(bytes);
  if (adapters_ && plain.name.starts_with(adapters_->prefix)) take_off(adapters_->prefix.size());
  auto left = without(plain.name, wrappers_.anywhere, [&](size_t at, size_t bytes) {
    plain.gaps.push_back({at, bytes});
  });
  if (left) {
    plain.storage = *std::move(left);
    plain.name = plain.storage;
  }
  if (!adapters_) return;
  auto among = [](const std::vector<std::string>& words, std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  const std::string_view name = plain.name;
  for (size_t begin = name.find('.'); begin != std::string_view::npos;
       begin = name.find('.', begin + 1)) {
    const size_t end = std::min(name.find('.', begin + 1), name.size());
    const std::string_view component = name.substr(begin + 1, end - begin - 1);
    std::string_view last = ".weight";
    if (among(adapters_->in, component)) {
      plain.side = AdapterSide::kIn;
    } else if (among(adapters_->out, component)) {
      plain.side = AdapterSide::kOut;
    } else if (among(adapters_->wrappers, component) && end < name.size()) {
      last = name.substr(name.rfind('.'));  // "modules_to_save.default.weight"
    } else {
      continue;
    }
    std::string beside(name.substr(0, begin));
    beside += last;
    plain.storage = std::move(beside);
    plain.name = plain.storage;
    return;
  }
}

/// One for each rule of layers: the same, under the names of layers that predict further tokens.
Result<> RuleSet::derive_mtp_rules(size_t most) {
  constexpr std::string_view kLayers = "layers.{layer}.";
  // They may be below a component: "decoder.layers.{layer}.".
  const auto behind_layers = [&](std::string_view name) -> std::optional<std::string_view> {
    const size_t at = name.find(kLayers);
    if (at == name.npos || (at > 0 && name.find('.') != at - 1)) return std::nullopt;
    return name.substr(at + kLayers.size());
  };
  written_rules_ = rules_.size();
  mtp_rule_of_.clear();
  size_t derived = 0;
  for (size_t written = 0; written < written_rules_ && !mtp_layers_.empty(); ++written) {
    if (rules_[written].stage != StagePlace::kLayer) continue;
    Rule rule = rules_[written];
    rule.stage = StagePlace::kMtp;
    rule.names.clear();
    for (const NamePattern& name : rules_[written].names) {
      const auto rest = behind_layers(name.text());
      if (!rest) continue;
      derived += mtp_layers_.size();
      if (derived > most) {
        return invalid_argument(
            "that makes more than {} further name patterns: one for each of these, of each pattern "
            "of a layer",
            most);
      }
      for (const std::string& layers : mtp_layers_) {
        PTC_TRY(auto pattern, NamePattern::parse(fmt::format("{}.{}", layers, *rest)));
        rule.names.push_back(std::move(pattern));
      }
    }
    if (rule.names.empty()) continue;
    rules_.push_back(std::move(rule));
    mtp_rule_of_.push_back(static_cast<uint32_t>(written));
  }
  weight_rules_ = rules_.size();
  return ok();
}

size_t RuleSet::written_rule(const Rule& rule) const {
  auto position = static_cast<size_t>(&rule - rules_.data());
  if (position >= weight_rules_) position = (position - weight_rules_) / 2;  // two of each
  return position < written_rules_ ? position : mtp_rule_of_[position - written_rules_];
}

/// Two rules for each of a weight: of the adapter's inputs and of its outputs.
void RuleSet::derive_adapter_rules() {
  if (!adapters_) return;
  rules_.reserve(3 * weight_rules_);
  for (size_t of = 0; of < weight_rules_; ++of) {
    const auto index = static_cast<uint32_t>(rules_.size());
    adapter_rules_.push_back({index, index + 1});
    for (const bool in : {true, false}) {
      Rule rule = rules_[of];
      // The weight's axis that runs over the adapter's inputs or outputs.
      const uint32_t axis = in == rule.inputs_first ? 0 : 1;
      if (rule.cut && rule.cut->axis == axis && !rule.expert_axis) {
        rule.cut->axis = in ? 1 : 0;
      } else {
        rule.cut.reset();
      }
      rule.expert_axis.reset();
      rule.folded_into.reset();
      rule.experts_along.reset();
      rule.inputs_first = false;
      rule.attention = AttentionPart::kNone;
      rules_.push_back(std::move(rule));
    }
  }
}

size_t RuleSet::holder(std::string_view name) const {
  for (const std::string& word : holders_)
    if (name.size() > word.size() + 1 && name.starts_with(word) && name[word.size()] == '.')
      return word.size() + 1;
  return 0;
}

std::optional<RuleSet::Match> RuleSet::match_rule(size_t rule, const PlainName& plain) const {
  auto match = match_rule(rule, plain, 0);
  if (const size_t held = holder(plain.name); !match && held > 0)
    match = match_rule(rule, plain, held);
  return match;
}

/// By the part of the name behind so many bytes.
std::optional<RuleSet::Match> RuleSet::match_rule(size_t rule, const PlainName& plain,
                                                  size_t behind) const {
  for (const std::string& own : prefixes_) {
    if (!plain.name.substr(behind).starts_with(own)) continue;
    const std::string_view prefix = plain.name.substr(0, behind + own.size());
    for (const NamePattern& pattern : rules_[rule].names) {
      std::optional<NameMatch> match = pattern.match(plain.name.substr(prefix.size()));
      if (!match) continue;
      const auto place = [&](size_t& begin, size_t& end) {
        const size_t bytes = end - begin;
        begin = in_tensor_name(prefix.size() + begin, plain);
        end = begin + bytes;
      };
      if (match->layer) place(match->layer_begin, match->layer_end);
      if (match->expert) place(match->expert_begin, match->expert_end);
      return Match{&rules_[rule], *match, plain.prefix_length + prefix.size()};
    }
  }
  return std::nullopt;
}

std::string RuleSet::weight_of(std::string_view name, const QuantisedPart& part) {
  const size_t dot = name.rfind('.');
  for (const std::string& word : part.names)
    if (dot != std::string_view::npos && name.substr(dot + 1) == word)
      return std::string(name.substr(0, dot)) + ".weight";
  for (const std::string& suffix : part.suffixes)
    if (name.size() > suffix.size() && name.ends_with(suffix))
      return std::string(name.substr(0, name.size() - suffix.size()));
  return {};
}

/// Makes it the name of the weight; false: it is no such part of one.
bool RuleSet::take_off_part(PlainName& plain, size_t part) const {
  if (plain.side != AdapterSide::kNone) return false;
  std::string weight = weight_of(plain.name, quantised_[part]);
  if (weight.empty()) return false;
  plain.storage = std::move(weight);
  plain.name = plain.storage;
  return true;
}

std::optional<RuleSet::Match> RuleSet::find(std::string_view tensor_name) const {
  if (auto match = find_behind(tensor_name, false)) return match;
  return find_behind(tensor_name, true);
}

/// `held`: behind a holder's component.
std::optional<RuleSet::Match> RuleSet::find_behind(std::string_view tensor_name, bool held) const {
  const auto match_in = [&](size_t rule, const PlainName& plain) -> std::optional<Match> {
    const size_t behind = held ? holder(plain.name) : 0;
    if (held && behind == 0) return std::nullopt;
    return match_rule(rule, plain, behind);
  };
  PlainName plain;
  plain_name(tensor_name, plain);
  if (held && holder(plain.name) == 0) return std::nullopt;
  for (size_t rule = 0; rule < weight_rules_; ++rule) {
    auto match = match_in(rule, plain);
    if (!match) continue;
    if (plain.side == AdapterSide::kIn) match->rule = &rules_[adapter_rules_[rule].in];
    if (plain.side == AdapterSide::kOut) match->rule = &rules_[adapter_rules_[rule].out];
    return match;
  }
  for (size_t part = 0; part < quantised_.size(); ++part) {
    if (weight_of(tensor_name, quantised_[part]).empty()) continue;
    PlainName weight;
    plain_name(tensor_name, weight);
    if (!take_off_part(weight, part)) continue;
    for (size_t rule = 0; rule < weight_rules_; ++rule) {
      auto match = match_in(rule, weight);
      if (!match) continue;
      match->part_of = &quantised_[part];
      return match;
    }
  }
  return std::nullopt;
}

bool RuleSet::is_adapter_wrapper(std::string_view component) const {
  return adapters_ && std::find(adapters_->wrappers.begin(), adapters_->wrappers.end(),
                                component) != adapters_->wrappers.end();
}

bool RuleSet::matches(const NamePattern& pattern, std::string_view tensor_name) const {
  const auto matches_plain = [&](const PlainName& plain) {
    return std::any_of(prefixes_.begin(), prefixes_.end(), [&](const std::string& prefix) {
      const auto behind = [&](std::string_view name) {
        return name.starts_with(prefix) && pattern.match(name.substr(prefix.size())).has_value();
      };
      return behind(plain.name) || behind(plain.name.substr(holder(plain.name)));
    });
  };
  PlainName plain;
  plain_name(tensor_name, plain);
  if (matches_plain(plain)) return true;
  for (size_t part = 0; part < quantised_.size(); ++part) {
    if (weight_of(tensor_name, quantised_[part]).empty()) continue;
    PlainName weight;
    plain_name(tensor_name, weight);
    if (take_off_part(weight, part) && matches_plain(weight)) return true;
  }
  return false;
}

std::optional<RuleSet::Match> RuleFinder::find(std::string_view tensor_name) {
  if (rules_.numbers_matter_ || tensor_name.find('#') != std::string_view::npos) {
    return rules_.find(tensor_name);
  }
  without_numbers(tensor_name, key_);
  const auto no_part = static_cast<uint32_t>(rules_.quantised_.size());
  auto [known, is_new] = rule_of_.try_emplace(key_, Known{kNoRule, no_part});
  if (!is_new) {
    const auto [rule, part] = known->second;
    if (rule == kNoRule) return std::nullopt;
    RuleSet::PlainName plain;
    rules_.plain_name(tensor_name, plain);
    if (part != no_part) rules_.take_off_part(plain, part);
    auto match = rules_.match_rule(rule, plain);
    if (match && part != no_part) match->part_of = &rules_.quantised_[part];
    return match;
  }
  auto match = rules_.find(tensor_name);
  if (!match) return match;
  known->second.rule = static_cast<uint32_t>(match->rule - rules_.rules_.data());
  if (match->part_of != nullptr)
    known->second.part = static_cast<uint32_t>(match->part_of - rules_.quantised_.data());
  return match;
}

Result<RuleSet::Facts> RuleSet::facts(std::string_view config_text) const {
  Facts facts;
  facts.tied = tied_default_;
  if (!config_text.empty()) {
    auto parsed = parse_json(config_text, kConfigLimits);
    if (!parsed) return std::move(parsed).error().with_context("config.json");
    if (!parsed.value().is_object()) return invalid_argument("config.json is not a JSON object");
    const json::object& config = parsed.value().get_object();
    for (const auto& [fact, keys] : fact_keys_) {
      for (const std::string& key : keys) {
        const json::value* value = value_at(config, key);
        const auto number = value ? fact_value(*value) : std::nullopt;
        if (!number) continue;
        facts.numbers[fact] = *number;
        break;
      }
    }
    if (const json::value* type = config.if_contains("model_type"); type && type->is_string()) {
      const auto among = [&](const std::vector<std::string>& types) {
        return std::find(types.begin(), types.end(), std::string_view(type->get_string())) !=
               types.end();
      };
      // Of a type that was chosen by its names alone nobody knows what it is by default.
      const bool unknown = !model_types_.empty() && !tied_keys_.empty() && !among(model_types_);
      if (among(tied_types_)) facts.tied = true;
      else if (unknown && facts.tied == false) facts.tied.reset();
    }
    // Where the model's and its text model's contradict each other, types differ in which they ask.
    // A model that has a head of its own is not tied, whatever they say.
    std::optional<bool> said;
    for (const std::string& key : tied_keys_) {
      const json::value* tied = value_at(config, key);
      if (tied && tied->is_bool()) said = said.value_or(false) || tied->get_bool();
    }
    if (said) facts.tied = said;
  }
  for (const auto& [fact, number] : fixed_facts_) facts.numbers[fact] = number;
  return facts;
}

std::optional<std::string> model_type_of(std::string_view config_text) {
  const auto parsed = parse_json(config_text, kConfigLimits);
  if (!parsed || !parsed.value().is_object()) return std::nullopt;
  const json::value* type = parsed.value().get_object().if_contains("model_type");
  if (!type || !type->is_string()) return std::nullopt;
  return std::string(std::string_view(type->get_string()));
}

}  // namespace ptc
