#include "reshard/serve/served_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

namespace ptc {
namespace {

/// Takes "<word><number>" off the front; the number has no superfluous zeros.
std::optional<uint32_t> take_size(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return std::nullopt;
  const std::string_view rest = text.substr(word.size());
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || number == 0 || number > kMaxWorldSize || rest[0] == '0')
    return std::nullopt;
  text.remove_prefix(word.size() + static_cast<size_t>(end - rest.data()));
  return number;
}

/// Which array a tensor is in, and where in it.
struct Place {
  std::string array;
  uint32_t expert = 0;
  uint32_t number = 0;  // of those that are joined
  const Engine::Join* join = nullptr;
};

bool any_matches(const std::vector<NameTail>& tails, std::string_view name) {
  return std::any_of(tails.begin(), tails.end(),
                     [&](const NameTail& tail) { return tail.match(name).has_value(); });
}

class Arrays {
 public:
  Arrays(const ServedModel& model, uint32_t worker)
      : layout_(model.layout),
        family_(model.family),
        model_(model.model),
        attention_model_(model.attention),
        tensors_(model.tensors),
        spec_(layout_.spec(model_.layers())),
        state_(layout_.state(worker)),
        attention_(layout_.attention(model_.layers(), worker)) {}

  Result<std::vector<ServedArray>> make() {
    const bool own_head = has_head();
    for (const NamedTensor& one : tensors_) {
      if (!is_used(one.name, own_head)) continue;
      PTC_TRY(auto part, slice(one, state_.pp, own_head));
      for (const uint32_t stage : {uint32_t{0}, spec_.sizes.pp - 1}) {
        if (part || !any_matches(family_.on_all_stages, one.name)) break;
        PTC_TRY(part, slice(one, stage, own_head));
      }
      if (!part) continue;
      Place place = place_of(one.name, own_head);
      std::string array = std::move(place.array);
      parts_[array].push_back({std::move(place), {one.tensor, *part}, &one.name});
    }
    std::vector<ServedArray> arrays;
    for (auto& [name, parts] : parts_) {
      PTC_TRY(arrays.emplace_back(), join(name, parts));
    }
    PTC_TRY(add_constants(arrays));
    std::sort(arrays.begin(), arrays.end(),
              [](const ServedArray& a, const ServedArray& b) { return a.name < b.name; });
    return arrays;
  }

 private:
  struct Part {
    Place place;
    Model::Held held;
    const std::string* name;
  };

  /// What a worker like this one of a stage has of it.
  Result<std::optional<SubTensor>> slice(const NamedTensor& one, uint32_t stage,
                                         bool own_head) const {
    // A head on a stage of its own is none of attention's, also where it is the embedding again.
    const bool is_head = !own_head && stage > 0 && family_.tied_embedding->match(one.name);
    const bool attention = any_matches(family_.attention, one.name) && !is_head;
    StateCoords there = attention ? attention_.state : state_;
    there.pp = stage;
    return attention ? attention_model_.slice(one.tensor, attention_.spec, there)
                     : model_.slice(one.tensor, spec_, there);
  }

  bool is_tied() const { return model_.facts().tied.value_or(false); }
  /// Of a worker that has so many.
  uint64_t first_expert(size_t experts) const {
    return spec_.sizes.ep > 1 ? uint64_t{state_.ep} * experts : 0;
  }
  /// Else it is the embedding, whatever the checkpoint has.
  bool has_head() const { return !is_tied() || !family_.tied_head; }

  bool is_used(std::string_view name, bool own_head) const {
    if (!own_head && family_.tied_head->match(name)) return false;
    return !any_matches(family_.unused, name);
  }

  Place place_of(const std::string& name, bool own_head) const {
    if (!own_head && state_.pp + 1 == spec_.sizes.pp) {
      // The embedding and the head are one array, which has the head's name there.
      if (const auto match = family_.tied_embedding->match(name))
        return {family_.tied_head->put("", {})};
    }
    for (const Engine::Join& join : family_.joins)
      for (uint32_t i = 0; i < join.of.size(); ++i)
        if (const auto match = join.of[i].match(name))
          return {join.to.put(name, *match), match->expert.value_or(0), i, &join};
    return {name};
  }

  Result<ServedArray> join(const std::string& name, std::vector<Part>& parts) const {
    const Engine::Join* const join = parts.front().place.join;
    const auto at = [](const Part& part) { return std::tie(part.place.expert, part.place.number); };
    std::sort(parts.begin(), parts.end(),
              [&](const Part& a, const Part& b) { return at(a) < at(b); });
    const size_t each = join == nullptr ? 1 : join->of.size();
    const bool stacked = join != nullptr && join->of.front().has_expert();
    for (size_t i = 0; i < parts.size(); ++i) {
      const bool of_another = parts[i].place.join != join;
      const bool twice = i > 0 && at(parts[i - 1]) == at(parts[i]);
      if (of_another || twice || (!stacked && i >= each))
        return invalid_argument("{} of {} would be made of {} and of {}", name,
                                layout_.engine->name(), *parts.front().name, *parts[i].name);
      if (parts[i].place.number != i % each)
        return invalid_argument("{} of {} is made of {}, and a tensor beside it is not there", name,
                                layout_.engine->name(), *parts[i].name);
    }
    const size_t experts = parts.size() / each;
    for (size_t i = 0; i < parts.size() && stacked; ++i) {
      const uint64_t expected = first_expert(experts) + i / each;
      if (parts[i].place.expert != expected)
        return invalid_argument("{} of {} has a place for expert {}, and {} comes there", name,
                                layout_.engine->name(), expected, *parts[i].name);
    }
    if (parts.size() % each != 0)
      return invalid_argument("{} of {} is made of {}, and a tensor beside it is not there", name,
                              layout_.engine->name(), *parts.back().name);
    ServedArray array{name, model_.tensors()[parts.front().held.tensor].dtype};
    uint64_t rows = 0;  // of one expert, or all
    for (size_t i = 0; i < parts.size(); ++i) {
      const Shape& shape = parts[i].held.part->local_shape;
      const DType dtype = model_.tensors()[parts[i].held.tensor].dtype;
      // Those that are joined may differ along the first axis; experts are all alike.
      const Shape& like = parts[i < each ? 0 : i - each].held.part->local_shape;
      const size_t from = i < each ? 1 : 0;
      const bool fits = shape.size() == like.size() &&
                        std::equal(shape.begin() + std::min(from, shape.size()), shape.end(),
                                   like.begin() + std::min(from, shape.size()));
      if (dtype != array.dtype || !fits)
        return invalid_argument("{} of {} has no place for {}, {} {}: {} is {} {}", name,
                                layout_.engine->name(), *parts[i].name, dtype_name(dtype),
                                shape.to_string(), *parts.front().name, dtype_name(array.dtype),
                                parts.front().held.part->local_shape.to_string());
      if (i < each) rows += shape.empty() ? 1 : shape[0];
    }
    const Shape& first = parts.front().held.part->local_shape;
    if (first.size() + 1 > kMaxAxes) return invalid_argument("{} has too many axes", name);
    if (stacked) array.shape.push_back(parts.size() / each);
    if (!first.empty() || each > 1) array.shape.push_back(rows);  // scalars become a row
    for (size_t axis = 1; axis < first.size(); ++axis) array.shape.push_back(first[axis]);
    for (Part& part : parts) array.parts.push_back(std::move(part.held));
    return array;
  }

  Result<> add_constants(std::vector<ServedArray>& arrays) const {
    std::map<std::string, float> constants;
    for (const NamedTensor& one : tensors_)
      for (const Engine::Constant& constant : family_.constants) {
        const auto match = constant.beside.match(one.name);
        if (!match || !model_.on_stage(one.tensor, spec_, state_.pp)) continue;
        constants.emplace(constant.to.put(one.name, *match), constant.value);
      }
    for (const auto& [name, value] : constants)
      if (!parts_.contains(name)) arrays.push_back({name, DType::kF32, Shape{}, {}, value});
    return ok();
  }

  const ServedLayout& layout_;
  const Engine::Family& family_;
  const Model& model_;
  const Model& attention_model_;
  const std::span<const NamedTensor> tensors_;
  const LayoutSpec spec_;
  const StateCoords state_;
  const ServedState attention_;
  std::map<std::string, std::vector<Part>> parts_;  // by array
};

}  // namespace

std::string ServedLayout::name() const {
  std::string text = fmt::format("{}-tp{}", engine->name(), tp);
  if (pp != 1) text += fmt::format("-pp{}", pp);
  if (dp != 1) text += fmt::format("-dp{}", dp);
  if (ep != 1) text += dp_within_tp() ? fmt::format("-ep{}", ep) : "-ep";
  return text;
}

bool ServedLayout::is_name(std::string_view name) {
  const size_t dash = name.find('-');
  return dash != name.npos && Engine::find(name.substr(0, dash)) != nullptr;
}

Result<ServedLayout> ServedLayout::parse(std::string_view name) {
  ServedLayout layout;
  layout.engine = Engine::find(name.substr(0, name.find('-')));
  if (layout.engine == nullptr)
    return invalid_argument("'{}' does not begin with the name of an engine", name);
  const std::string& engine = layout.engine->name();
  const bool within = layout.dp_within_tp();
  std::string_view rest = name.substr(engine.size());
  bool all_experts = false;
  const auto tp = take_size(rest, "-tp");
  layout.tp = tp.value_or(1);
  if (const auto pp = take_size(rest, "-pp")) layout.pp = *pp;
  if (const auto dp = take_size(rest, "-dp")) layout.dp = *dp;
  if (within) {
    if (const auto ep = take_size(rest, "-ep")) layout.ep = *ep;
  } else if (rest == "-ep") {
    all_experts = true;
    rest = {};
  }
  if (!tp || !rest.empty())
    return invalid_argument(
        "'{}' is no name of a layout of {}: that is {}-tp<N>, behind which -pp<N>, -dp<N> and {} "
        "may stand, in this order",
        name, engine, engine, within ? "-ep<N>" : "-ep");
  const uint64_t of_stage = uint64_t{layout.tp} * (within ? 1 : layout.dp);
  if (of_stage * layout.pp > kMaxWorldSize || of_stage * layout.dp > kMaxWorldSize)
    return invalid_argument("{} has more than {} workers", name, kMaxWorldSize);
  for (const auto& [what, size] : {std::pair("dp", layout.dp), std::pair("ep", layout.ep)}) {
    if (!within || layout.tp % size == 0) continue;
    std::vector<uint32_t> would_do;
    for (uint32_t one = 1; one <= layout.tp; ++one)
      if (layout.tp % one == 0) would_do.push_back(one);
    return invalid_argument(
        "{}: the {} workers of a stage of {} are no {} groups of as many; {} = {} would do", name,
        layout.tp, engine, size, what, fmt::join(would_do, ", "));
  }
  // Replicas of a dense model are engines of their own, each as without "-dp". Of one with experts
  // vLLM cuts each expert over tp·dp workers then, and that is not made here.
  if (!within && layout.dp != 1 && !all_experts)
    return invalid_argument(
        "{}: {} has -dp only with -ep; without, replicas are engines of their "
        "own, each {}-tp{}",
        name, engine, engine, layout.tp);
  if (all_experts) layout.ep = layout.tp * layout.dp;
  if (all_experts && layout.ep == 1)
    return invalid_argument("{}: one worker has all experts without -ep", name);
  if (layout.name() != name)
    return invalid_argument("'{}' is {}, since a size of 1 is left out", name, layout.name());
  return layout;
}

std::optional<ServedLayout> ServedLayout::from_name(std::string_view name) {
  Result<ServedLayout> layout = parse(name);
  if (layout.has_error()) return std::nullopt;
  return std::move(layout).value();
}

std::string ServedLayout::file_name(uint32_t worker) const {
  return engine->file_name(worker % tp, worker / tp % pp, pp);
}

LayoutSpec ServedLayout::spec(uint32_t layers) const {
  LayoutSpec spec;
  spec.sizes.tp = tp;
  spec.sizes.pp = pp;
  if (ep > 1) {
    const uint32_t expert_tp = dp_within_tp() ? tp / ep : 1;
    spec.sizes.ep = ep;
    if (tp != expert_tp) spec.sizes.etp = expert_tp;
  }
  if (pp > 1) spec.stages = engine->stages(layers, pp);
  return spec;
}

StateCoords ServedLayout::state(uint32_t worker) const {
  StateCoords state{.tp = worker % tp, .pp = worker / tp % pp};
  if (ep == 1) return state;
  if (!dp_within_tp()) {
    state.ep = state.tp + tp * (worker / tp / pp);
  } else if (const uint32_t expert_tp = tp / ep; engine->experts_of_neighbours()) {
    state.ep = state.tp / expert_tp;
    state.etp = state.tp % expert_tp;
  } else {
    state.ep = state.tp % ep;
    state.etp = state.tp / ep;
  }
  return state;
}

ServedState ServedLayout::attention(uint32_t layers, uint32_t worker) const {
  ServedLayout one = *this;  // group
  one.tp = attention_tp();
  one.dp = one.ep = 1;
  return {one.spec(layers), {.tp = worker % one.tp, .pp = worker / tp % pp}};
}

Result<Model> ServedLayout::padded(const Model& model, uint32_t ranks) const {
  return model.with_vocabulary([this, ranks](uint64_t rows) -> Result<uint64_t> {
    PTC_TRY(const uint64_t padded, engine->padded_vocabulary(rows, ranks));
    return padded / ranks;
  });
}

Result<ServedModel> ServedModel::make(const ServedLayout& layout, Engine::Family family,
                                      const Model& model, std::vector<NamedTensor> tensors) {
  const std::string& engine = layout.engine->name();
  if (model.facts().tied.value_or(false)) {
    if (family.tied == Engine::Family::Tied::kNever)
      return invalid_argument(
          "{} keeps a head of its own for such models, and the head of this "
          "one is its embedding",
          engine);
    if (family.tied == Engine::Family::Tied::kInOneStage && layout.pp > 1)
      return invalid_argument(
          "{} serves such a model in one stage if its head is its embedding: "
          "its last stage would have no head",
          engine);
  }
  if (layout.attention_tp() != layout.tp && family.attention.empty())
    return invalid_argument("{} has no data-parallel attention for such models; it has for: {}",
                            engine, fmt::join(layout.engine->attention_types(), ", "));
  PTC_TRY(auto padded, layout.padded(model, layout.tp));
  PTC_TRY(auto attention, layout.padded(model, layout.attention_tp()));
  ServedModel made{layout, std::move(family), std::move(padded), std::move(attention),
                   std::move(tensors)};
  const uint32_t layers = model.layers();
  if (layout.attention_tp() == layout.tp) {
    PTC_TRY(made.model.check(layout.spec(layers)));
    return made;
  }
  // Groups of attention cut what they have for themselves otherwise: each by itself, on the first
  // and the last worker of all layers.
  ServedLayout one_stage = layout;
  one_stage.pp = 1;
  const LayoutSpec spec = one_stage.spec(layers);
  for (const uint32_t worker : {uint32_t{0}, layout.tp - 1}) {
    const ServedState group = one_stage.attention(layers, worker);
    for (const NamedTensor& one : made.tensors) {
      const bool of_group = any_matches(made.family.attention, one.name);
      const auto part = of_group ? made.attention.slice(one.tensor, group.spec, group.state)
                                 : made.model.slice(one.tensor, spec, one_stage.state(worker));
      if (part.has_error()) return Error(part.error());
    }
  }
  return made;
}

Result<std::vector<ServedArray>> served_arrays(const ServedModel& model, uint32_t worker) {
  return Arrays(model, worker).make();
}

}  // namespace ptc
