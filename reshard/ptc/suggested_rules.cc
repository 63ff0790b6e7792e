#include "reshard/ptc/suggested_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/ptc/rule_set.h"

namespace ptc {
namespace {

namespace json = boost::json;

bool all_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

template <size_t N>
bool among(std::string_view word, const std::string_view (&words)[N]) {
  return std::find(std::begin(words), std::end(words), word) != std::end(words);
}

constexpr std::string_view kLayers[] = {"layers", "layer", "blocks", "block", "h"};
constexpr std::string_view kOutputsCut[] = {
    "q_proj", "query", "wq",   "to_q",    "k_proj",       "key",     "wk", "to_k",   "v_proj",
    "value",  "wv",    "to_v", "up_proj", "gate_proj",    "w1",      "w3", "fc1",    "fc_in",
    "c_fc",   "wi",    "wi_0", "wi_1",    "intermediate", "in_proj", "up", "c_fc_0", "c_fc_1"};
constexpr std::string_view kInputsCut[] = {"o_proj", "out_proj", "wo",     "to_out", "down_proj",
                                           "w2",     "fc2",      "fc_out", "c_proj", "down"};

/// A kind of tensor: "model.layers.{0-3}.mlp.up_proj.weight".
struct Kind {
  std::string name;     // of one of them
  std::string pattern;  // of all
  bool in_layer = false, in_expert = false;
  std::string module;     // its name's component before the last, which is no number
  std::string last;       // "weight"
  std::string container;  // what has the parameter: all but the last component of the pattern
  size_t axes = 0;
};

Kind kind_of(const NamedAxes& parameter) {
  Kind kind;
  kind.axes = parameter.axes;
  const std::string& names = parameter.names;
  std::string before;  // the component
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find('.', begin), names.size());
    const std::string component = names.substr(begin, end - begin);
    const bool several = component.size() > 2 && component.front() == '{';
    std::string word = component, one = component;
    if (several) one = component.substr(1, component.find_first_of("-,}") - 1);
    if (several ? all_digits(one) : all_digits(component)) {
      word = "*";
      if (before == "experts" && !kind.in_expert) kind.in_expert = true, word = "{expert}";
      else if (among(before, kLayers) && !kind.in_layer) kind.in_layer = true, word = "{layer}";
    }
    const std::string dot = kind.name.empty() ? "" : ".";
    kind.container = kind.pattern;
    kind.name += dot + one;
    kind.pattern += dot + word;
    if (end < names.size() && word == component) kind.module = component;
    kind.last = component;
    before = component;
    begin = end + 1;
  }
  return kind;
}

/// The set that knows most; of several the one with the fewest rules.
std::shared_ptr<const RuleSet> nearest_set(const std::vector<Kind>& kinds) {
  std::shared_ptr<const RuleSet> best;
  size_t most = 0;
  for (const std::string& family : RuleSet::builtin_families()) {
    const auto rules = RuleSet::builtin(family);
    if (!rules || rules.value()->model_types().empty()) continue;
    const size_t known = std::count_if(kinds.begin(), kinds.end(), [&](const Kind& kind) {
      return rules.value()->find(kind.name).has_value();
    });
    const bool fewer = best != nullptr && rules.value()->written_rules() < best->written_rules();
    if (known > most || (known == most && known > 0 && fewer)) {
      best = rules.value();
      most = known;
    }
  }
  return best;
}

/// The axis that tensor parallelism cuts of a matrix [outputs, inputs], as it is usually called.
std::optional<int> usual_axis(const Kind& kind) {
  if (kind.axes != 2 || kind.last != "weight") return std::nullopt;
  if (among(kind.module, kOutputsCut)) return 0;
  if (among(kind.module, kInputsCut)) return 1;
  return std::nullopt;
}

std::string usual_stage(const std::string& name) {
  for (std::string_view word : {"embed", "wte", "vision", "visual", "audio", "image", "patch"})
    if (name.find(word) != std::string::npos) return "first";
  for (std::string_view word : {"norm", "head", "ln_f", "classifier"})
    if (name.find(word) != std::string::npos) return "last";
  return "all";
}

std::vector<Kind> kinds_of(const std::vector<NamedAxes>& parameters) {
  std::vector<Kind> kinds;
  std::set<std::string> patterns;
  for (const NamedAxes& parameter : parameters) {
    Kind kind = kind_of(parameter);
    if (patterns.insert(kind.pattern).second) kinds.push_back(std::move(kind));
  }
  return kinds;
}

/// `all` may tell how what is not known is cut: a bias as its weight.
json::array guesses_for(const std::vector<Kind>& unknown, const std::vector<Kind>& all) {
  std::map<std::string, int> axis_of;  // by what has the weight
  for (const Kind& kind : all)
    if (const auto axis = usual_axis(kind)) axis_of[kind.container] = *axis;
  std::map<std::pair<std::string, std::string>, json::array> names;  // by cut and stage
  for (const Kind& kind : unknown) {
    std::string cut = "whole";
    if (const auto axis = usual_axis(kind)) cut = *axis == 0 ? "outputs" : "inputs";
    const auto of_weight = axis_of.find(kind.container);
    if (kind.last == "bias" && kind.axes == 1 && of_weight != axis_of.end() &&
        of_weight->second == 0)
      cut = "outputs";
    names[{cut, kind.in_layer ? "layer" : usual_stage(kind.name)}].push_back(
        json::value(kind.pattern));
  }
  json::array rules;
  for (auto& [how, patterns] : names) {
    const auto& [cut, stage] = how;
    json::object rule{{"names", std::move(patterns)}};
    if (cut != "whole") rule["cut"] = json::object{{"axis", cut == "outputs" ? 0 : 1}};
    if (stage != "layer") rule["stage"] = stage;
    std::string why = cut == "whole"     ? "whole on each rank"
                      : cut == "outputs" ? "its outputs are cut, as names like these usually mean"
                                         : "its inputs are cut, as names like these usually mean";
    if (stage == "all") why += "; on all stages";
    else if (stage != "layer") why += fmt::format("; on the {} stage", stage);
    rule["description"] = "guess: " + why;
    rules.push_back(std::move(rule));
  }
  return rules;
}

}  // namespace

SuggestedRules suggested_rules(const std::vector<NamedAxes>& parameters) {
  const std::vector<Kind> kinds = kinds_of(parameters);
  const std::shared_ptr<const RuleSet> set = nearest_set(kinds);
  SuggestedRules suggested;
  json::object& text = suggested.text;
  text["format"] = "ptc-rules/1";
  if (set != nullptr) text["extends"] = set->family();
  std::vector<Kind> unknown;
  std::vector<std::string> by_type;  // what other models call so, in another order
  for (const Kind& kind : kinds) {
    const auto known = set != nullptr ? set->find(kind.name) : std::nullopt;
    if (!known) unknown.push_back(kind);
    else if (known->rule->needs_type) by_type.push_back(kind.pattern);
  }
  json::array rules = guesses_for(unknown, kinds);
  suggested.guesses = rules.size();
  if (!by_type.empty()) {
    text["description"] = fmt::format("guess: the order inside of {} is that of {}",
                                      fmt::join(by_type, ", "), set->family());
    ++suggested.guesses;
  }
  text["rules"] = std::move(rules);
  return suggested;
}

json::array guessed_rules(const std::vector<NamedAxes>& parameters) {
  const std::vector<Kind> kinds = kinds_of(parameters);
  return guesses_for(kinds, kinds);
}

}  // namespace ptc
