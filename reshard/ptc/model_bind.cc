#include "reshard/ptc/model_bind.h"

#include <algorithm>
#include <boost/unordered/unordered_flat_set.hpp>
#include <charconv>
#include <unordered_map>
#include <unordered_set>

namespace ptc {
namespace {

constexpr uint64_t kLargestNumber = UINT32_MAX;

/// Looks up the facts in a rule's numbers; remembers the first that is not known.
class Facts {
 public:
  explicit Facts(const RuleSet::Facts& facts) : facts_(facts) {}

  std::optional<uint64_t> number(const RuleNumber& number, uint64_t min) {
    if (const auto* value = std::get_if<uint64_t>(&number)) return *value;
    const std::string_view text = std::get<std::string>(number);
    uint64_t product = 1;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('*', begin), text.size());
      const std::optional<uint64_t> value = factor(text.substr(begin, end - begin), min);
      if (!value) return std::nullopt;
      product = std::min(product * std::min(*value, kLargestNumber), kLargestNumber);
      begin = end + 1;
    }
    return product;
  }
  const std::string& missing() const { return missing_; }

 private:
  std::optional<uint64_t> factor(std::string_view text, uint64_t min) {
    uint64_t value = 0;
    auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failed == std::errc() && end == text.data() + text.size()) return value;
    const auto found = facts_.numbers.find(text);
    if (found != facts_.numbers.end() && found->second >= min) return found->second;
    if (missing_.empty()) missing_ = text;
    return std::nullopt;
  }

  const RuleSet::Facts& facts_;
  std::string missing_;
};

/// Whether the cut is by this fact.
bool cuts_by(const Rule& rule, std::string_view fact) {
  if (!rule.cut) return false;
  const auto is = [&](const RuleNumber& number) {
    const auto* name = std::get_if<std::string>(&number);
    return name != nullptr && *name == fact;
  };
  return std::any_of(rule.cut->parts.begin(), rule.cut->parts.end(), [&](const CutPart& part) {
    return is(part.size) || (part.heads && is(*part.heads));
  });
}

}  // namespace

std::vector<bool> find_masters(const std::vector<TensorInfo>& tensors) {
  std::vector<bool> masters(tensors.size());
  const bool one_file = std::all_of(tensors.begin(), tensors.end(), [&](const TensorInfo& tensor) {
    return tensor.file == tensors.front().file;
  });
  if (one_file) return masters;
  boost::unordered_flat_set<std::string_view> lower;
  for (const TensorInfo& tensor : tensors) {
    if (dtype_bits(tensor.dtype) < dtype_bits(DType::kF32)) lower.insert(tensor.name);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    masters[i] = tensors[i].dtype == DType::kF32 && lower.contains(tensors[i].name);
  }
  return masters;
}

/// `heads`: what is found of the tensor's layer, in heads_; kNone: nothing.
uint32_t Model::Binder::cut_of_rule(const Rule& rule, uint32_t heads) {
  if (!rule.cut) return kNone;
  const auto number = static_cast<size_t>(&rule - model_.rules_->rules().data());
  uint32_t& index = heads == kNone
                        ? cut_of_rule_[number]
                        : cut_of_heads_.try_emplace({number, heads}, kNone).first->second;
  if (index != kNone) return index;
  index = static_cast<uint32_t>(cuts_.size());
  if (heads != kNone && !heads_[heads].problem.empty()) {
    cuts_.push_back({.problem = heads_[heads].problem});
    return index;
  }
  RuleSet::Facts of_layer;
  if (heads != kNone) {
    of_layer.numbers = model_.facts_.numbers;
    const AttentionHeads& found = *heads_[heads].heads;
    of_layer.numbers["heads"] = found.heads;
    if (found.kv_heads > 0) of_layer.numbers["kv_heads"] = found.kv_heads;
  }
  Facts facts(heads == kNone ? model_.facts_ : of_layer);
  ResolvedCut cut;
  cut.axis = rule.cut->axis;
  cut.block = rule.cut->block;
  cut.vocab_multiple = rule.cut->vocab_multiple.value_or(0);
  cut.pad_single_rank = rule.cut->pad_single_rank;
  for (const CutPart& part : rule.cut->parts) {
    ResolvedCut::Part resolved;
    const bool there = std::all_of(part.when.begin(), part.when.end(), [&](const auto& fact) {
      return facts.number(fact.first, 0) == fact.second;
    });
    if (!there) {
      resolved.size = 0;
      cut.parts.push_back(resolved);
      continue;
    }
    resolved.size = facts.number(part.size, 0).value_or(0);
    if (part.heads) resolved.heads = facts.number(*part.heads, 1).value_or(0);
    resolved.share = part.share;
    resolved.split = part.split;
    cut.parts.push_back(resolved);
  }
  RuleCut result;
  result.missing_fact = facts.missing();
  if (result.missing_fact.empty()) result.cut = std::move(cut);
  cuts_.push_back(std::move(result));
  return index;
}

/// Megatron's and Hugging Face's way to tie: the embedding serves as the head, so that the last
/// stage needs it as well, unless the head is there under a name of its own.
bool Model::Binder::tied_copy(const Rule& rule) const {
  if (!rule.tied_head || !model_.facts_.tied.value_or(false)) return false;
  bool wanted = !rule.tied_when;
  for (const TensorInfo& tensor : model_.tensors_) {
    if (model_.rules_->matches(*rule.tied_head, tensor.name)) return false;
    wanted = wanted || model_.rules_->matches(*rule.tied_when, tensor.name);
  }
  return wanted;
}

Result<> Model::Binder::bind() {
  const uint32_t count = static_cast<uint32_t>(model_.tensors_.size());
  model_.bound_.resize(count);
  one_element_.resize(count);
  parameter_at_.resize(count);
  masters_ = find_masters(model_.tensors_);
  cut_of_rule_.assign(model_.rules_->rules().size(), kNone);
  for (const Rule& rule : model_.rules_->rules()) {
    const bool key_values = cuts_by(rule, "kv_heads");
    cuts_by_.push_back(key_values               ? CutsBy::kKeyValueHeads
                       : cuts_by(rule, "heads") ? CutsBy::kHeads
                                                : CutsBy::kElse);
  }
  for (uint32_t tensor = 0; tensor < count; ++tensor) {
    const TensorInfo& info = model_.tensors_[tensor];
    auto elements = num_elements(info.shape);
    if (!elements) return std::move(elements).error().with_context(info.name);
    one_element_[tensor] = elements.value() == 1;
  }
  bind_to_rules();
  for (uint32_t tensor = 0; tensor < count; ++tensor) {
    if (!model_.bound_[tensor].rule) bind_scales(tensor);
  }
  bind_quantised();
  for (uint32_t tensor = 0; tensor < count; ++tensor) {
    Bound& bound = model_.bound_[tensor];
    if (!bound.rule) bind_to_parameter(tensor);
    if (!bound.rule) bound.one_element = one_element_[tensor];
  }
  const bool any_mtp = std::any_of(
      model_.bound_.begin(), model_.bound_.end(),
      [](const Bound& bound) { return bound.rule && bound.rule->stage == StagePlace::kMtp; });
  for (Bound& bound : model_.bound_) bound.mtp_copy = any_mtp && bound.rule && bound.rule->with_mtp;
  settle_one_element();
  count_layers_and_experts();
  model_.cuts_ = std::make_shared<const std::vector<RuleCut>>(std::move(cuts_));
  model_.find_kinds();
  model_.number_files();
  return ok();
}

void Model::Binder::bind_to_rules() {
  RuleFinder finder(*model_.rules_);
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    const std::string& name = model_.tensors_[tensor].name;
    const auto match = masters_[tensor] ? std::nullopt : finder.find(name);
    if (!match) continue;
    Bound& bound = model_.bound_[tensor];
    if (match->rule->tied_head) {
      const auto [known, is_new] = tied_.try_emplace(match->rule, false);
      if (is_new) known->second = tied_copy(*match->rule);
      bound.tied_copy = known->second;
    }
    if (match->part_of != nullptr) {
      quantised_.emplace_back(tensor, *match);
      continue;
    }
    bind_to_rule(tensor, *match);
  }
  count_heads();
}

/// The attention that a tensor is part of: its name up to that module's end.
std::string Model::Binder::attention_of(uint32_t tensor, const NameMatch& name) const {
  const TensorInfo& info = model_.tensors_[tensor];
  size_t end = 0;
  if (name.layer) {
    end = std::min(info.name.find('.', std::min(name.layer_end + 1, info.name.size())),
                   info.name.size());
  } else {
    const std::string_view whole = info.name;
    end = whole.size();
    const auto take_last = [&] {
      const size_t dot = whole.substr(0, end).rfind('.');
      const size_t begin = dot == whole.npos ? 0 : dot + 1;
      const std::string_view component = whole.substr(begin, end - begin);
      end = dot == whole.npos ? 0 : dot;
      return component;
    };
    take_last();  // the parameter's; then the projection's, and what PEFT puts between them
    while (model_.rules_->is_adapter_wrapper(take_last()) && end > 0) {
    }
  }
  return fmt::format("{}\n{}", info.name.substr(0, end), info.file);
}

/// Finds how many heads each layer has, and cuts by these what is bound so far.
void Model::Binder::count_heads() {
  struct Layer {
    AttentionExtents extents;
    bool any_whole = false, any_cut = false;
  };
  std::unordered_map<std::string, Layer> layers;
  const auto add = [&](uint32_t tensor, const Rule& rule, const NameMatch& name,
                       const QuantisedPart* part) {
    const TensorInfo& info = model_.tensors_[tensor];
    const bool output = rule.attention == AttentionPart::kOutput;
    // Where words have several elements nothing of a weight is as long as its inputs. Bytes with
    // two of four bits may have the weight's own name.
    const bool words = part != nullptr || info.dtype == DType::kU8 || info.dtype == DType::kI8;
    if (info.shape.size() != 2 || (output && words)) return;
    const bool in_out = part != nullptr && part->axes == QuantisedPart::Axes::kInOut;
    if (part != nullptr && !in_out && part->axes != QuantisedPart::Axes::kWeight) return;
    Layer& layer = layers[attention_of(tensor, name)];
    const bool whole = shapes_.tp == 1 || shapes_.whole[tensor];
    (whole ? layer.any_whole : layer.any_cut) = true;
    const auto longest = [&](uint64_t& extent, std::string_view* called) {
      extent = std::max(extent, info.shape[output || in_out ? 1 : 0]);
      if (called != nullptr) *called = info.name;
    };
    AttentionExtents& extents = layer.extents;
    switch (rule.attention) {
      case AttentionPart::kQueries:
        return longest(extents.queries, &extents.queries_name);
      case AttentionPart::kKeys:
        return longest(extents.keys, &extents.keys_name);
      case AttentionPart::kValues:
        return longest(extents.values, &extents.values_name);
      case AttentionPart::kOutput:
        return longest(extents.output, &extents.output_name);
      case AttentionPart::kFused:
        return longest(extents.fused, nullptr);
      case AttentionPart::kNone:
        return;
    }
  };
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    const Bound& bound = model_.bound_[tensor];
    if (bound.rule != nullptr && bound.rule->attention != AttentionPart::kNone)
      add(tensor, *bound.rule, bound.name, nullptr);
  }
  for (const auto& [tensor, match] : quantised_)
    if (match.rule->attention != AttentionPart::kNone)
      add(tensor, *match.rule, match.name, match.part_of);
  const AttentionFacts facts(model_.facts_);
  std::map<std::pair<AttentionHeads, std::string>, uint32_t> number;
  for (auto& [attention, layer] : layers) {
    if (layer.any_whole && layer.any_cut) continue;
    layer.extents.ranks = layer.any_cut ? shapes_.tp : 1;
    AttentionFacts::Found found = facts.heads_of(layer.extents);
    if (!found.heads && found.problem.empty()) continue;
    const auto [known, is_new] =
        number.try_emplace({found.heads.value_or(AttentionHeads()), found.problem},
                           static_cast<uint32_t>(heads_.size()));
    if (is_new) heads_.push_back(std::move(found));
    heads_of_.emplace(attention, known->second);
  }
  model_.heads_counted_ = !heads_of_.empty();
  heads_are_counted_ =
      std::any_of(model_.rules_->rules().begin(), model_.rules_->rules().end(),
                  [](const Rule& rule) { return rule.attention != AttentionPart::kNone; });
  for (uint32_t tensor = 0; heads_are_counted_ && tensor < model_.tensors_.size(); ++tensor) {
    Bound& bound = model_.bound_[tensor];
    if (bound.rule != nullptr && bound.cut != kNone)
      bound.cut = cut_of(tensor, *bound.rule, bound.name);
  }
}

uint32_t Model::Binder::cut_of(uint32_t tensor, const Rule& rule, const NameMatch& name) {
  const CutsBy by = cuts_by_[static_cast<size_t>(&rule - model_.rules_->rules().data())];
  if (!heads_are_counted_ || by == CutsBy::kElse) return cut_of_rule(rule);
  if (!heads_of_.empty()) {
    const auto found = heads_of_.find(attention_of(tensor, name));
    if (found != heads_of_.end()) {
      const auto& heads = heads_[found->second].heads;
      if (!heads || heads->kv_heads > 0 || by == CutsBy::kHeads)
        return cut_of_rule(rule, found->second);
    }
  }
  uint32_t& unknown = unknown_heads_[by == CutsBy::kKeyValueHeads];
  if (unknown == kNone) {
    std::string problem = AttentionFacts(model_.facts_).unknown(by == CutsBy::kKeyValueHeads);
    if (problem.empty()) return cut_of_rule(rule);
    unknown = static_cast<uint32_t>(heads_.size());
    heads_.push_back({std::nullopt, std::move(problem)});
  }
  return cut_of_rule(rule, unknown);
}

void Model::Binder::bind_to_rule(uint32_t tensor, const RuleSet::Match& match) {
  const std::string& name = model_.tensors_[tensor].name;
  Bound& bound = model_.bound_[tensor];
  bound.rule = match.rule;
  bound.cut = cut_of(tensor, *match.rule, match.name);
  if (one_element_[tensor] && match.rule->or_one) bound.cut = kNone;
  bound.name = match.name;
  bound.tied_begin = match.prefix_length;
  bound.tied_end = name.size();
  parameters_.add(name, match.prefix_length, tensor);
}

/// Binds what is part of quantised weights, and finds the tensors of each.
void Model::Binder::bind_quantised() {
  std::unordered_map<std::string, uint32_t> number;  // by file and the weight's name
  for (const auto& [tensor, match] : quantised_) {
    const TensorInfo& info = model_.tensors_[tensor];
    if (model_.bound_[tensor].rule) continue;  // block scales
    const std::string name = RuleSet::weight_of(info.name, *match.part_of);
    auto stored = parameters_.exact(name);
    if (stored && model_.tensors_[*stored].file != info.file) stored.reset();
    // Elements packed under the weight's own name, in an order that it does not say.
    if (stored && model_.tensors_[*stored].dtype == DType::kI32) continue;
    if (is_of_each_head(tensor, match)) {
      bind_to_rule(tensor, match);  // along its own first axis, as the weight's outputs
      continue;
    }
    if (!fits_weight(tensor, match, stored)) continue;
    bind_to_rule(tensor, match);
    auto [known, is_new] =
        number.try_emplace(info.file + '\0' + name, static_cast<uint32_t>(model_.weights_.size()));
    if (is_new) {
      model_.weights_.emplace_back();
      if (stored) {
        model_.weights_.back().push_back(*stored);
        model_.bound_[*stored].weight = known->second;
      }
    }
    model_.weights_[known->second].push_back(tensor);
    model_.bound_[tensor].part_of = match.part_of;
    model_.bound_[tensor].weight = known->second;
  }
  forget_other_orders();
  keep_groups_whole();
}

/// Names alone do not tell [in, out] from [out, in] (AWQ's "gemv", BitBLAS). There what belongs to
/// groups of inputs is as long on the first axis as the weight's words.
void Model::Binder::forget_other_orders() {
  for (const std::vector<uint32_t>& tensors : model_.weights_) {
    uint64_t words = 0, groups = 0;
    bool ordered = false;
    for (const uint32_t tensor : tensors) {
      const QuantisedPart* part = model_.bound_[tensor].part_of;
      if (part == nullptr) continue;
      ordered = ordered || part->order;
      if (part->axes != QuantisedPart::Axes::kInOut) continue;
      uint64_t& longest = part->groups ? groups : words;
      longest = std::max(longest, model_.tensors_[tensor].shape[0]);
    }
    if (ordered || words != groups || words <= 1) continue;
    for (const uint32_t tensor : tensors)
      if (model_.bound_[tensor].part_of != nullptr) model_.bound_[tensor] = {};
  }
}

/// Whether it has one element for each head that the weight's outputs are cut by, or for each that
/// a rank has of these.
bool Model::Binder::is_of_each_head(uint32_t tensor, const RuleSet::Match& match) {
  const Rule& rule = *match.rule;
  if (match.part_of->axes != QuantisedPart::Axes::kHeads || one_element_[tensor] || !rule.cut ||
      rule.cut->axis != 0 || rule.inputs_first || rule.cut->parts.size() != 1)
    return false;
  const RuleCut& cut = cuts_[cut_of(tensor, rule, match.name)];
  if (!cut.cut) return false;
  const uint64_t heads = cut.cut->parts.front().heads;
  const uint64_t rows = model_.tensors_[tensor].shape[0];
  return heads > 0 && rows > 0 && heads % rows == 0;
}

/// Whether the tensor has the shape of such a part, of the weight that is `stored` as a tensor too.
bool Model::Binder::fits_weight(uint32_t tensor, const RuleSet::Match& match,
                                std::optional<uint32_t> stored) const {
  const size_t axes = model_.tensors_[tensor].shape.size();
  const bool stacked = match.rule->expert_axis.has_value();
  const bool of_experts = stacked && *match.rule->expert_axis == 0 && axes == 1;
  switch (match.part_of->axes) {
    case QuantisedPart::Axes::kWeight:
      if (one_element_[tensor] || of_experts || (axes == 1 && !stacked)) return true;
      return axes == (stored ? model_.tensors_[*stored].shape.size() : stacked ? 3 : 2);
    case QuantisedPart::Axes::kInOut:
      return axes == 2 && !stacked;
    case QuantisedPart::Axes::kIn:
      return axes == 1 && !stacked;
    case QuantisedPart::Axes::kOne:
    case QuantisedPart::Axes::kHeads:
      return one_element_[tensor] || of_experts;
    case QuantisedPart::Axes::kWhole:
      return true;
  }
  return false;
}

/// Groups of inputs in another order than theirs: a rank's inputs may be of any group.
void Model::Binder::keep_groups_whole() {
  const auto known = model_.facts_.numbers.find("act_order");
  if (known != model_.facts_.numbers.end() && known->second == 0) return;
  for (const std::vector<uint32_t>& tensors : model_.weights_) {
    const bool ordered = std::any_of(tensors.begin(), tensors.end(), [&](uint32_t tensor) {
      const QuantisedPart* part = model_.bound_[tensor].part_of;
      return part != nullptr && part->order;
    });
    for (const uint32_t tensor : tensors) {
      Bound& bound = model_.bound_[tensor];
      const Rule& rule = *bound.rule;
      if (!ordered || !rule.cut || bound.part_of == nullptr || !bound.part_of->groups) continue;
      if (rule.cut->axis == (rule.inputs_first ? 0 : 1)) bound.cut = kNone;
    }
  }
}

void Model::Binder::bind_scales(uint32_t tensor) {
  const auto& scales = model_.rules_->scales();
  const TensorInfo& info = model_.tensors_[tensor];
  if (!scales || !info.name.ends_with(scales->suffix)) return;
  const std::string_view name = info.name;
  const auto weight = parameters_.exact(name.substr(0, name.size() - scales->suffix.size()));
  if (!weight) return;
  const Shape& shape = model_.tensors_[*weight].shape;
  if (shape.size() != info.shape.size()) return;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const uint64_t blocks = shape[axis] / scales->block + (shape[axis] % scales->block != 0);
    if (info.shape[axis] != shape[axis] && info.shape[axis] != blocks) return;
  }
  Bound& bound = model_.bound_[tensor];
  bound = model_.bound_[*weight];
  bound.follows = *weight;
  bound.scales = true;
}

void Model::Binder::bind_to_parameter(uint32_t tensor) {
  const TensorInfo& info = model_.tensors_[tensor];
  parameters_.find(info.name, [&](const ParameterNames::Entry& entry, size_t offset) {
    const bool same_shape =
        model_.tensors_[entry.parameter].shape_in_files() == info.shape_in_files();
    if (!same_shape && !one_element_[tensor]) return false;
    Bound& bound = model_.bound_[tensor];
    bound = model_.bound_[entry.parameter];
    bound.follows = entry.parameter;
    bound.one_element = !same_shape;
    parameter_at_[tensor] = {offset, model_.tensors_[entry.parameter].name.size() - entry.dropped};
    if (bound.name.layer) {
      bound.name.layer_begin += offset - entry.dropped;
      bound.name.layer_end += offset - entry.dropped;
    }
    if (bound.name.expert) {
      bound.name.expert_begin += offset - entry.dropped;
      bound.name.expert_end += offset - entry.dropped;
    }
    bound.tied_begin += offset - entry.dropped;
    bound.tied_end += offset - entry.dropped;
    return true;
  });
}

/// The tensor's name without that of the parameter that it follows: "exp_avg.", "state..step".
std::string Model::Binder::kind_of(uint32_t tensor) const {
  std::string kind = model_.tensors_[tensor].name;
  return kind.erase(parameter_at_[tensor].begin, parameter_at_[tensor].length);
}

/// State of one element of a parameter of one element may be a moment or a scalar: it is what other
/// tensors of its kind are.
void Model::Binder::settle_one_element() {
  auto follows = [&](uint32_t tensor) {
    return model_.bound_[tensor].follows != kNone && !model_.bound_[tensor].scales;
  };
  std::vector<uint32_t> unclear;
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    if (follows(tensor) && one_element_[tensor] && !model_.bound_[tensor].one_element)
      unclear.push_back(tensor);
  }
  if (unclear.empty()) return;
  std::unordered_set<std::string> moments;
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    if (follows(tensor) && !one_element_[tensor]) moments.insert(kind_of(tensor));
  }
  for (uint32_t tensor : unclear) {
    model_.bound_[tensor].one_element = !moments.contains(kind_of(tensor));
  }
}

void Model::Binder::count_layers_and_experts() {
  uint32_t layers = 0;
  uint32_t experts = 0;
  for (const Bound& bound : model_.bound_) {
    if (!bound.rule) continue;
    if (bound.name.layer && bound.rule->stage == StagePlace::kLayer) {
      layers = std::max(layers, *bound.name.layer + 1);
    }
    if (bound.name.expert) experts = std::max(experts, *bound.name.expert + 1);
  }
  for (size_t tensor = 0; tensor < model_.bound_.size(); ++tensor) {
    const Bound& bound = model_.bound_[tensor];
    const Shape& shape = model_.tensors_[tensor].shape;
    if (bound.rule && bound.rule->experts_along && bound.follows == kNone &&
        bound.part_of == nullptr && *bound.rule->experts_along < shape.size())
      model_.experts_along_ = std::max(model_.experts_along_, shape[*bound.rule->experts_along]);
  }
  auto fact = [&](std::string_view name) -> uint32_t {
    const auto found = model_.facts_.numbers.find(name);
    return found == model_.facts_.numbers.end()
               ? 0
               : static_cast<uint32_t>(std::min<uint64_t>(found->second, INT32_MAX));
  };
  const uint32_t layers_fact = fact("layers");
  model_.layers_ = layers_fact > 0 ? layers_fact : layers;
  model_.experts_ = std::max(experts, fact("experts"));
}

/// By all that slice() and check() look at but the name, by which a tensor is on a stage and a
/// rank's expert.
void Model::find_kinds() {
  kind_.clear();
  first_of_kind_.clear();
  std::unordered_map<std::string, uint32_t> kinds;
  std::string facts;
  const auto add = [&](uint64_t fact) {
    facts.append(reinterpret_cast<const char*>(&fact), sizeof fact);
  };
  kind_.reserve(tensors_.size());
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    const Bound& bound = bound_[tensor];
    facts.clear();
    add(reinterpret_cast<uintptr_t>(bound.rule));
    add(reinterpret_cast<uintptr_t>(bound.part_of));
    if (bound.part_of != nullptr) {
      add(weight_extent(tensor));
      add(tp_axis(tensor).has_value());
    }
    add(bound.one_element | is_parameter(tensor) << 1 | bound.scales << 2 |
        tensors_[tensor].whole_on_dp << 3 | bound.name.expert.has_value() << 4 |
        tensors_[tensor].by_stage << 5 | bound.tied_copy << 6 | bound.mtp_copy << 7);
    add(tensors_[tensor].folded_into.value_or(kNone));
    for (const uint32_t one : {tensor, bound.scales ? bound.follows : tensor}) {
      const TensorInfo& info = tensors_[one];
      for (const uint64_t fact :
           {uint64_t{dtype_bits(info.dtype)}, uint64_t{info.vocab_multiple},
            uint64_t{info.pad_single_rank}, uint64_t{bound_[one].cut}, uint64_t{info.shape.size()}})
        add(fact);
      for (const uint64_t extent : info.shape) add(extent);
      if (!bound.scales) break;
    }
    const auto [kind, is_new] =
        kinds.try_emplace(facts, static_cast<uint32_t>(first_of_kind_.size()));
    if (is_new) first_of_kind_.push_back(tensor);
    kind_.push_back(kind->second);
  }
}

void Model::number_files() {
  std::unordered_map<std::string_view, uint32_t> numbers;
  file_number_.clear();
  file_number_.reserve(tensors_.size());
  for (const TensorInfo& tensor : tensors_) {
    any_by_stage_ = any_by_stage_ || tensor.by_stage;
    const bool as_last = &tensor != &tensors_.front() && (&tensor)[-1].file == tensor.file;
    file_number_.push_back(as_last
                               ? file_number_.back()
                               : numbers.try_emplace(tensor.file, numbers.size()).first->second);
  }
  files_ = static_cast<uint32_t>(numbers.size());
}

}  // namespace ptc
