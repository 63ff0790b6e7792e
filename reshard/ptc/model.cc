#include "reshard/ptc/model.h"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <map>
#include <numeric>
#include <set>
#include <unordered_set>

#include "reshard/ptc/model_bind.h"
#include "reshard/ptc/model_facts.h"
#include "reshard/ptc/suggested_rules.h"
#include "reshard/ptc/tp_sizes.h"
#include "store/tensor/strided_copy.h"

namespace ptc {
namespace {

/// The first layer of a stretch of layers; without vpp each stage has one, of its own number.
uint32_t chunk_begin(const LayoutSpec& spec, uint32_t layers, uint32_t chunk) {
  if (spec.stages.empty()) {
    const uint32_t each = layers / spec.chunks();
    return chunk * each + std::min(chunk, layers % spec.chunks());
  }
  uint32_t begin = 0;
  for (uint32_t c = 0; c < chunk && c < spec.stages.size(); ++c) begin += spec.stages[c];
  return begin;
}

/// Layers behind the last that is counted predict further tokens.
uint32_t chunk_of_layer(const LayoutSpec& spec, uint32_t layers, uint32_t layer) {
  const uint32_t last = spec.chunks() - 1;
  if (layer >= layers) return spec.mtp_chunk();
  if (spec.stages.empty()) {
    const uint32_t each = layers / spec.chunks();
    const uint32_t longer = layers % spec.chunks();
    const uint32_t in_longer = longer * (each + 1);
    return layer < in_longer ? layer / (each + 1) : longer + (layer - in_longer) / each;
  }
  uint64_t end = 0;
  for (uint32_t chunk = 0; chunk <= last && chunk < spec.stages.size(); ++chunk) {
    end += spec.stages[chunk];
    if (layer < end) return chunk;
  }
  return spec.mtp_layers > 0 ? spec.mtp_chunk() : last;
}

uint32_t stage_of_layer(const LayoutSpec& spec, uint32_t layers, uint32_t layer) {
  return chunk_of_layer(spec, layers, layer) % spec.sizes.pp;
}

std::string fact_in_words(const std::string& fact) {
  if (fact == "heads") return "the number of attention heads";
  if (fact == "kv_heads") return "the number of key-value heads";
  if (fact == "gated") return "whether the MLP is gated (1) or not (0)";
  return fmt::format("'{}'", fact);
}

/// "optimizer.state.0.exp_avg": whose it is, its name does not say.
bool is_state_of_a_number(std::string_view name) {
  constexpr std::string_view kState = "state.";
  for (size_t at = name.find(kState); at != name.npos; at = name.find(kState, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    const size_t begin = at + kState.size(), end = name.find_first_not_of("0123456789", begin);
    if (end != name.npos && end > begin && name[end] == '.') return true;
  }
  return false;
}

/// Of Megatron-Core's distributed checkpointing: all that a data-parallel group has, in one array.
bool is_optimizer_bucket(std::string_view name) {
  return name.find("optimizer.distributed.") != name.npos && name.find(".bucket_idx_") != name.npos;
}

}  // namespace

StateCoords state_of(const LayoutSpec& spec, const RankCoords& rank) {
  return {rank.tp, rank.pp, rank.ep, spec.dp_part(rank), rank.etp};
}

uint32_t state_index(const LayoutSpec& spec, const StateCoords& state) {
  const ParallelConfig& sizes = spec.sizes;
  const uint32_t in_stage =
      sizes.etp == 0 ? state.tp + sizes.tp * state.ep
                     : static_cast<uint32_t>(spec.order.global_rank(
                           sizes, RankCoords{.tp = state.tp, .ep = state.ep, .etp = state.etp}));
  return in_stage + sizes.different_ranks() * (state.pp + sizes.pp * state.dp);
}

StateCoords state_at(const LayoutSpec& spec, uint32_t index) {
  const ParallelConfig& sizes = spec.sizes;
  const uint32_t each = sizes.different_ranks(), in_stage = index % each;
  return {.tp = in_stage % sizes.tp,
          .pp = index / each % sizes.pp,
          .ep = in_stage / sizes.expert_tp() % sizes.ep,
          .dp = index / each / sizes.pp,
          .etp = sizes.etp == 0 ? 0 : in_stage % sizes.etp};
}

uint64_t rank_of(const LayoutSpec& spec, const StateCoords& state) {
  RankCoords rank = spec.of_dp_part(state.dp);
  rank.tp = state.tp, rank.pp = state.pp, rank.ep = state.ep, rank.etp = state.etp;
  return spec.order.global_rank(spec.sizes, rank);
}

Result<Model> Model::bind(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                          std::vector<TensorInfo> tensors) {
  return bind(std::move(rules), std::move(facts), std::move(tensors), CutShapes());
}

Result<Model> Model::bind(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                          std::vector<TensorInfo> tensors, CutShapes shapes) {
  Model model;
  model.rules_ = std::move(rules);
  model.facts_ = std::move(facts);
  model.tensors_ = std::move(tensors);
  PTC_TRY(Binder(model, std::move(shapes)).bind());
  return model;
}

bool Model::is_parameter(uint32_t tensor) const {
  const Bound& bound = bound_[tensor];
  return bound.follows == kNone || bound.scales;
}

namespace {

/// First or last of a name's components, in the optimizers of PyTorch, Megatron and bitsandbytes.
constexpr std::string_view kStateNames[] = {
    "exp_avg", "exp_avg_sq",      "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col",
    "exp_inf", "momentum_buffer", "square_avg",     "acc_delta",      "grad_avg",
    "state1",  "state2",          "fp32_param",     "master_param",   "fp32"};

bool is_named_as_optimizer_state(std::string_view name) {
  const auto is_one = [](std::string_view word) {
    return std::find(std::begin(kStateNames), std::end(kStateNames), word) != std::end(kStateNames);
  };
  const size_t first = std::min(name.find('.'), name.size()), last = name.rfind('.') + 1;
  if (is_one(name.substr(0, first)) || is_one(name.substr(last))) return true;
  return name.substr(last) == "step" && name.find("state.") != name.npos;
}

}  // namespace

bool Model::is_optimizer_state(uint32_t tensor) const {
  return !is_parameter(tensor) ||
         (bound_[tensor].rule == nullptr && is_named_as_optimizer_state(tensors_[tensor].name));
}

namespace {

constexpr size_t kLongestGuess = 600;

/// "q_proj.weight.absmax" and "gate_up_proj_scale" belong to weights of which they have the names:
/// how they are cut is no matter of names.
bool is_of_a_weight(std::string_view name, const std::unordered_set<std::string_view>& known) {
  for (size_t end = name.find_first_of("._"); end != name.npos;
       end = name.find_first_of("._", end + 1))
    if (known.contains(name.substr(0, end))) return true;
  return false;
}

/// "model.layers.3."; of what is in no layer its whole name.
std::string_view layer_of(const NamedShape& parameter) {
  const std::string_view name = parameter.names;
  const std::string pattern = kind_of(parameter).pattern;
  const size_t layer = pattern.find("{layer}");
  if (layer == pattern.npos) return name;
  size_t end = 0;  // behind as many components as the pattern has up to there
  for (auto before = std::count(pattern.begin(), pattern.begin() + layer, '.') + 1; before > 0;
       --before)
    end = std::min(name.find('.', end), name.size() - 1) + 1;
  return name.substr(0, end);
}

/// Rules for parameters that have none; empty: too many to be said in a sentence.
std::string guess_for(const RuleSet& rules, const std::vector<NamedShape>& parameters,
                      const std::vector<KnownCut>& known) {
  const std::string guessed = boost::json::serialize(guessed_rules(parameters, known));
  if (guessed.size() > kLongestGuess) return {};
  return rules_with(rules, "\"rules\": " + guessed);
}

}  // namespace

Error Model::uncovered_error() const {
  std::vector<std::string_view> names;
  std::vector<NamedShape> uncovered;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    if (covered(bound_[tensor])) continue;
    const TensorInfo& info = tensors_[tensor];
    if (names.size() < 3) names.push_back(info.name);
    uncovered.push_back({info.name, info.shape_in_files()});
  }
  const size_t count = uncovered.size();
  std::unordered_set<std::string_view> known;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor)
    if (covered(bound_[tensor])) known.insert(tensors_[tensor].name);
  const bool of_weights =
      std::any_of(uncovered.begin(), uncovered.end(),
                  [&](const NamedShape& one) { return is_of_a_weight(one.names, known); });
  const bool numbered = count > 0 && std::any_of(names.begin(), names.end(), is_state_of_a_number);
  const bool buckets = std::any_of(names.begin(), names.end(), is_optimizer_bucket);
  std::vector<KnownCut> beside;  // in the layer of the first
  const std::string_view layer = layer_of(uncovered.front());
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    const Bound& bound = bound_[tensor];
    if (!covered(bound) || !tensors_[tensor].name.starts_with(layer)) continue;
    beside.push_back({{tensors_[tensor].name, tensors_[tensor].shape_in_files()},
                      bound.rule != nullptr && bound.rule->cut && bound.follows == kNone
                          ? std::optional<size_t>(bound.rule->cut->axis)
                          : std::nullopt});
  }
  const std::string guess =
      numbered || buckets || of_weights ? "" : guess_for(*rules_, uncovered, beside);
  return invalid_argument(
      "no rule of family '{}' says how to cut {}{} ({} tensor{} in all): {}save a rules.json with "
      "a rule for {}, {}, or keep tp, pp and ep at 1 and 'optimizer' at \"replicated\" or "
      "\"fsdp\"; {}",
      rules_->family(), fmt::join(names, ", "), count > names.size() ? ", …" : "", count,
      count == 1 ? "" : "s",
      numbered
          ? "an optimizer's own state_dict() has numbers for its parameters, and no file says "
            "which these are; save what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict() returns, which "
            "has their names, or "
      : buckets
          ? "an optimizer's state in buckets is of the tensor ranks and stages that saved it; "
            "Megatron-LM saves it by parameters with --dist-ckpt-optim-fully-reshardable, or "
          : "",
      count == 1 ? "it" : "them", kThenTheLayout,
      of_weights      ? "it is part of a quantised weight, in a form whose parts are not known here"
      : guess.empty() ? "\"ptc rules suggest\" prints a rules.json to begin with"
                      : "by their names, a guess: " + guess);
}

bool Model::is_cut_over_dp(uint32_t tensor, const LayoutSpec& spec) const {
  const Bound& bound = bound_[tensor];
  if (bound.one_element || tensors_[tensor].shape.empty()) return false;
  switch (spec.optimizer) {
    case OptimizerCut::kZero1:
      return !is_parameter(tensor);
    case OptimizerCut::kFsdp:
      return !tensors_[tensor].whole_on_dp && (!bound.rule || !bound.rule->buffer);
    case OptimizerCut::kReplicated:
      break;
  }
  return false;
}

uint32_t Model::dp_part(uint32_t tensor, const LayoutSpec& spec, const StateCoords& state) const {
  if (!spec.shard_ep || is_experts(bound_[tensor])) return state.dp;
  const ParallelConfig& sizes = spec.sizes;
  // With etp, ranks are numbered by what they have of experts first, then by dp and cp.
  if (sizes.etp != 0)
    return (state.etp + sizes.etp * state.ep) / sizes.tp + spec.ep_copies() * state.dp;
  RankCoords rank = spec.of_dp_part(state.dp);
  rank.ep = state.ep;
  return static_cast<uint32_t>(spec.order.global_rank(spec.sharing(false), rank));
}

StateCoords Model::with_dp_part(uint32_t tensor, const LayoutSpec& spec, StateCoords state,
                                uint32_t part) const {
  state.dp = part;
  if (!spec.shard_ep || is_experts(bound_[tensor])) return state;
  const ParallelConfig& sizes = spec.sizes;
  if (sizes.etp != 0) {
    const uint32_t place = part % spec.ep_copies() * sizes.tp + state.tp;
    state.dp = part / spec.ep_copies();
    state.etp = place % sizes.etp;
    state.ep = place / sizes.etp;
    return state;
  }
  const RankCoords rank = spec.order.coords(spec.sharing(false), part);
  state.ep = rank.ep;
  state.dp = spec.dp_part(rank);
  return state;
}

bool Model::needs_rules(const LayoutSpec& spec) {
  if (spec.optimizer != OptimizerCut::kFsdp) return state_count(spec) > 1;
  return spec.sizes.different_ranks() * spec.sizes.pp > 1;  // anything has rows
}

/// Elements of 4 and 6 bits: no cut falls within a byte.
Result<> Model::check_whole_bytes(uint32_t tensor, const SubTensor& part) const {
  const TensorInfo& info = tensors_[tensor];
  auto bits = num_bits(part.local_shape, dtype_bits(info.dtype));
  if (!bits) return std::move(bits).error().with_context(info.name);
  if (bits.value() % 8 != 0)
    return invalid_argument("{}: a part {} of {} elements of {} bits is not of whole bytes",
                            info.name, part.local_shape.to_string(), info.shape.to_string(),
                            dtype_bits(info.dtype));
  for (const Piece& piece : part.pieces) {
    auto copy = make_strided_copy({0, info.shape}, piece.global.offset, array_at(part, 0),
                                  piece.local_offset, piece.global.extent, dtype_bits(info.dtype));
    if (!copy) return std::move(copy).error().with_context(info.name);
  }
  return ok();
}

/// Sizes that a rule refuses, and what one stage would have under two names.
Result<> Model::check_not_with(uint32_t tensor, const LayoutSpec& spec) const {
  const Bound& bound = bound_[tensor];
  if (!bound.rule) return ok();
  const ParallelConfig& sizes = spec.sizes;
  for (const std::string& name : bound.rule->not_with) {
    const uint32_t size = name == "tp"   ? tp_ranks(tensor, sizes)
                          : name == "pp" ? sizes.pp
                                         : sizes.ep;
    // What ep may not cut is of experts, and these are what etp cuts.
    const bool by_etp = size == 1 && name == "ep" && sizes.etp > 1;
    if (size == 1 && !by_etp) continue;
    return invalid_argument("{} cannot be cut under {} = {}{}", tensors_[tensor].name,
                            by_etp ? "etp" : name, by_etp ? sizes.etp : size,
                            bound.rule->description.empty()
                                ? std::string()
                                : fmt::format(" ({})", bound.rule->description));
  }
  if (bound.mtp_copy && bound.tied_copy && tensors_[tensor].by_stage && sizes.pp > 1)
    return invalid_argument(
        "{} is on the last of several stages twice in Megatron-LM's own files, as the head and for "
        "the layers that predict further tokens, which is not supported: save with --ckpt-format "
        "torch_dist",
        tensors_[tensor].name);
  return ok();
}

Result<> Model::check(const LayoutSpec& spec) const {
  const ParallelConfig& sizes = spec.sizes;
  if (sizes.pp > 1) {
    PTC_TRY(stage_boundaries(spec, layers_));
  }
  // Those of one kind are cut alike, or refused alike: the first is looked at, and named.
  for (const uint32_t tensor : first_of_kind_)
    if (sizes.etp != 0 && tensors_[tensor].by_stage)
      return invalid_argument(
          "{} is of Megatron-LM's own files, in which experts are cut by tp, and not by an 'etp' "
          "of their own",
          tensors_[tensor].name);
  for (const uint32_t tensor : first_of_kind_)
    if (!covered(bound_[tensor]) && needs_rules(spec)) return uncovered_error();
  for (const uint32_t tensor : first_of_kind_) {
    PTC_TRY(check_not_with(tensor, spec));
  }
  for (const uint32_t tensor : first_of_kind_) {
    const Bound& bound = bound_[tensor];
    const bool by_rule = bound.rule && (!bound.one_element || bound.name.expert) &&
                         (bound.cut != kNone || bound.name.expert || bound.rule->expert_axis);
    const bool by_bits = dtype_bits(tensors_[tensor].dtype) < 8;
    if (!by_bits && (!by_rule || sizes.different_ranks() == 1)) continue;
    StateCoords state;
    if (bound.name.expert && experts_ % sizes.ep == 0) {
      state.ep = *bound.name.expert / (experts_ / sizes.ep);
    }
    LayoutSpec one_stage;
    one_stage.sizes = sizes;
    one_stage.sizes.pp = 1;
    one_stage.optimizer = spec.optimizer;
    one_stage.dp_shard = spec.dp_shard;
    one_stage.shard_cp = spec.shard_cp;
    one_stage.shard_ep = spec.shard_ep;
    for (const bool last : {false, true}) {
      for (const uint32_t number : {uint32_t{0}, dp_parts(tensor, spec) - 1}) {
        state.tp = last ? sizes.tp - 1 : 0;
        state.etp = last && sizes.etp != 0 ? sizes.etp - 1 : 0;
        state = with_dp_part(tensor, one_stage, state, number);
        PTC_TRY(const auto part, slice(tensor, one_stage, state));
        if (by_bits && part) {
          PTC_TRY(check_whole_bytes(tensor, *part));
        }
      }
    }
  }
  return ok();
}

bool Model::on_stage(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const {
  const Bound& bound = bound_[tensor];
  if (!bound.rule || spec.sizes.pp == 1) return true;
  switch (bound.rule->stage) {
    case StagePlace::kFirst:
      return stage == spec.embedding_stage() || (bound.tied_copy && stage == spec.head_stage()) ||
             (bound.mtp_copy && stage == spec.mtp_stage());
    case StagePlace::kLast:
      return stage == spec.head_stage();
    case StagePlace::kMtp:
      return stage == spec.mtp_stage();
    case StagePlace::kAll:
      return true;
    case StagePlace::kLayer:
      break;
  }
  return stage_of_layer(spec, layers_, bound.name.layer.value_or(0)) == stage;
}

/// What tp cuts of an axis of `extent` elements by the tensor's rule, or that of what it follows.
Result<AxisSlice> Model::tp_slice(uint32_t tensor, uint64_t extent, uint32_t rank,
                                  uint32_t ranks) const {
  const TensorInfo& info = tensors_[tensor];
  const Bound& bound = bound_[tensor];
  const RuleCut& rule_cut = (*cuts_)[bound.cut];
  if (!rule_cut.cut) {
    if (ranks == 1) return AxisSlice::whole(extent);
    if (!rule_cut.problem.empty())
      return invalid_argument(
          "{}; commit it with the right config.json, or save a rules.json with {}, {}",
          rule_cut.problem,
          rules_with(*rules_, R"("facts": {"heads": …, "kv_heads": …, "head_dim": …})"),
          kThenTheLayout);
    const std::string& fact = rule_cut.missing_fact;
    return invalid_argument(
        "{} is not known: put the model's config.json beside its files in the checkpoint (into "
        "rank/0, or beside .metadata), or save a "
        "rules.json with {}, {}",
        fact_in_words(fact), rules_with(*rules_, fmt::format("\"facts\": {{\"{}\": …}}", fact)),
        kThenTheLayout);
  }
  if (rule_cut.cut->vocab_multiple == 0 || info.vocab_multiple == 0) {
    return slice_axis(*rule_cut.cut, extent, rank, ranks);
  }
  ResolvedCut vocabulary;
  vocabulary.axis = bound.rule->cut->axis;
  vocabulary.vocab_multiple = info.vocab_multiple;
  vocabulary.pad_single_rank = info.pad_single_rank;
  return slice_axis(vocabulary, extent, rank, ranks);
}

Result<> Model::cut_over_tp(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks) const {
  const Bound& bound = bound_[tensor];
  if (bound.cut == kNone || (ranks == 1 && !bound.rule->cut->vocab_multiple)) return ok();
  if (bound.part_of != nullptr) return cut_quantised(part, tensor, rank, ranks);
  const uint32_t axis = bound.rule->cut->axis;
  if (axis >= part.local_shape.size()) {
    return invalid_argument("its rule cuts axis {}, but its shape is {}", axis,
                            tensors_[tensor].shape.to_string());
  }
  if (!bound.scales) {
    PTC_TRY(const AxisSlice slice, tp_slice(tensor, tensors_[tensor].shape[axis], rank, ranks));
    cut_axis(part, axis, slice);
    return ok();
  }
  const uint64_t weight_extent = tensors_[bound.follows].shape[axis];
  const bool blocks = tensors_[tensor].shape[axis] != weight_extent;
  const auto slice_of = [&](uint32_t one, uint32_t of) -> Result<AxisSlice> {
    PTC_TRY(AxisSlice slice, tp_slice(bound.follows, weight_extent, one, of));
    if (!blocks) return slice;
    return slice_of_blocks(slice, weight_extent, rules_->scales()->block);
  };
  const auto slice = slice_of(rank, ranks);
  if (slice.has_error()) {
    // What is wrong with the weight itself is said of it.
    if (!tp_slice(bound.follows, weight_extent, rank, ranks)) return Error(slice.error());
    const auto fits = [&](uint32_t one, uint32_t of) { return slice_of(one, of).has_value(); };
    return invalid_argument("{}; {}", slice.error().message(), tp_that_fits(fits));
  }
  cut_axis(part, axis, slice.value());
  return ok();
}

Result<> Model::cut_over_ep(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks) const {
  const std::optional<uint32_t>& axis = bound_[tensor].rule->expert_axis;
  if (!axis || ranks == 1) return ok();
  const Shape& shape = tensors_[tensor].shape;
  const bool one_for_all = *axis >= shape.size() || shape[*axis] == 1;
  if (one_for_all && bound_[tensor].part_of != nullptr) return ok();
  if (*axis >= shape.size()) {
    return invalid_argument("its rule has experts on axis {}, but its shape is {}", *axis,
                            shape.to_string());
  }
  PTC_TRY(const AxisSlice slice, slice_experts(shape[*axis], rank, ranks));
  cut_axis(part, *axis, slice);
  return ok();
}

Result<> Model::cut_over_dp(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks,
                            OptimizerCut cut) const {
  const uint64_t rows = part.local_shape[0];
  PTC_TRY(const uint64_t elements, num_elements(part.local_shape));
  const bool flat = cut == OptimizerCut::kZero1;
  const uint64_t units = flat ? elements : rows;
  const uint64_t each = units / ranks + (units % ranks != 0);
  const uint64_t unit_bits =
      dtype_bits(tensors_[tensor].dtype) * (flat || rows == 0 ? 1 : elements / rows);
  if (ranks > 1 && each * unit_bits % 8 != 0) {
    return invalid_argument(
        "a cut among {} data-parallel ranks cuts its {} elements of {} bits within a byte", ranks,
        elements, dtype_bits(tensors_[tensor].dtype));
  }
  if (flat) {
    cut_flat(part, rank * each, each);
  } else {
    cut_rows(part, rank * each, each);
  }
  return ok();
}

Result<std::optional<SubTensor>> Model::slice_unnamed(uint32_t tensor, const LayoutSpec& spec,
                                                      const StateCoords& state) const {
  const Bound& bound = bound_[tensor];
  const ParallelConfig& sizes = spec.sizes;
  if (bound.name.expert && sizes.ep > 1) {
    if (experts_ % sizes.ep != 0) {
      return invalid_argument("the {} experts are not divisible by ep = {}", experts_, sizes.ep);
    }
    if (*bound.name.expert / (experts_ / sizes.ep) != state.ep) return std::optional<SubTensor>();
  }
  std::optional<SubTensor> part = SubTensor::whole(tensors_[tensor].shape);
  if (bound.rule && !bound.one_element) {
    PTC_TRY(check_fold(tensor, spec));
    PTC_TRY(cut_over_ep(*part, tensor, state.ep, sizes.ep));
    Result<> cut =
        cut_over_tp(*part, tensor, tp_rank(tensor, sizes, state), tp_ranks(tensor, sizes));
    if (cut.has_error() && sizes.etp != 0 && is_experts(bound))
      return std::move(cut).error().with_context(fmt::format("by 'etp' = {}", sizes.etp));
    PTC_TRY(std::move(cut));
  }
  if (tensors_[tensor].folded_into) fold(*part, *tensors_[tensor].folded_into);
  if (is_cut_over_dp(tensor, spec)) {
    PTC_TRY(cut_over_dp(*part, tensor, dp_part(tensor, spec, state), dp_parts(tensor, spec),
                        spec.optimizer));
  }
  return part;
}

Result<std::optional<SubTensor>> Model::slice(uint32_t tensor, const LayoutSpec& spec,
                                              const StateCoords& state) const {
  if (!covered(bound_[tensor]) && needs_rules(spec)) return uncovered_error();
  if (!on_stage(tensor, spec, state.pp)) return std::optional<SubTensor>();
  auto part = slice_unnamed(tensor, spec, state);
  if (!part) return std::move(part).error().with_context(tensors_[tensor].name);
  return part;
}

Result<std::vector<Model::Held>> Model::hold(const LayoutSpec& spec,
                                             const StateCoords& state) const {
  std::vector<Held> held;
  held.reserve(tensors_.size() / spec.sizes.pp);
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    PTC_TRY(std::optional<SubTensor> part, slice(tensor, spec, state));
    if (part) held.push_back({tensor, *std::move(part)});
  }
  return held;
}

Model::Holdings::Holdings(const Model& model, LayoutSpec spec)
    : model_(model),
      spec_(std::move(spec)),
      of_stage_(spec_.sizes.pp),
      of_experts_(size_t{spec_.sizes.pp} * spec_.sizes.ep) {
  const ParallelConfig& sizes = spec_.sizes;
  const std::set<uint32_t> named{spec_.embedding_stage(), spec_.head_stage(), spec_.mtp_stage()};
  // What cannot be cut is said of the first state.
  all_ = needs_rules(spec_) &&
         std::any_of(model_.first_of_kind_.begin(), model_.first_of_kind_.end(),
                     [&](uint32_t tensor) { return !model_.covered(model_.bound_[tensor]); });
  if (sizes.pp == 1 && sizes.ep == 1) {
    everywhere_.resize(model_.tensors_.size());
    std::iota(everywhere_.begin(), everywhere_.end(), 0);
    return;
  }
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    const Bound& bound = model_.bound_[tensor];
    const bool one_ep = bound.name.expert && sizes.ep > 1 && model_.experts_ % sizes.ep == 0;
    const uint32_t ep = one_ep ? *bound.name.expert / (model_.experts_ / sizes.ep) : 0;
    auto add = [&](uint32_t stage) {
      if (one_ep && ep < sizes.ep) of_experts_[stage * sizes.ep + ep].push_back(tensor);
      else of_stage_[stage].push_back(tensor);
    };
    const bool placed = bound.rule && sizes.pp > 1;
    if (placed && bound.rule->stage == StagePlace::kLayer) {
      add(stage_of_layer(spec_, model_.layers_, bound.name.layer.value_or(0)));
    } else if (placed && bound.rule->stage != StagePlace::kAll) {
      for (const uint32_t stage : named)
        if (model_.on_stage(tensor, spec_, stage)) add(stage);
    } else if (one_ep) {
      for (uint32_t stage = 0; stage < sizes.pp; ++stage) add(stage);
    } else {
      everywhere_.push_back(tensor);
    }
  }
}

/// Of a tensor that is looked at for this state.
Result<std::optional<SharedPart>> Model::Holdings::part_of(uint32_t tensor,
                                                           const StateCoords& state) const {
  const Bound& bound = model_.bound_[tensor];
  const uint64_t ep = bound.rule != nullptr && bound.rule->expert_axis ? state.ep : 0;
  const uint64_t dp =
      model_.is_cut_over_dp(tensor, spec_) ? model_.dp_part(tensor, spec_, state) : 0;
  const uint64_t number =
      model_.tp_rank(tensor, spec_.sizes, state) +
      model_.tp_ranks(tensor, spec_.sizes) * (ep + (is_experts(bound) ? spec_.sizes.ep : 1) * dp);
  const uint64_t key = uint64_t{model_.kind_[tensor]} << 32 | number;  // < kMaxWorldSize
  const bool shared = is_of_kind(tensor);  // else an error, which names the tensor
  if (shared) {
    MutexLock lock(mutex_);
    if (const auto known = parts_.find(key); known != parts_.end())
      return std::optional(known->second);
  }
  PTC_TRY(std::optional<SubTensor> part, model_.slice(tensor, spec_, state));
  if (!part) return std::optional<SharedPart>();
  if (!shared) return std::optional<SharedPart>(*std::move(part));
  MutexLock lock(mutex_);
  // Whoever looks at one state after the other of very many needs no more of those before.
  constexpr size_t kMost = 1 << 20;
  if (parts_.size() >= kMost) parts_.clear(), distinct_ = {};
  return std::optional(parts_.try_emplace(key, distinct_.one_of(*std::move(part))).first->second);
}

Result<std::vector<Model::Held>> Model::Holdings::of(const StateCoords& state) const {
  if (all_) return model_.hold(spec_, state);
  std::vector<uint32_t> merged;
  const std::vector<uint32_t>* all = &everywhere_;
  for (const std::vector<uint32_t>* more :
       {&of_stage_[state.pp], &of_experts_[state.pp * spec_.sizes.ep + state.ep]}) {
    if (more->empty()) continue;
    if (merged.empty()) merged = *all;
    std::vector<uint32_t>& tensors = merged;
    all = &merged;
    const auto middle = static_cast<ptrdiff_t>(tensors.size());
    tensors.insert(tensors.end(), more->begin(), more->end());
    std::inplace_merge(tensors.begin(), tensors.begin() + middle, tensors.end());
  }
  std::vector<Held> held;
  held.reserve(all->size());
  std::vector<const Held*> of_kind(model_.first_of_kind_.size());  // the first of each, in `held`
  for (const uint32_t tensor : *all) {
    const Held*& known = of_kind[model_.kind_[tensor]];
    if (known != nullptr) {
      held.push_back({tensor, known->part});
      continue;
    }
    PTC_TRY(std::optional<SharedPart> part, part_of(tensor, state));
    if (!part) continue;
    held.push_back({tensor, *std::move(part)});
    if (is_of_kind(tensor)) known = &held.back();
  }
  return held;
}

std::string Model::local_name(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const {
  const Bound& bound = bound_[tensor];
  const bool by_stage = tensors_[tensor].by_stage;
  std::string name = tensors_[tensor].name;
  if (keeps_name(tensor, spec)) return name;
  const uint32_t chunk = chunk_on_stage(tensor, spec, stage);
  if (by_stage && bound.tied_copy && stage > 0 && bound.rule->tied_head->is_literal()) {
    name.replace(bound.tied_begin, bound.tied_end - bound.tied_begin,
                 bound.rule->tied_head->text());
  } else {
    const NameMatch& match = bound.name;
    const auto number_layer = [&] {
      if (!match.layer || bound.rule->stage != StagePlace::kLayer) return;
      const uint32_t begin = chunk_begin(spec, layers_, chunk);
      if (*match.layer < begin) return;  // not on this stage
      name.replace(match.layer_begin, match.layer_end - match.layer_begin,
                   std::to_string(*match.layer - begin));
    };
    const bool expert_first = match.expert_begin < match.layer_begin;
    if (expert_first) number_layer();
    if (by_stage && match.expert && spec.sizes.ep > 1 && experts_ % spec.sizes.ep == 0)
      name.replace(match.expert_begin, match.expert_end - match.expert_begin,
                   std::to_string(*match.expert % (experts_ / spec.sizes.ep)));
    if (!expert_first) number_layer();
  }
  if (by_stage && spec.vpp > 1)
    name.insert(bound.tied_begin, fmt::format("model{}.", chunk / spec.sizes.pp));
  return name;
}

/// Of the stretches of layers that the stage has, the one with the tensor.
uint32_t Model::chunk_on_stage(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const {
  const Bound& bound = bound_[tensor];
  switch (bound.rule->stage) {
    case StagePlace::kFirst:
      if (stage == spec.embedding_stage()) return spec.embedding_chunk();
      return bound.mtp_copy && stage == spec.mtp_stage() ? spec.mtp_chunk() : spec.head_chunk();
    case StagePlace::kLast:
      return spec.head_chunk();
    case StagePlace::kMtp:
      return spec.mtp_chunk();
    case StagePlace::kAll:
      return stage;
    case StagePlace::kLayer:
      break;
  }
  const uint32_t chunk = chunk_of_layer(spec, layers_, bound.name.layer.value_or(0));
  return chunk % spec.sizes.pp == stage ? chunk : stage;
}

Result<Model> Model::with_vocabulary(
    const std::function<Result<uint64_t>(uint64_t rows)>& multiple) const {
  Model model = *this;
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    const Bound& bound = bound_[tensor];
    if (bound.rule == nullptr || bound.cut == kNone || bound.one_element || bound.scales) continue;
    const std::optional<TensorCut>& cut = bound.rule->cut;
    TensorInfo& info = model.tensors_[tensor];
    if (!cut || !cut->vocab_multiple || cut->axis >= info.shape.size()) continue;
    Result<uint64_t> of_rows = multiple(info.shape[cut->axis]);
    if (of_rows.has_error()) return std::move(of_rows).error().with_context(info.name);
    info.vocab_multiple = of_rows.value();
    info.pad_single_rank = true;
  }
  model.find_kinds();
  return model;
}

std::vector<std::string> Model::head_problems() const {
  std::vector<std::string> problems;
  for (const RuleCut& cut : *cuts_) {
    const bool known = std::find(problems.begin(), problems.end(), cut.problem) != problems.end();
    if (!cut.problem.empty() && !known) problems.push_back(cut.problem);
  }
  return problems;
}

std::string Model::describe(uint32_t tensor) const {
  const Bound& bound = bound_[tensor];
  if (!covered(bound)) return "no rule: cannot be cut";
  if (!bound.rule) return "one element: on every rank";
  std::string text;
  if (bound.scales) text += fmt::format("scales of {}: ", tensors_[bound.follows].name);
  if (bound.follows != kNone && !bound.scales) {
    text += fmt::format("follows {}: ", tensors_[bound.follows].name);
  }
  if (bound.part_of != nullptr) text += "of a quantised weight: ";
  if (bound.one_element || bound.cut == kNone || !tp_axis(tensor)) {
    text += "the same on every tp rank";
  } else {
    const RuleCut& rule_cut = (*cuts_)[bound.cut];
    text += fmt::format("tp cuts axis {}", *tp_axis(tensor));
    if (!rule_cut.problem.empty()) {
      text += fmt::format(" ({})", rule_cut.problem);
    } else if (!rule_cut.cut) {
      text += fmt::format(" ('{}' is not known)", rule_cut.missing_fact);
    } else if (rule_cut.cut->vocab_multiple > 0) {
      const uint64_t multiple = tensors_[tensor].vocab_multiple;
      text += fmt::format(", a vocabulary padded to multiples of {}·tp",
                          multiple > 0 ? multiple : rule_cut.cut->vocab_multiple);
    } else {
      std::vector<std::string> parts;
      for (const ResolvedCut::Part& part : rule_cut.cut->parts) {
        if (part.size == 0) continue;
        const char* const when_more = part.share   ? " (shared when tp is more)"
                                      : part.split ? " (each cut when tp is more)"
                                                   : "";
        parts.push_back(part.heads == 0 ? "elements"
                                        : fmt::format("{} heads{}", part.heads, when_more));
      }
      text += fmt::format(", by {}", fmt::join(parts, " + "));
    }
  }
  if (bound.name.expert) text += fmt::format("; one of {} experts", experts_);
  if (bound.rule->expert_axis && !bound.one_element) {
    text += fmt::format("; ep cuts axis {}", *bound.rule->expert_axis);
  }
  if (tensors_[tensor].folded_into)
    text += fmt::format(" of {}, in memory", tensors_[tensor].shape.to_string());
  switch (bound.rule->stage) {
    case StagePlace::kFirst:
      text += bound.tied_copy ? "; first stage, and last (tied head)" : "; first stage";
      if (bound.mtp_copy) text += ", and that of what predicts further tokens";
      break;
    case StagePlace::kLast:
      text += "; last stage";
      break;
    case StagePlace::kMtp:
      text += "; stage of what predicts further tokens, which is the last";
      break;
    case StagePlace::kAll:
      text += "; all stages";
      break;
    case StagePlace::kLayer:
      text += "; its layer's stage";
      break;
  }
  if (!bound.rule->description.empty()) text += fmt::format(" ({})", bound.rule->description);
  return text;
}

}  // namespace ptc
