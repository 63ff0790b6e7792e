#include "reshard/ptc/guessed_cuts.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>
#include <initializer_list>
#include <utility>

#include "store/base/json.h"

namespace ptc {
namespace {

bool all_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

template <size_t N>
bool among(std::string_view word, const std::string_view (&words)[N]) {
  return std::find(std::begin(words), std::end(words), word) != std::end(words);
}

constexpr std::string_view kLayers[] = {
    "layers", "layer", "blocks", "block", "h", "transformer_blocks", "single_transformer_blocks"};
constexpr std::string_view kQueries[] = {"q_proj", "query", "wq", "to_q"};
constexpr std::string_view kKeysAndValues[] = {"k_proj", "key",   "wk", "to_k",
                                               "v_proj", "value", "wv", "to_v"};
constexpr std::string_view kOutputsCut[] = {"up_proj",      "gate_proj", "w1", "w3",     "fc1",
                                            "fc_in",        "c_fc",      "wi", "wi_0",   "wi_1",
                                            "intermediate", "in_proj",   "up", "c_fc_0", "c_fc_1"};
constexpr std::string_view kAttentionOutputs[] = {"o_proj", "out_proj", "wo", "Wo", "to_out"};
constexpr std::string_view kInputsCut[] = {"down_proj", "w2", "fc2", "fc_out", "c_proj", "down"};
constexpr std::string_view kOutputsCutByName =
    "its outputs are cut, as names like these usually mean";
constexpr std::string_view kInputsCutByName =
    "its inputs are cut, as names like these usually mean";

/// What config.json calls the numbers that extents are compared with.
struct NumberKeys {
  std::string_view name;
  std::initializer_list<std::string_view> keys;
};
const NumberKeys kNumbers[] = {
    {"hidden", {"hidden_size", "n_embd", "d_model", "dim"}},
    {"heads", {"num_attention_heads", "n_head", "n_heads", "num_heads"}},
    {"kv_heads", {"num_key_value_heads", "n_kv_heads", "num_kv_heads"}},
    {"head_dim", {"head_dim"}},
    {"inner", {"intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "n_inner"}},
    {"expert_inner", {"moe_intermediate_size", "expert_intermediate_size"}},
    {"experts", {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}},
    {"vocab", {"vocab_size", "padded_vocab_size"}},
};
/// Where a model of several has the language's.
constexpr std::string_view kNested[] = {"text_config", "llm_config", "language_config"};

/// "model.layers.{layer}.mlp.experts.{expert}.w1" as plans have it:
/// "model.layers.*.mlp.experts.*.w1".
std::string with_stars(std::string_view pattern) {
  std::string text;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '{') i = std::min(pattern.find('}', i), pattern.size() - 1), text += '*';
    else text += pattern[i];
  }
  return text;
}

/// A plan's names lack what the whole model puts before them.
bool ends_with_name(std::string_view name, std::string_view end) {
  return name == end || (name.size() > end.size() && name.ends_with(end) &&
                         name[name.size() - end.size() - 1] == '.');
}

/// Whether a name of a plan, which is a parameter's or a module's, stands for the parameter.
bool is_meant(std::string_view name, const TensorKind& kind) {
  return ends_with_name(with_stars(kind.pattern), name) ||
         ((kind.last == "weight" || kind.last == "bias") &&
          ends_with_name(with_stars(kind.container), name));
}

/// "model.layers.{layer}.", what has the weights that are cut together; all of it: in no layer.
std::string_view layer_of_kind(const TensorKind& kind) {
  constexpr std::string_view kLayer = "{layer}.";
  const std::string_view pattern = kind.pattern;
  const size_t begin = pattern.find(kLayer);
  return begin == pattern.npos ? pattern : pattern.substr(0, begin + kLayer.size());
}

/// 0, 1, …; nullopt: none is cut.
std::optional<size_t> cut_axis_of(const json::object& cut) {
  const json::value* axis = cut.if_contains("axis");
  return axis == nullptr ? std::nullopt : std::optional(axis->to_number<size_t>());
}

json::object plain_cut(size_t axis) { return {{"axis", axis}}; }

/// Texts in a rule's numbers: "heads", "groups*state".
void names_in(const json::value& value, std::vector<std::string>& names) {
  if (const json::object* object = value.if_object()) {
    for (const auto& member : *object) {
      if (member.value().is_string() && (member.key() == "heads" || member.key() == "size"))
        names.emplace_back(member.value().get_string());
      names_in(member.value(), names);
    }
  } else if (const json::array* array = value.if_array()) {
    for (const json::value& item : *array) names_in(item, names);
  }
}

}  // namespace

bool is_planned(const json::object& plan, const TensorKind& kind) {
  return std::any_of(plan.begin(), plan.end(),
                     [&](const auto& entry) { return is_meant(entry.key(), kind); });
}

std::string usual_stage(const std::string& name) {
  for (std::string_view word : {"embed", "wte", "vision", "visual", "audio", "image", "patch"})
    if (name.find(word) != std::string::npos) return "first";
  for (std::string_view word : {"norm", "head", "ln_f", "classifier"})
    if (name.find(word) != std::string::npos) return "last";
  return "all";
}

TensorKind kind_of(const NamedShape& parameters) {
  TensorKind kind;
  kind.shape = parameters.shape;
  const std::string& names = parameters.names;
  std::string before;  // the component
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find('.', begin), names.size());
    const std::string component = names.substr(begin, end - begin);
    const bool several = component.size() > 2 && component.front() == '{';
    std::string word = component, one = component;
    if (several) {
      const std::string first = component.substr(1, component.find_first_of("-,}") - 1);
      if (all_digits(first)) one = first;
    }
    if (all_digits(one)) {
      word = "*";
      if (before == "experts" && !kind.in_expert) kind.in_expert = true, word = "{expert}";
      else if (among(before, kLayers) && !kind.in_layer) kind.in_layer = true, word = "{layer}";
    }
    // Braces that are a name's own have no place in a pattern.
    if (word == component && component.find_first_of("{}") != component.npos) word = "*";
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

CutGuesses::CutGuesses(const ModelHints& hints, const std::vector<TensorKind>& all)
    : plan_(hints.plan) {
  const auto config = parse_json(hints.config);
  const json::object* top = config ? config.value().if_object() : nullptr;
  const auto look_in = [this](const json::object& object, const std::string& before) {
    for (const auto& [name, keys] : kNumbers) {
      if (numbers_.contains(name)) continue;
      for (std::string_view key : keys) {
        const json::value* value = object.if_contains(key);
        const auto found = value != nullptr ? whole_number(*value) : std::nullopt;
        // Larger ones are no extents, and products of these do not overflow.
        if (!found || *found == 0 || *found > (1U << 30)) continue;
        numbers_.emplace(name, Number{before + std::string(key), *found});
        break;
      }
    }
  };
  if (top != nullptr) {
    look_in(*top, "");
    for (std::string_view nested : kNested)
      if (const json::value* value = top->if_contains(nested);
          value != nullptr && value->is_object())
        look_in(value->get_object(), std::string(nested) + ".");
  }
  const auto heads = numbers_.find("heads");
  if (heads != numbers_.end()) numbers_.emplace("kv_heads", heads->second);
  const auto is_matrix = [](const TensorKind& kind) {
    return kind.last == "weight" && kind.shape.size() == 2;
  };
  for (const TensorKind& kind : all) {
    if (!kind.in_layer || kind.shape.size() < 2) continue;
    Cut cut = cut_alone(kind);
    std::optional<size_t> axis = is_matrix(kind) ? cut_axis_of(cut.cut) : std::nullopt;
    if (kind.is_known) axis = kind.known_axis;
    if (!axis) continue;
    CutSides& sides = sides_[std::string(layer_of_kind(kind))];
    for (const Cut::Part part : {Cut::Part::kAttention, Cut::Part::kMlp})
      if (cut.part == part || cut.part == Cut::Part::kEither)
        (*axis == 0 ? sides.outputs : sides.inputs)[part == Cut::Part::kMlp] = true;
  }
  for (const TensorKind& kind : all) {
    if (!is_matrix(kind)) continue;
    Cut cut = cut_of(kind);
    if (cut_axis_of(cut.cut) == 0) outputs_cut_.emplace(kind.container, std::move(cut));
  }
}

uint64_t CutGuesses::number(std::string_view name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? 0 : found->second.value;
}

json::object CutGuesses::cut_in_heads(int axis, std::string_view heads) const {
  json::object cut{{"axis", axis}, {"heads", heads}};
  if (heads == "kv_heads") cut["share"] = true;
  return cut;
}

/// By transformers' plan, where that has the module or the parameter. How an axis is divided
/// inside, by heads and parts, is what extents say.
std::optional<CutGuesses::Cut> CutGuesses::by_plan(const TensorKind& kind) const {
  const size_t axes = kind.shape.size();
  for (const auto& entry : plan_) {
    if (!entry.value().is_string() || !is_meant(entry.key(), kind) || axes == 0) continue;
    const std::string_view style = entry.value().get_string();
    Cut cut;
    cut.why = fmt::format("transformers' plan says {}", style);
    size_t axis = 0;
    if (style == "embedding_rowwise") cut.cut = {{"axis", 0}, {"vocab_multiple", 128}};
    else if (style.find("colwise") != style.npos) axis = axes >= 2 ? axes - 2 : 0;
    else if (style.find("rowwise") != style.npos) axis = axes - 1;
    else if (style.starts_with("replicate") || style == "mla_kv_a_proj") return cut;
    else continue;  // says nothing of a parameter
    if (style == "embedding_rowwise") {
      cut.is_vocabulary = true;
      return cut;
    }
    if (style == "embedding_colwise") axis = axes - 1;
    // What is added once, after the sum over ranks.
    if (kind.last == "bias" && style.find("rowwise") != style.npos) return cut;
    cut.cut = plain_cut(axis);
    if (style.starts_with("packed")) cut.cut["parts"] = json::array{json::object(), json::object()};
    auto by = by_extents(kind);
    if (!by) by = by_name(kind);
    if (by && by->cut.contains("axis") && by->cut.at("axis").to_number<size_t>() == axis) {
      cut.cut = by->cut;
      cut.is_vocabulary = by->is_vocabulary;
    }
    const uint64_t experts = number("experts");
    if (axes == 3 && kind.shape[0] == experts) cut.expert_axis = 0;
    return cut;
  }
  return std::nullopt;
}

/// Stacked experts: the axis of their inner width is cut, whichever way they are stored.
std::optional<CutGuesses::Cut> CutGuesses::by_extents_of_experts(const TensorKind& kind) const {
  const uint64_t inner = number(numbers_.contains("expert_inner") ? "expert_inner" : "inner");
  if (kind.shape.size() < 2 || kind.shape.size() > 3 || number("experts") < 2 ||
      kind.shape[0] != number("experts") || kind.name.find("expert") == std::string::npos)
    return std::nullopt;
  Cut cut;
  cut.expert_axis = 0;
  cut.why = "its first axis is the experts";
  for (size_t axis = 1; axis < kind.shape.size() && inner != 0; ++axis) {
    const uint64_t extent = kind.shape[axis];
    if (extent != inner && extent != 2 * inner) continue;
    cut.cut = plain_cut(axis);
    cut.why += fmt::format(", and axis {} their inner width", axis);
    if (extent == inner) break;
    cut.cut["parts"] = json::array{json::object(), json::object()};
    cut.why += " twice, one behind the other";
    break;
  }
  return cut;
}

/// By numbers of config.json, where only one of them can be meant.
std::optional<CutGuesses::Cut> CutGuesses::by_extents(const TensorKind& kind) const {
  if (auto experts = by_extents_of_experts(kind)) return experts;
  const uint64_t hidden = number("hidden"), heads = number("heads"), kv_heads = number("kv_heads");
  if (kind.shape.size() != 2 || kind.last != "weight" || hidden == 0) return std::nullopt;
  const uint64_t rows = kind.shape[0], columns = kind.shape[1];
  Cut cut;
  if (rows == number("vocab") && columns == hidden) {
    cut.cut = {{"axis", 0}, {"vocab_multiple", 128}};
    cut.is_vocabulary = true;
    cut.why = "it has a row for each entry of the vocabulary";
    return cut;
  }
  if (!kind.in_layer) return std::nullopt;
  const uint64_t of_head = numbers_.contains("head_dim") ? number("head_dim")
                           : heads != 0                  ? hidden / heads
                                                         : 0;
  const uint64_t queries = heads * of_head, keys = kv_heads * of_head;
  // Each way in which the extents can be read; more than one: they say nothing.
  std::vector<Cut> readings;
  Cut::Part part_of = Cut::Part::kAttention;
  const auto reading = [&](bool fits, json::object how, std::string why) {
    if (fits) readings.push_back({std::move(how), std::nullopt, false, std::move(why), part_of});
  };
  const json::object part{{"size", "heads"}, {"heads", "heads"}};
  const json::object shared{{"size", "kv_heads"}, {"heads", "kv_heads"}, {"share", true}};
  reading(columns == hidden && queries != 0 && rows == queries + 2 * keys,
          {{"axis", 0}, {"parts", json::array{part, shared, shared}}},
          "it has as many rows as queries, keys and values have, in this order");
  reading(columns == hidden && queries != 0 && queries != hidden && rows == queries,
          cut_in_heads(0, "heads"), "it has as many rows as the heads");
  reading(columns == hidden && keys != queries && keys != 0 && rows == keys,
          cut_in_heads(0, "kv_heads"), "it has as many rows as the heads of keys and values");
  reading(rows == hidden && queries != 0 && queries != hidden && columns == queries,
          cut_in_heads(1, "heads"), "it has as many columns as the heads");
  part_of = Cut::Part::kMlp;
  std::vector<uint64_t> widths;  // each once
  for (const std::string_view name : {"inner", "expert_inner"})
    if (const uint64_t inner = number(name);
        inner != 0 && inner != hidden &&
        std::find(widths.begin(), widths.end(), inner) == widths.end())
      widths.push_back(inner);
  for (const uint64_t inner : widths) {
    reading(columns == hidden && rows == inner, plain_cut(0),
            "it has as many rows as the inner width");
    reading(columns == hidden && rows == 2 * inner,
            {{"axis", 0}, {"parts", json::array{json::object(), json::object()}}},
            "it has as many rows as twice the inner width, one behind the other");
    reading(rows == hidden && columns == inner, plain_cut(1),
            "it has as many columns as the inner width");
  }
  if (readings.size() != 1) return std::nullopt;
  return std::move(readings.front());
}

/// By how parameters are usually called; heads where the extents are those of heads.
std::optional<CutGuesses::Cut> CutGuesses::by_name(const TensorKind& kind) const {
  if (kind.shape.size() != 2 || kind.last != "weight") return std::nullopt;
  const auto has_heads = [&](size_t axis, std::string_view heads) {
    return number(heads) > 1 && kind.shape[axis] % number(heads) == 0;
  };
  Cut cut;
  cut.why = kOutputsCutByName;
  if (among(kind.module, kQueries)) {
    cut.cut = has_heads(0, "heads") ? cut_in_heads(0, "heads") : plain_cut(0);
    cut.part = Cut::Part::kAttention;
  } else if (among(kind.module, kKeysAndValues)) {
    cut.cut = has_heads(0, "kv_heads") ? cut_in_heads(0, "kv_heads") : plain_cut(0);
    cut.part = Cut::Part::kAttention;
  } else if (among(kind.module, kOutputsCut)) {
    cut.cut = plain_cut(0);
    cut.part = Cut::Part::kMlp;
  } else if (among(kind.module, kAttentionOutputs)) {
    cut.cut = has_heads(1, "heads") ? cut_in_heads(1, "heads") : plain_cut(1);
    cut.why = kInputsCutByName;
    cut.part = Cut::Part::kAttention;
  } else if (among(kind.module, kInputsCut)) {
    cut.cut = plain_cut(1);
    cut.why = kInputsCutByName;
    // GPT-2 calls that of its attention so, too.
    cut.part = kind.module == "c_proj" ? Cut::Part::kEither : Cut::Part::kMlp;
  } else {
    return std::nullopt;
  }
  return cut;
}

/// By what is known of it alone.
CutGuesses::Cut CutGuesses::cut_alone(const TensorKind& kind) const {
  if (auto cut = by_plan(kind)) return *std::move(cut);
  if (auto cut = by_extents(kind)) return *std::move(cut);
  if (auto cut = by_name(kind)) return *std::move(cut);
  return {{}, std::nullopt, false, "whole on each rank"};
}

bool CutGuesses::matches(const bool (&sides)[2], Cut::Part part) {
  return (part != Cut::Part::kMlp && sides[0]) || (part != Cut::Part::kAttention && sides[1]);
}

/// Outputs that are cut are another weight's inputs, and the other way round: where no other weight
/// of the layer is cut to match, it is not.
CutGuesses::Cut CutGuesses::cut_of(const TensorKind& kind) const {
  if (kind.last == "bias" && kind.shape.size() == 1) {
    const auto weight = outputs_cut_.find(kind.container);
    if (weight != outputs_cut_.end()) return weight->second;
  }
  Cut cut = cut_alone(kind);
  const auto axis = cut_axis_of(cut.cut);
  if (!axis || kind.shape.size() != 2 || cut.is_vocabulary || by_plan(kind)) return cut;
  const auto sides = sides_.find(layer_of_kind(kind));
  if (kind.in_layer && sides != sides_.end() &&
      matches(*axis == 0 ? sides->second.inputs : sides->second.outputs, cut.part))
    return cut;
  return {{},
          std::nullopt,
          false,
          fmt::format("whole on each rank; by its {} it would be cut, and no weight beside it to "
                      "match",
                      *axis == 0 ? "outputs" : "inputs")};
}

GuessedRule CutGuesses::of(const TensorKind& kind) const {
  Cut cut = cut_of(kind);
  GuessedRule guess{{}, std::move(cut.why)};
  if (!cut.cut.empty()) guess.rule["cut"] = std::move(cut.cut);
  if (cut.expert_axis) guess.rule["expert_axis"] = *cut.expert_axis;
  if (kind.in_layer) return guess;
  const std::string stage = usual_stage(kind.name);
  if (cut.is_vocabulary && stage == "first") guess.rule["inputs_first"] = true;
  guess.rule["stage"] = stage;
  guess.why += stage == "all" ? "; on all stages" : fmt::format("; on the {} stage", stage);
  return guess;
}

json::object CutGuesses::facts_of(const json::object& rule) const {
  std::vector<std::string> names;
  names_in(rule, names);
  json::object facts;
  for (const std::string& name : names)
    if (const auto found = numbers_.find(name); found != numbers_.end())
      facts[name] = json::array{json::value(found->second.key)};
  return facts;
}

}  // namespace ptc
