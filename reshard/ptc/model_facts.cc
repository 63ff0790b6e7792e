#include "reshard/ptc/model_facts.h"

#include <algorithm>
#include <set>

namespace ptc {
namespace {

uint64_t fact_of(const Model& model, std::string_view name) {
  const auto found = model.facts().numbers.find(name);
  return found == model.facts().numbers.end() ? 0 : found->second;
}

/// Both numbers of a fact that is contradicted.
struct Contradiction {
  std::string_view fact;
  uint64_t said = 0;
  uint32_t found = 0;
  std::string to_string() const {
    return fmt::format("config.json says {} {}, and there are tensors of {}", said, fact, found);
  }
};

struct Contradictions {
  std::optional<Contradiction> layers, experts;
};

Contradictions contradictions_of(const Model& model) {
  Contradictions result;
  const uint64_t layers = fact_of(model, "layers"), experts = fact_of(model, "experts");
  if (layers == 0 && experts == 0) return result;
  const Model::FoundNumbers found = model.found_numbers();
  if (found.layers != 0 && found.layers < layers) result.layers = {"layers", layers, found.layers};
  if (found.experts != 0 && experts != 0 && found.experts != experts)
    result.experts = {"experts", experts, found.experts};
  return result;
}

/// The name of an embedding that may be the head too: nobody says, and there is no head. Empty:
/// there is none.
std::string_view maybe_tied(const Model& model) {
  if (model.facts().tied) return {};
  const auto any = [&](const NamePattern& pattern) {
    return std::any_of(
        model.tensors().begin(), model.tensors().end(),
        [&](const TensorInfo& tensor) { return model.rules().matches(pattern, tensor.name); });
  };
  for (const uint32_t tensor : model.embeddings()) {
    const std::string& name = model.tensors()[tensor].name;
    const Rule& rule = *model.rules().find(name)->rule;
    if (!any(*rule.tied_head) && (!rule.tied_when || any(*rule.tied_when))) return name;
  }
  return {};
}

}  // namespace

Model::FoundNumbers Model::found_numbers() const {
  FoundNumbers found;
  const Rule* const derived = rules_->rules().data() + rules_->written_rules();
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    const Bound& bound = bound_[tensor];
    if (bound.rule == nullptr || bound.rule >= derived || bound.follows != kNone) continue;
    if (bound.name.layer && bound.rule->stage == StagePlace::kLayer)
      found.layers = std::max(found.layers, *bound.name.layer + 1);
    if (bound.name.expert) found.experts = std::max(found.experts, *bound.name.expert + 1);
    const auto& along = bound.rule->experts_along;
    const Shape& shape = tensors_[tensor].shape;
    if (along && bound.part_of == nullptr && *along < shape.size())
      found.experts = std::max(found.experts,
                               static_cast<uint32_t>(std::min<uint64_t>(shape[*along], INT32_MAX)));
  }
  return found;
}

std::vector<uint32_t> Model::embeddings() const {
  std::vector<uint32_t> found;
  std::set<const Rule*> seen;
  const Rule* const derived = rules_->rules().data() + rules_->written_rules();
  for (const uint32_t tensor : first_of_kind_) {
    const Bound& bound = bound_[tensor];
    if (bound.rule != nullptr && bound.rule < derived && bound.follows == kNone &&
        bound.rule->tied_head && seen.insert(bound.rule).second)
      found.push_back(tensor);
  }
  return found;
}

std::vector<std::string> contradictions(const Model& model) {
  std::vector<std::string> all;
  const Contradictions numbers = contradictions_of(model);
  for (const auto& one : {numbers.layers, numbers.experts})
    if (one) all.push_back(one->to_string());
  // Of a model whose numbers are wrong each layer has the same to say.
  const std::vector<std::string> heads = model.head_problems();
  if (!heads.empty()) all.push_back(heads.front());
  if (heads.size() > 1) all.back() += fmt::format(" (and of {} more)", heads.size() - 1);
  const uint64_t vocabulary = fact_of(model, "vocab");
  RuleFinder finder(model.rules());
  for (const TensorInfo& tensor : model.tensors()) {
    if (vocabulary == 0) break;
    const auto match = finder.find(tensor.name);
    if (!match || match->part_of != nullptr || !match->rule->tied_head) continue;
    const std::optional<TensorCut>& cut = match->rule->cut;
    if (!cut || !cut->vocab_multiple || cut->axis >= tensor.shape.size()) continue;
    if (const uint64_t rows = tensor.shape[cut->axis]; rows < vocabulary)
      all.push_back(fmt::format("config.json says a vocabulary of {}, and {} has {} rows",
                                vocabulary, tensor.name, rows));
  }
  return all;
}

DoubtfulFacts::DoubtfulFacts(const Model& model) {
  const Contradictions numbers = contradictions_of(model);
  const auto say = [&](const std::optional<Contradiction>& one, std::string& what,
                       std::string& mend) {
    if (!one) return;
    what = one->to_string();
    mend =
        rules_with(model.rules(), fmt::format("\"facts\": {{\"{}\": {}}}", one->fact, one->found));
  };
  say(numbers.layers, layers_, mend_layers_);
  say(numbers.experts, experts_, mend_experts_);
  embedding_ = maybe_tied(model);
  if (!embedding_.empty()) mend_embedding_ = rules_with(model.rules(), "\"tied\": true");
}

Result<> DoubtfulFacts::check(const LayoutSpec& spec) const {
  constexpr std::string_view kRefusal =
      "{}: {} = {} {}; commit it with the right config.json, or save a rules.json with {}, {}";
  if (spec.sizes.pp > 1 && !layers_.empty())
    return invalid_argument(kRefusal, layers_, "pp", spec.sizes.pp,
                            "would have stages of layers that are not there", mend_layers_,
                            kThenTheLayout);
  if (spec.sizes.pp > 1 && !embedding_.empty())
    return invalid_argument(
        "config.json does not say whether {} is the head too, and there is no other: with pp = {} "
        "the last stage would have none if it is; put \"tie_word_embeddings\": true or false into "
        "config.json and commit it again, or save a rules.json with {} or false, {}",
        embedding_, spec.sizes.pp, mend_embedding_, kThenTheLayout);
  if (spec.sizes.ep > 1 && !experts_.empty())
    return invalid_argument(kRefusal, experts_, "ep", spec.sizes.ep,
                            "would not give each rank as many", mend_experts_, kThenTheLayout);
  return ok();
}

Result<> check_facts(const Model& model, const LayoutSpec& spec) {
  if (spec.sizes.pp == 1 && spec.sizes.ep == 1) return ok();
  return DoubtfulFacts(model).check(spec);
}

bool same_stages_and_experts(const LayoutSpec& a, const LayoutSpec& b) {
  return a.sizes.pp == b.sizes.pp && a.vpp == b.vpp && a.stages == b.stages &&
         a.sizes.ep == b.sizes.ep && a.sizes.etp == b.sizes.etp && a.rules == b.rules;
}

std::string rules_with(const RuleSet& rules, std::string_view member) {
  const bool none = rules.family() == RuleSet::none()->family();
  if (!none && !RuleSet::builtin(rules.family())) return std::string(member);
  const std::string extends = none ? "" : fmt::format("\"extends\": \"{}\", ", rules.family());
  return fmt::format("{{\"format\": \"ptc-rules/1\", {}{}}}", extends, member);
}

}  // namespace ptc
