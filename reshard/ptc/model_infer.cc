// Model::infer: from what every rank wrote to the global tensors.
//
// Global names come first (a rank's own numbers of layers and experts are shifted), then the shapes
// before dp cut
// them (model_infer_dp.cc). Then a model is bound as if these local shapes were global, which tells
// the cut of each tensor; inverting the cuts gives the global shapes. Whatever that guessed wrong
// shows in the last step, which cuts the model found and compares with what was written.
//
// Of what says which part of a whole it is, the whole's shape is known, and only the name is found.

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "reshard/ptc/model.h"
#include "reshard/ptc/model_infer_dp.h"
#include "reshard/ptc/parameter_names.h"

namespace ptc {
namespace {

std::string state_text(const LayoutSpec& spec, const StateCoords& state) {
  return fmt::format(
      "tp rank {}, pp rank {}, ep rank {}{}{}", state.tp, state.pp, state.ep,
      spec.sizes.etp != 0 ? fmt::format(", etp rank {}", state.etp) : "",
      spec.dp_parts() > 1 ? fmt::format(", {} rank {}", spec.dp_text(), state.dp) : "");
}

/// The states that differ in dp only have one such number in common.
uint32_t group_of(const LayoutSpec& spec, StateCoords state) {
  state.dp = 0;
  return state_index(spec, state);
}

std::string place(const WrittenRank& rank, const WrittenTensor& tensor) {
  return fmt::format("rank {}, {}: {}", rank.global_rank, tensor.file, tensor.name);
}

/// The rule of an embedding that is also on the last stage, as the head under that one's name.
const Rule* tied_rule(const RuleSet& rules, const RuleSet::Facts& facts) {
  if (!facts.tied.value_or(false)) return nullptr;
  for (const Rule& rule : rules.rules())
    if (rule.tied_head && rule.tied_head->is_literal() && rule.names.size() == 1 &&
        rule.names.front().is_literal())
      return &rule;
  return nullptr;
}

}  // namespace

class Model::Inference {
 public:
  Inference(const LayoutSpec& spec, const std::vector<WrittenRank>& ranks)
      : spec_(spec), ranks_(ranks) {}

  Result<Inferred> run(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts) {
    PTC_TRY(check_ranks(facts));
    PTC_TRY(find_stage_offsets(*rules, facts));
    PTC_TRY(collect());
    find_whole_on_dp();
    const std::vector<uint64_t>& dense_rows = spec_.shard_ep ? dense_rows_ : dp_rows_;
    undo_dp_cut(*rules, spec_.optimizer, {spec_.dp_parts(), dp_rows_},
                {spec_.dense_parts(), dense_rows}, said_, tensors_);
    PTC_TRY(model_, Model::bind(std::move(rules), std::move(facts), std::move(tensors_),
                                {spec_.sizes.tp, said_}));
    // Arrays of which boxes are said are left as they are: the boxes have the files' axes.
    for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor)
      if (!said_[tensor] && !in_boxes_[tensor]) model_.unfold(tensor, spec_.sizes.ep);
    PTC_TRY(widen());
    model_.find_kinds();
    PTC_TRY(check_heads());
    PTC_TRY(model_.check(spec_));
    PTC_TRY(find_cut_otherwise());
    PTC_TRY(compare());
    return Inferred{std::move(model_), std::move(tensor_of_), std::move(cut_otherwise_)};
  }

 private:
  struct Writer {
    uint32_t rank;    // position in ranks_
    uint32_t tensor;  // position in its tensors
  };
  /// Where a rank's own name has its numbers, or the name of the head that is tied to the
  /// embedding.
  struct LocalName {
    uint32_t layer = 0, expert = 0;
    size_t begin = 0, end = 0;                // of the layer, or the head's name; 0: it has neither
    size_t expert_begin = 0, expert_end = 0;  // 0: it has none
    const std::string* tied = nullptr;        // the embedding's name
    uint32_t chunk = 0;                       // "model1." of "model1.decoder.layers.0.w"
    size_t chunk_begin = 0, chunk_end = 0;    // 0: it has none
    void shift(size_t offset) {
      for (auto [from, to] : {std::pair(&begin, &end), std::pair(&expert_begin, &expert_end),
                              std::pair(&chunk_begin, &chunk_end)})
        if (*to > 0) *from += offset, *to += offset;
    }
  };

  const WrittenTensor& written(const Writer& writer) const {
    return ranks_[writer.rank].tensors[writer.tensor];
  }

  Result<> check_ranks(const RuleSet::Facts& facts);
  bool has_nothing(uint32_t stage, const RuleSet::Facts& facts) const;
  Result<> find_stage_offsets(const RuleSet& rules, const RuleSet::Facts& facts);
  bool is_local(const WrittenTensor& tensor) const {
    return spec_.naming == Naming::kStage || tensor.by_stage;
  }
  bool any_is_local() const;
  Result<LocalName> local_name(const WrittenRank& rank, const WrittenTensor& tensor,
                               const RuleSet::Match& match, size_t chunk_bytes,
                               const Rule* tied) const;
  Result<> set_offsets(const std::vector<uint32_t>& layers_of_chunk, const RuleSet::Facts& facts);
  Result<> set_experts(const RuleSet::Facts& facts);
  std::string global_name(uint32_t rank, uint32_t tensor) const;
  Result<> collect();
  Result<> collect(uint32_t rank, uint32_t i);
  Result<> check_said(const WrittenRank& rank, const WrittenTensor& tensor, uint32_t index) const;
  void find_whole_on_dp();
  Result<> widen();
  Result<> check_heads() const;
  Result<uint64_t> widen_axis(uint32_t tensor, uint32_t axis);
  std::optional<uint32_t> axis_to_widen(uint32_t tensor) const;
  bool is_one_for_all(uint32_t tensor, uint32_t axis) const;
  Result<> find_cut_otherwise();
  bool is_cut_otherwise(uint32_t tensor) const {
    return said_[tensor] && cut_otherwise_.contains(model_.tensors_[tensor].file);
  }
  Result<> compare();
  Result<size_t> compare_state(size_t begin, std::vector<bool>& written);
  Result<> compare_rank(uint32_t rank, const std::vector<Held>& held);
  Error wrote_nothing(const StateCoords& state) const;
  Error lacks(uint32_t rank, uint32_t tensor, size_t count) const;

  const LayoutSpec& spec_;
  const std::vector<WrittenRank>& ranks_;
  std::vector<uint32_t> order_;                 // positions in ranks_, by state, dp fastest
  std::vector<uint32_t> stage_offsets_;         // by stretch of layers; empty: names are global
  uint32_t experts_each_ = 0;                   // of an ep rank; 0: numbers are global
  std::vector<std::vector<LocalName>> locals_;  // by rank and tensor; empty: names are global
  std::vector<TensorInfo> tensors_;             // with local shapes
  std::vector<uint64_t> dp_rows_;               // by tensor: rows on all dp ranks together
  std::vector<uint64_t> dense_rows_;            // the same with those of all ep ranks
  std::vector<bool> said_;                      // by tensor: its shape is that of the whole
  std::vector<bool> in_boxes_;                  // by tensor: WrittenTensor::in_boxes
  std::vector<uint64_t> local_extents_;         // by tensor: of its quantised weight on a tp rank
  std::vector<Writer> first_writer_;            // by tensor
  std::vector<uint32_t> last_rank_;             // by tensor: position in ranks_ that wrote it last
  std::unordered_map<std::string, uint32_t> index_of_;  // by file and name
  std::vector<std::vector<uint32_t>> tensor_of_;
  std::set<std::string> cut_otherwise_;  // files
  Model model_;
};

Result<> Model::Inference::check_ranks(const RuleSet::Facts& facts) {
  const ParallelConfig& sizes = spec_.sizes;
  // ZeRO-1 may leave dp ranks without any state of their own; compare() knows.
  const bool all_dp = spec_.optimizer == OptimizerCut::kFsdp;
  std::vector<bool> seen(all_dp ? state_count(spec_) : sizes.different_ranks() * sizes.pp);
  for (const WrittenRank& rank : ranks_) {
    const RankCoords& at = rank.coords;
    if (at.tp >= sizes.tp || at.pp >= sizes.pp || at.ep >= sizes.ep || at.dp >= sizes.dp ||
        at.cp >= sizes.cp) {
      return invalid_argument("rank {} is not one of the {} ranks of layout {}", rank.global_rank,
                              sizes.world_size(), spec_.name());
    }
    const StateCoords state = state_of(spec_, at);
    seen[all_dp ? state_index(spec_, state) : group_of(spec_, state)] = true;
  }
  for (uint32_t index = 0; index < seen.size(); ++index) {
    const StateCoords state = state_at(spec_, index);
    if (!seen[index] && !has_nothing(state.pp, facts)) return wrote_nothing(state);
  }
  order_.resize(ranks_.size());
  std::iota(order_.begin(), order_.end(), 0);
  auto key = [&](uint32_t rank) {
    const StateCoords state = state_of(spec_, ranks_[rank].coords);
    return std::tuple(group_of(spec_, state), state.dp, ranks_[rank].global_rank);
  };
  std::stable_sort(order_.begin(), order_.end(),
                   [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
  return ok();
}

/// A stage between the others has no tensors where there are more stages than layers. Unless their
/// number is known, layers may be missing.
bool Model::Inference::has_nothing(uint32_t stage, const RuleSet::Facts& facts) const {
  const auto layers = facts.numbers.find("layers");
  if (stage == spec_.embedding_stage() || stage == spec_.head_stage() ||
      layers == facts.numbers.end())
    return false;
  const auto begin = stage_boundaries(spec_, static_cast<uint32_t>(layers->second));
  for (uint32_t c = stage; begin && c < spec_.chunks(); c += spec_.sizes.pp)
    if (begin.value()[c] != begin.value()[c + 1]) return false;
  return begin.has_value();
}

Error Model::Inference::wrote_nothing(const StateCoords& state) const {
  return invalid_argument(
      "rank {} ({}) of layout {} wrote nothing, nor did any replica of it; if it was saved under "
      "another layout, put a "
      "layout.json beside rank/ that says which; if the rank holds no tensors, save a file without "
      "tensors there",
      rank_of(spec_, state), state_text(spec_, state), spec_.name());
}

bool Model::Inference::any_is_local() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const WrittenRank& rank) {
    return std::any_of(rank.tensors.begin(), rank.tensors.end(),
                       [&](const WrittenTensor& tensor) { return is_local(tensor); });
  });
}

/// How many bytes "model1." has at the beginning of a name; 0: it has none.
size_t chunk_bytes_of(std::string_view name) {
  constexpr std::string_view kModel = "model";
  const size_t end = name.find_first_not_of("0123456789", kModel.size());
  const bool has = name.starts_with(kModel) && end != name.npos && end > kModel.size() &&
                   end <= kModel.size() + 6 && name[end] == '.';
  return has ? end + 1 : 0;
}

Result<Model::Inference::LocalName> Model::Inference::local_name(const WrittenRank& rank,
                                                                 const WrittenTensor& tensor,
                                                                 const RuleSet::Match& match,
                                                                 size_t chunk_bytes,
                                                                 const Rule* tied) const {
  LocalName local;
  const bool has_head = rank.coords.pp == spec_.head_stage() &&
                        (spec_.head_stage() != spec_.embedding_stage() || spec_.sizes.pp == 1);
  const std::string_view name = std::string_view(tensor.name).substr(chunk_bytes);
  if (match.name.layer && match.rule->stage == StagePlace::kLayer) {
    local = {
        .layer = *match.name.layer, .begin = match.name.layer_begin, .end = match.name.layer_end};
  } else if (tied != nullptr && tensor.by_stage && has_head &&
             tied->tied_head->match(name.substr(match.prefix_length))) {
    local = {.begin = match.prefix_length, .end = name.size(), .tied = &tied->names.front().text()};
  }
  if (tensor.by_stage && match.name.expert) {
    local.expert = *match.name.expert;
    local.expert_begin = match.name.expert_begin;
    local.expert_end = match.name.expert_end;
  }
  local.shift(chunk_bytes);
  if (!tensor.by_stage || spec_.vpp == 1) return local;
  if (chunk_bytes == 0)
    return invalid_argument(
        "{} is in no stretch of layers (model0, model1 …), and layout {} has {} of them on each "
        "stage",
        place(rank, tensor), spec_.name(), spec_.vpp);
  local.chunk = static_cast<uint32_t>(std::stoul(tensor.name.substr(5)));
  local.chunk_end = chunk_bytes;
  if (local.chunk >= spec_.vpp)
    return invalid_argument(
        "{} is in model{}, and layout {} has {} stretches of layers on each stage",
        place(rank, tensor), local.chunk, spec_.name(), spec_.vpp);
  return local;
}

/// With a rank's own names: finds each name's numbers, the layers before each stretch of layers,
/// and the experts of each rank.
Result<> Model::Inference::find_stage_offsets(const RuleSet& rules, const RuleSet::Facts& facts) {
  if (!any_is_local()) return ok();
  RuleFinder finder(rules);
  const Rule* const tied = spec_.sizes.pp > 1 ? tied_rule(rules, facts) : nullptr;
  std::vector<ParameterNames> parameters(spec_.sizes.pp);
  std::vector<LocalName> parameter_locals;
  locals_.resize(ranks_.size());
  auto locate = [&](std::string_view name) {
    auto match = finder.find(name);
    const auto& scales = rules.scales();
    if (!match && scales && name.ends_with(scales->suffix)) {
      match = finder.find(name.substr(0, name.size() - scales->suffix.size()));
    }
    return match;
  };
  std::vector<Writer> followers;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    locals_[rank].resize(ranks_[rank].tensors.size());
    for (uint32_t tensor = 0; tensor < ranks_[rank].tensors.size(); ++tensor) {
      const WrittenTensor& written = ranks_[rank].tensors[tensor];
      const std::string& name = written.name;
      if (!is_local(written)) continue;
      const size_t chunk_bytes = written.by_stage && spec_.vpp > 1 ? chunk_bytes_of(name) : 0;
      const auto match = locate(std::string_view(name).substr(chunk_bytes));
      if (!match) {
        followers.push_back({rank, tensor});
        continue;
      }
      PTC_TRY(locals_[rank][tensor], local_name(ranks_[rank], written, *match, chunk_bytes, tied));
      // Of two stretches of layers names differ in the beginning alone.
      parameters[ranks_[rank].coords.pp].add(name, chunk_bytes > 0 ? 0 : match->prefix_length,
                                             static_cast<uint32_t>(parameter_locals.size()));
      parameter_locals.push_back(locals_[rank][tensor]);
    }
  }
  for (const Writer& writer : followers) {
    auto follow = [&](const ParameterNames::Entry& entry, size_t offset) {
      LocalName& local = locals_[writer.rank][writer.tensor] = parameter_locals[entry.parameter];
      local.shift(offset - entry.dropped);
      return true;
    };
    parameters[ranks_[writer.rank].coords.pp].find(written(writer).name, follow);
  }

  std::vector<uint32_t> layers_of_chunk(spec_.chunks());
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const LocalName& local : locals_[rank]) {
      uint32_t& count = layers_of_chunk[local.chunk * spec_.sizes.pp + ranks_[rank].coords.pp];
      if (local.end > 0 && local.tied == nullptr) count = std::max(count, local.layer + 1);
    }
  }
  PTC_TRY(set_experts(facts));
  return set_offsets(layers_of_chunk, facts);
}

Result<> Model::Inference::set_experts(const RuleSet::Facts& facts) {
  const uint32_t ep = spec_.sizes.ep;
  if (ep == 1) return ok();
  uint32_t most = 0;
  const WrittenTensor* example = nullptr;
  const WrittenRank* of_rank = nullptr;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank)
    for (uint32_t i = 0; i < locals_[rank].size(); ++i) {
      const LocalName& local = locals_[rank][i];
      if (local.expert_end == 0 || (example != nullptr && local.expert < most)) continue;
      most = local.expert, example = &ranks_[rank].tensors[i], of_rank = &ranks_[rank];
    }
  if (example == nullptr) return ok();
  const auto fact = facts.numbers.find("experts");
  const uint64_t total = fact != facts.numbers.end() ? fact->second : (uint64_t{most} + 1) * ep;
  if (total > INT32_MAX || total % ep != 0)
    return invalid_argument("the {} experts are not divisible by ep = {}", total, ep);
  experts_each_ = static_cast<uint32_t>(total / ep);
  if (most < experts_each_) return ok();
  return invalid_argument(
      "{} is expert {} of its rank, and of {} experts each of {} ranks has {} (layout {}): ranks "
      "count their own experts from 0",
      place(*of_rank, *example), most, total, ep, experts_each_, spec_.name());
}

Result<> Model::Inference::set_offsets(const std::vector<uint32_t>& layers_of_chunk,
                                       const RuleSet::Facts& facts) {
  uint64_t total = std::accumulate(layers_of_chunk.begin(), layers_of_chunk.end(), uint64_t{0});
  if (total == 0 && spec_.naming == Naming::kGlobal) return ok();  // of another architecture
  const auto fact = facts.numbers.find("layers");
  const bool known = fact != facts.numbers.end();
  if (known) total = fact->second;
  if (total > INT32_MAX) return invalid_argument("a model of {} layers is too deep", total);
  PTC_TRY(stage_offsets_, stage_boundaries(spec_, static_cast<uint32_t>(total)));
  for (uint32_t chunk = 0; chunk < layers_of_chunk.size(); ++chunk) {
    const uint32_t expected = stage_offsets_[chunk + 1] - stage_offsets_[chunk];
    const uint32_t found = layers_of_chunk[chunk];
    // Layers behind those that are counted predict further tokens.
    const bool extra = known && chunk == spec_.mtp_chunk() && found > expected &&
                       stage_offsets_[chunk + 1] == total;
    if (found == expected || extra) continue;
    const uint32_t pp = spec_.sizes.pp;
    return invalid_argument(
        "pipeline stage {} wrote {} layers{}, but layout {} gives it {} of {}: mend \"stages\", or "
        "\"naming\" if the names are global",
        chunk % pp, found, spec_.vpp > 1 ? fmt::format(" in model{}", chunk / pp) : "",
        spec_.name(), expected, total);
  }
  return ok();
}

std::string Model::Inference::global_name(uint32_t rank, uint32_t tensor) const {
  std::string name = ranks_[rank].tensors[tensor].name;
  if (locals_.empty()) return name;
  const LocalName& local = locals_[rank][tensor];
  const RankCoords& at = ranks_[rank].coords;
  const auto number_layer = [&] {
    if (local.end == 0 || (stage_offsets_.empty() && local.tied == nullptr)) return;
    std::string text = local.tied != nullptr
                           ? *local.tied
                           : std::to_string(uint64_t{local.layer} +
                                            stage_offsets_[local.chunk * spec_.sizes.pp + at.pp]);
    name.replace(local.begin, local.end - local.begin, text);
  };
  const bool expert_first = local.expert_begin < local.begin;
  if (expert_first) number_layer();
  if (local.expert_end > 0 && experts_each_ > 0)
    name.replace(local.expert_begin, local.expert_end - local.expert_begin,
                 std::to_string(uint64_t{local.expert} + uint64_t{experts_each_} * at.ep));
  if (!expert_first) number_layer();
  return name.erase(local.chunk_begin, local.chunk_end - local.chunk_begin);
}

/// Numbers the tensors in the order of states, and within these of stretches of layers.
Result<> Model::Inference::collect() {
  tensor_of_.resize(ranks_.size());
  for (uint32_t rank : order_) tensor_of_[rank].resize(ranks_[rank].tensors.size());
  const uint32_t chunks = locals_.empty() ? 1 : spec_.vpp;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk)
    for (uint32_t rank : order_)
      for (uint32_t i = 0; i < ranks_[rank].tensors.size(); ++i)
        if (locals_.empty() || locals_[rank][i].chunk == chunk) {
          PTC_TRY(collect(rank, i));
        }
  return ok();
}

/// Checks what copies of a tensor must have in common.
Result<> Model::Inference::collect(uint32_t rank, uint32_t i) {
  const WrittenTensor& tensor = ranks_[rank].tensors[i];
  std::string name = global_name(rank, i);
  std::string key = tensor.file;
  key += '\0';
  key += name;
  auto [found, is_new] =
      index_of_.try_emplace(std::move(key), static_cast<uint32_t>(tensors_.size()));
  const uint32_t index = tensor_of_[rank][i] = found->second;
  if (is_new) {
    tensors_.push_back({tensor.file, std::move(name), tensor.dtype,
                        tensor.said ? tensor.said->whole : tensor.shape});
    tensors_.back().by_stage = tensor.by_stage;
    said_.push_back(tensor.said.has_value());
    in_boxes_.push_back(tensor.in_boxes);
    first_writer_.push_back({rank, i});
    last_rank_.push_back(rank);
    dp_rows_.push_back(tensor.shape.empty() ? 0 : tensor.shape[0]);
    dense_rows_.push_back(dp_rows_.back());
    return ok();
  }
  if (last_rank_[index] == rank)
    return invalid_argument("{} is there twice", place(ranks_[rank], tensor));
  const StateCoords before = state_of(spec_, ranks_[last_rank_[index]].coords);
  const StateCoords state = state_of(spec_, ranks_[rank].coords);
  last_rank_[index] = rank;
  if (tensor.in_boxes) in_boxes_[index] = true;
  const Writer& first = first_writer_[index];
  if (tensor.dtype != tensors_[index].dtype) {
    return invalid_argument("{} is {}, but {} on rank {}", place(ranks_[rank], tensor),
                            dtype_name(tensor.dtype), dtype_name(tensors_[index].dtype),
                            ranks_[first.rank].global_rank);
  }
  PTC_TRY(check_said(ranks_[rank], tensor, index));
  if (tensor.said) return ok();
  Shape shape = tensor.shape;
  const bool rows_differ = spec_.optimizer == OptimizerCut::kFsdp;
  if (rows_differ && !shape.empty() && !tensors_[index].shape.empty()) {
    shape[0] = tensors_[index].shape[0];
    const StateCoords first_state = state_of(spec_, ranks_[first.rank].coords);
    const bool of_group = group_of(spec_, state) == group_of(spec_, first_state);
    const bool of_dense = state.pp == first_state.pp && state.tp == first_state.tp;
    for (const auto& [adds, rows] : {std::pair(of_group, &dp_rows_), {of_dense, &dense_rows_}})
      if (state != before && adds &&
          __builtin_add_overflow((*rows)[index], tensor.shape[0], &(*rows)[index]))
        return invalid_argument("{} has too many rows", place(ranks_[rank], tensor));
  }
  if (shape == tensors_[index].shape) return ok();
  return invalid_argument(
      "{} has shape {}, but {} on rank {}, and all ranks' parts of a "
      "tensor have one shape",
      place(ranks_[rank], tensor), tensor.shape.to_string(), tensors_[index].shape.to_string(),
      ranks_[first.rank].global_rank);
}

/// What several ranks say of a tensor's whole is the same.
Result<> Model::Inference::check_said(const WrittenRank& rank, const WrittenTensor& tensor,
                                      uint32_t index) const {
  const Writer& first = first_writer_[index];
  if (tensor.said.has_value() != said_[index]) {
    return invalid_argument("{} {} which part of the whole it is, and on rank {} it {}",
                            place(rank, tensor), tensor.said ? "says" : "does not say",
                            ranks_[first.rank].global_rank, tensor.said ? "does not" : "does");
  }
  if (!tensor.said || tensor.said->whole == tensors_[index].shape) return ok();
  return invalid_argument("{} says it is part of {}, but of {} on rank {}", place(rank, tensor),
                          tensor.said->whole.to_string(), tensors_[index].shape.to_string(),
                          ranks_[first.rank].global_rank);
}

/// FSDP leaves buffers whole, and cuts all else.
void Model::Inference::find_whole_on_dp() {
  if (spec_.optimizer != OptimizerCut::kFsdp || spec_.dense_parts() == 1) return;
  std::vector<bool> cut(tensors_.size()), was_whole(tensors_.size());
  std::unordered_set<std::string_view> files;  // of which something is cut
  for (uint32_t rank : order_) {
    for (uint32_t i = 0; i < ranks_[rank].tensors.size(); ++i) {
      const WrittenTensor& tensor = ranks_[rank].tensors[i];
      if (tensor.was_whole) was_whole[tensor_of_[rank][i]] = true;
      if (!tensor.said || tensor.said->box == Box::whole(tensor.said->whole)) continue;
      cut[tensor_of_[rank][i]] = true;
      files.insert(tensor.file);
    }
  }
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    tensors_[tensor].whole_on_dp = said_[tensor] && !cut[tensor] &&
                                   !tensors_[tensor].shape.empty() &&
                                   (was_whole[tensor] || files.contains(tensors_[tensor].file));
  }
}

/// The global length of the axis that tp cuts; for a vocabulary also finds its padding.
Result<uint64_t> Model::Inference::widen_axis(uint32_t tensor, uint32_t axis) {
  const Bound& bound = model_.bound_[tensor];
  const RuleCut& rule_cut = (*model_.cuts_)[bound.cut];
  TensorInfo& info = model_.tensors_[tensor];
  const uint64_t local = info.shape[axis];
  if (!rule_cut.cut) return local;  // with tp > 1, check() will say what is missing
  ResolvedCut cut = *rule_cut.cut;
  const auto vocab = model_.facts_.numbers.find("vocab");
  // Of a vocabulary that words keep the padding is in rows.
  AxisUnit unit;
  if (bound.part_of != nullptr && cut.vocab_multiple > 0)
    unit = unit_of(local_extents_[tensor], local).value_or(AxisUnit());
  PTC_TRY(uint64_t extent, global_extent(cut, local / unit.kept * unit.elements,
                                         model_.tp_ranks(tensor, spec_.sizes),
                                         vocab == model_.facts_.numbers.end() ? 0 : vocab->second));
  extent = (extent + unit.elements - 1) / unit.elements * unit.kept;
  if (cut.vocab_multiple != rule_cut.cut->vocab_multiple ||
      cut.pad_single_rank != rule_cut.cut->pad_single_rank) {
    info.vocab_multiple = cut.vocab_multiple;
    info.pad_single_rank = cut.pad_single_rank;
  }
  return extent;
}

/// One element on an axis is a scale of all inputs, or of the group that a rank has of them.
bool Model::Inference::is_one_for_all(uint32_t tensor, uint32_t axis) const {
  if (!model_.may_be_for_all(tensor, axis)) return false;
  const auto fact = [&](std::string_view name, uint64_t without) {
    const auto found = model_.facts_.numbers.find(name);
    return found == model_.facts_.numbers.end() ? without : std::max<uint64_t>(found->second, 1);
  };
  uint64_t inputs = local_extents_[tensor];
  for (const uint32_t each : model_.weights_[model_.bound_[tensor].weight]) {
    const Bound& bound = model_.bound_[each];
    const auto own = model_.own_axis(each);
    if (!own || model_.tensors_[each].shape[*own] != inputs) continue;
    if (bound.part_of != nullptr &&
        (bound.part_of->axes != QuantisedPart::Axes::kWeight || bound.part_of->groups))
      continue;
    const DType dtype = model_.tensors_[each].dtype;  // words, or pairs of 4 bits
    if (dtype == DType::kI32) inputs *= std::max<uint64_t>(32 / fact("weight_bits", 4), 1);
    if (dtype == DType::kU8) inputs *= 2;
    if (dtype == DType::kI8) inputs *= std::max<uint64_t>(8 / fact("weight_bits", 8), 1);
    break;
  }
  return inputs < fact("group_size", UINT64_MAX);
}

std::optional<uint32_t> Model::Inference::axis_to_widen(uint32_t tensor) const {
  const auto axis = model_.own_axis(tensor);
  if (!axis || *axis >= model_.tensors_[tensor].shape.size() || is_one_for_all(tensor, *axis))
    return std::nullopt;
  return axis;
}

/// Turns the local shapes into global ones.
Result<> Model::Inference::widen() {
  local_extents_.resize(model_.tensors_.size());
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor)
    if (model_.bound_[tensor].part_of != nullptr)
      local_extents_[tensor] = model_.weight_extent(tensor);
  std::vector<std::optional<uint32_t>> axes(model_.tensors_.size());
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor)
    if (model_.bound_[tensor].rule) axes[tensor] = axis_to_widen(tensor);
  for (uint32_t tensor = 0; tensor < model_.tensors_.size(); ++tensor) {
    const Bound& bound = model_.bound_[tensor];
    if (!bound.rule || bound.one_element || said_[tensor]) continue;
    if (bound.rule->folded_into != model_.tensors_[tensor].folded_into) continue;  // not cut
    Shape& shape = model_.tensors_[tensor].shape;
    const auto& expert_axis = bound.rule->expert_axis;
    const auto experts = model_.facts_.numbers.find("experts");
    const bool one_for_all =
        bound.part_of != nullptr && expert_axis && *expert_axis < shape.size() &&
        shape[*expert_axis] == 1 &&
        (experts == model_.facts_.numbers.end() || experts->second != spec_.sizes.ep);
    if (expert_axis && *expert_axis < shape.size() && !one_for_all) {
      if (shape[*expert_axis] > (uint64_t{1} << 40)) {
        return invalid_argument("{}: axis {} is too long", model_.tensors_[tensor].name,
                                *expert_axis);
      }
      shape[*expert_axis] *= spec_.sizes.ep;
    }
    if (!axes[tensor]) continue;
    auto extent = widen_axis(tensor, *axes[tensor]);
    if (!extent) {
      const Writer& writer = first_writer_[tensor];
      return std::move(extent).error().with_context(place(ranks_[writer.rank], written(writer)));
    }
    shape[*axes[tensor]] = extent.value();
    auto elements = num_elements(shape);
    if (!elements) return std::move(elements).error().with_context(model_.tensors_[tensor].name);
  }
  return ok();
}

namespace {

bool is_this_box(const SubTensor& part, const Box& box) {
  if (part.local_shape != box.extent || part.flat) return false;
  if (box.empty()) return true;
  return part.pieces.size() == 1 && part.pieces.front().global == box;
}

}  // namespace

/// Files of which a rank has said parts that are not those of the layout, or lacks some.
/// Heads were counted by what one of the tp ranks has. Whoever reads the checkpoint counts them by
/// the wholes, and must come to the same.
Result<> Model::Inference::check_heads() const {
  if (spec_.sizes.tp == 1 || !model_.heads_counted_) return ok();
  PTC_TRY(const Model whole, Model::bind(model_.rules_, model_.facts_, model_.tensors_));
  for (const uint32_t tensor : model_.first_of_kind_) {
    const uint32_t here = model_.bound_[tensor].cut, there = whole.bound_[tensor].cut;
    if (here == kNone || there == kNone) continue;
    const RuleCut& by_ranks = (*model_.cuts_)[here];
    const RuleCut& by_wholes = (*whole.cuts_)[there];
    if (by_ranks.cut == by_wholes.cut) continue;
    return invalid_argument(
        "{}: by what {} tp ranks have it has other heads than by the whole{}; say them in "
        "config.json, with the elements of one (\"head_dim\"), or commit it with fewer tp ranks",
        model_.tensors_[tensor].name, spec_.sizes.tp,
        by_wholes.problem.empty() ? "" : fmt::format(" ({})", by_wholes.problem));
  }
  return ok();
}

Result<> Model::Inference::find_cut_otherwise() {
  if (std::find(said_.begin(), said_.end(), true) == said_.end()) return ok();
  std::vector<Held> held;
  std::optional<StateCoords> state_of_held;
  for (uint32_t rank : order_) {
    const std::vector<WrittenTensor>& tensors = ranks_[rank].tensors;
    const StateCoords state = state_of(spec_, ranks_[rank].coords);
    if (tensors.empty()) continue;
    if (state_of_held != state) {
      PTC_TRY(held, model_.hold(spec_, state));
      state_of_held = state;
    }
    std::unordered_map<uint32_t, uint32_t> number;  // tensor → in `tensors`
    for (uint32_t i = 0; i < tensors.size(); ++i) number.emplace(tensor_of_[rank][i], i);
    for (const Held& each : held) {
      if (!said_[each.tensor] || is_cut_otherwise(each.tensor)) continue;
      const auto found = number.find(each.tensor);
      const bool fits = found == number.end()
                            ? !model_.is_cut_over_dp(each.tensor, spec_)
                            : is_this_box(each.part, tensors[found->second].said->box);
      if (!fits) cut_otherwise_.insert(model_.tensors_[each.tensor].file);
    }
  }
  return ok();
}

Result<> Model::Inference::compare() {
  for (size_t begin = 0; begin < order_.size();) {
    // All dp ranks of one group: what dp does not cut may be written by any of them.
    const StateCoords first = state_of(spec_, ranks_[order_[begin]].coords);
    const uint32_t group = group_of(spec_, first);
    std::vector<bool> written(model_.tensors_.size());
    std::vector<bool> states(spec_.dp_parts());
    const uint32_t writer = order_[begin];
    while (begin < order_.size()) {
      const StateCoords state = state_of(spec_, ranks_[order_[begin]].coords);
      if (group_of(spec_, state) != group) break;
      states[state.dp] = true;
      PTC_TRY(begin, compare_state(begin, written));
    }
    PTC_TRY(const std::vector<Held> held, model_.hold(spec_, first));
    bool cut = false;
    for (const Held& each : held)
      cut |= model_.is_cut_over_dp(each.tensor, spec_) && !is_cut_otherwise(each.tensor);
    const auto absent = std::find(states.begin(), states.end(), false);
    if (cut && absent != states.end()) {
      StateCoords state = first;
      state.dp = static_cast<uint32_t>(absent - states.begin());
      return wrote_nothing(state);
    }
    size_t missing = 0;
    uint32_t example = 0;
    for (const Held& each : held) {
      if (written[each.tensor] || model_.is_cut_over_dp(each.tensor, spec_) ||
          is_cut_otherwise(each.tensor))
        continue;
      if (missing++ == 0) example = each.tensor;
    }
    if (missing > 0) return lacks(writer, example, missing);
  }
  return ok();
}

/// Compares the ranks of the state that begins at `begin` of order_; returns where the next begins.
/// What they wrote is marked in `written`; tensors that dp cuts must be there.
Result<size_t> Model::Inference::compare_state(size_t begin, std::vector<bool>& written) {
  const StateCoords state = state_of(spec_, ranks_[order_[begin]].coords);
  PTC_TRY(const std::vector<Held> held, model_.hold(spec_, state));
  size_t end = begin;
  bool any = held.empty();
  std::vector<bool> here(model_.tensors_.size());
  for (; end < order_.size() && state_of(spec_, ranks_[order_[end]].coords) == state; ++end) {
    const uint32_t rank = order_[end];
    if (ranks_[rank].tensors.empty()) continue;
    any = true;
    PTC_TRY(compare_rank(rank, held));
    for (uint32_t tensor : tensor_of_[rank]) here[tensor] = written[tensor] = true;
  }
  size_t missing = 0;
  uint32_t example = 0;
  for (const Held& each : held) {
    if (here[each.tensor] || is_cut_otherwise(each.tensor)) continue;
    if (!model_.is_cut_over_dp(each.tensor, spec_)) {
      if (spec_.dp_parts() > 1) continue;  // another dp rank may have written it
      if (!any) ++missing;
      continue;
    }
    if (missing++ == 0) example = each.tensor;
  }
  if (!any && missing > 0) {
    return invalid_argument(
        "rank {} ({}) of layout {} wrote no tensors, nor did any replica of it; it should hold {} "
        "and {} more",
        ranks_[order_[begin]].global_rank, state_text(spec_, state), spec_.name(),
        model_.tensors_[held.front().tensor].name, held.size() - 1);
  }
  if (missing > 0) return lacks(order_[begin], example, missing);
  return end;
}

Error Model::Inference::lacks(uint32_t rank, uint32_t tensor, size_t count) const {
  const StateCoords state = state_of(spec_, ranks_[rank].coords);
  return invalid_argument(
      "rank {} ({}) lacks {} in {} ({} tensor{} in all), which rank {} wrote and layout {} gives "
      "it "
      "too",
      ranks_[rank].global_rank, state_text(spec_, state),
      model_.local_name(tensor, spec_, state.pp), model_.tensors_[tensor].file, count,
      count == 1 ? "" : "s", ranks_[first_writer_[tensor].rank].global_rank, spec_.name());
}

/// What the rank wrote is what it holds, and of each file all or nothing.
Result<> Model::Inference::compare_rank(uint32_t rank, const std::vector<Held>& held) {
  std::unordered_map<uint32_t, const SubTensor*> expected;
  expected.reserve(held.size());
  for (const Held& each : held) expected.emplace(each.tensor, &*each.part);
  const WrittenRank& writer = ranks_[rank];
  const StateCoords state = state_of(spec_, writer.coords);
  std::unordered_set<std::string_view> files;
  for (uint32_t i = 0; i < writer.tensors.size(); ++i) {
    const uint32_t tensor = tensor_of_[rank][i];
    files.insert(writer.tensors[i].file);
    const auto found = expected.find(tensor);
    if (found == expected.end()) {
      return invalid_argument("{} does not belong on {} under layout {}; how it is cut: {}",
                              place(writer, writer.tensors[i]), state_text(spec_, state),
                              spec_.name(), model_.describe(tensor));
    }
    if (found->second->local_shape != writer.tensors[i].shape && !is_cut_otherwise(tensor)) {
      return invalid_argument("{} has shape {}, but under layout {} it should be {} of {}",
                              place(writer, writer.tensors[i]), writer.tensors[i].shape.to_string(),
                              spec_.name(), found->second->local_shape.to_string(),
                              model_.tensors_[tensor].shape_in_files().to_string());
    }
    if (writer.tensors[i].by_stage && spec_.vpp > 1) {
      const std::string name = model_.local_name(tensor, spec_, state.pp);
      if (name != writer.tensors[i].name)
        return invalid_argument("{} is {} under layout {}", place(writer, writer.tensors[i]), name,
                                spec_.name());
    }
    expected.erase(found);
  }
  std::erase_if(expected, [&](const auto& each) {
    return !files.contains(model_.tensors_[each.first].file) || is_cut_otherwise(each.first);
  });
  if (expected.empty()) return ok();
  const auto first =
      std::min_element(expected.begin(), expected.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
  return lacks(rank, first->first, expected.size());
}

Result<Model::Inferred> Model::infer(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                                     const LayoutSpec& spec,
                                     const std::vector<WrittenRank>& ranks) {
  return Inference(spec, ranks).run(std::move(rules), std::move(facts));
}

}  // namespace ptc
