#include "reshard/ptc/suggested_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
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

/// The set that knows most, if that is most of the names; of several the one with the fewest rules.
/// One that knows a few knows them of another model, in which they mean something else.
std::shared_ptr<const RuleSet> nearest_set(const std::vector<TensorKind>& kinds) {
  std::shared_ptr<const RuleSet> best;
  size_t most = 0;
  for (const std::string& family : RuleSet::builtin_families()) {
    const auto rules = RuleSet::builtin(family);
    if (!rules) continue;
    const size_t known = std::count_if(kinds.begin(), kinds.end(), [&](const TensorKind& kind) {
      return rules.value()->find(kind.name).has_value();
    });
    const bool fewer = best != nullptr && rules.value()->written_rules() < best->written_rules();
    if (known > most || (known == most && known > 0 && fewer)) {
      best = rules.value();
      most = known;
    }
  }
  return 2 * most >= kinds.size() ? best : nullptr;
}

std::vector<TensorKind> kinds_of(const std::vector<NamedShape>& parameters) {
  std::vector<TensorKind> kinds;
  std::set<std::string> patterns;
  for (const NamedShape& parameter : parameters) {
    TensorKind kind = kind_of(parameter);
    if (patterns.insert(kind.pattern).second) kinds.push_back(std::move(kind));
  }
  return kinds;
}

/// Rules, one for all that is cut alike for the same reason, and the facts that they name.
struct Guesses {
  json::array rules;
  json::object facts;
  bool tied = false;
};

/// An embedding without a head beside it is the head too. `all`: of what is known, too.
void tie_embedding(const std::vector<TensorKind>& all, Guesses& guesses) {
  const bool has_head = std::any_of(all.begin(), all.end(), [](const TensorKind& kind) {
    return !kind.in_layer && kind.last == "weight" && kind.shape.size() == 2 &&
           usual_stage(kind.name) == "last";
  });
  if (has_head) return;
  for (json::value& value : guesses.rules) {
    json::object& rule = value.get_object();
    if (!rule.contains("inputs_first")) continue;
    rule["tied_head"] = "lm_head.weight";
    rule["description"].get_string().append("; there is no head, so it is that too");
    guesses.tied = true;
    return;
  }
}

Guesses guesses_for(const std::vector<TensorKind>& unknown, const std::vector<TensorKind>& all,
                    const ModelHints& hints) {
  const CutGuesses guessed(hints, all);
  Guesses guesses;
  std::map<std::string, size_t> place_of;
  for (const TensorKind& kind : unknown) {
    GuessedRule guess = guessed.of(kind);
    const auto [place, is_new] =
        place_of.emplace(json::serialize(guess.rule) + guess.why, guesses.rules.size());
    if (is_new) {
      json::object rule{{"names", json::array()}};
      for (auto& member : guess.rule) rule[member.key()] = member.value();
      rule["description"] = "guess: " + guess.why;
      for (auto& fact : guessed.facts_of(guess.rule)) guesses.facts[fact.key()] = fact.value();
      guesses.rules.push_back(std::move(rule));
    }
    guesses.rules[place->second].as_object()["names"].as_array().emplace_back(kind.pattern);
  }
  tie_embedding(all, guesses);
  return guesses;
}

}  // namespace

SuggestedRules suggested_rules(const std::vector<NamedShape>& parameters, const ModelHints& hints) {
  const std::vector<TensorKind> kinds = kinds_of(parameters);
  const std::shared_ptr<const RuleSet> set = nearest_set(kinds);
  SuggestedRules suggested;
  json::object& text = suggested.text;
  text["format"] = "ptc-rules/1";
  if (set != nullptr) text["extends"] = set->family();
  std::vector<TensorKind> unknown, all = kinds;
  for (TensorKind& kind : all) {
    const auto known = set != nullptr ? set->find(kind.name) : std::nullopt;
    if (!known) continue;
    kind.is_known = true;
    if (known->rule->cut) kind.known_axis = known->rule->cut->axis;
  }
  std::vector<std::string> by_type;  // what other models call so, in another order
  std::vector<std::string> not_planned;
  const auto type = model_type_of(hints.config);
  const bool of_type = set != nullptr && type &&
                       std::find(set->model_types().begin(), set->model_types().end(), *type) !=
                           set->model_types().end();
  for (const TensorKind& kind : kinds) {
    const auto known = set != nullptr ? set->find(kind.name) : std::nullopt;
    if (!known) unknown.push_back(kind);
    else if (known->rule->needs_type && !of_type) by_type.push_back(kind.pattern);
    else if (known->rule->cut && kind.in_layer && kind.last == "weight" && !hints.plan.empty() &&
             !is_planned(hints.plan, kind))
      not_planned.push_back(kind.pattern);
  }
  Guesses guesses = guesses_for(unknown, all, hints);
  suggested.guesses = guesses.rules.size();
  std::vector<std::string> doubts;
  if (!by_type.empty())
    doubts.push_back(fmt::format("guess: the order inside of {} is that of {}",
                                 fmt::join(by_type, ", "), set->family()));
  if (!not_planned.empty())
    doubts.push_back(fmt::format("guess: transformers' plan does not cut {}, but {} does",
                                 fmt::join(not_planned, ", "), set->family()));
  if (!doubts.empty()) text["description"] = fmt::format("{}", fmt::join(doubts, "; "));
  suggested.guesses += doubts.size();
  if (guesses.tied) text["tied"] = true;
  if (!guesses.facts.empty()) text["facts"] = std::move(guesses.facts);
  text["rules"] = std::move(guesses.rules);
  return suggested;
}

json::array guessed_rules(const std::vector<NamedShape>& parameters,
                          const std::vector<KnownCut>& known) {
  const std::vector<TensorKind> unknown = kinds_of(parameters);
  std::vector<TensorKind> all = unknown;
  for (const KnownCut& one : known) {
    TensorKind& kind = all.emplace_back(kind_of(one.parameter));
    kind.is_known = true;
    kind.known_axis = one.axis;
  }
  return guesses_for(unknown, all, {}).rules;
}

}  // namespace ptc
