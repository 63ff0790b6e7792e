// A model: its tensors, and which part of each every rank holds under any layout: the slicing and
// partitioning functions of the PTC.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "reshard/ptc/layout.h"
#include "reshard/ptc/rule_set.h"
#include "reshard/ptc/slicing.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"
#include "store/tensor/shared_part.h"

namespace ptc {

/// One logical tensor. Identity: (file, name); one job may have `w` in two files.
struct TensorInfo {
  std::string file;  // of a rank's files the one it is in, under every layout: "model.safetensors"
  std::string name;  // global
  DType dtype = DType::kF32;
  Shape shape;  // global, without padding
  // How a padded vocabulary was found to be padded (0: by its rule).
  uint64_t vocab_multiple = 0;
  bool pad_single_rank = false;
  /// Its writers have said that each has all of it, beside others that they cut: FSDP does not cut
  /// it, as a buffer.
  bool whole_on_dp = false;
  /// All experts of a layer, of which `shape` has the first axis, and the arrays in files none:
  /// this axis of theirs is as many times as long. In memory they are the same elements, in one
  /// order.
  std::optional<uint32_t> folded_into = {};
  /// Its files are each a rank's own, whatever LayoutSpec::naming says, as Megatron's: layers count
  /// from the stage's first, experts from the rank's first, and the copy of a tied embedding on the
  /// last stage is the head. Where a stage has several stretches of layers (LayoutSpec::vpp), names
  /// begin with that of theirs, "model1.", and layers count from its first.
  bool by_stage = false;

  /// The shape that a file has which holds all of it.
  Shape shape_in_files() const { return folded_into ? folded(shape, *folded_into) : shape; }
  /// All of it, as such a file has it.
  SubTensor whole() const;
};

/// Which part of a whole tensor an array says that it is.
struct SaidPart {
  Box box;
  Shape whole;
};

/// Coordinates that decide the content of a rank's files. cp and dp replicas share one state,
/// unless the layout cuts optimizer state or parameters over dp (and cp): then each has a state of
/// its own, of which the tensors that are not cut over dp are in all of them (and stored once).
struct StateCoords {
  uint32_t tp = 0, pp = 0, ep = 0;
  uint32_t dp = 0;   // LayoutSpec::dp_part(): may count cp ranks too
  uint32_t etp = 0;  // where ParallelConfig has it
  friend bool operator==(const StateCoords&, const StateCoords&) = default;
};
StateCoords state_of(const LayoutSpec& spec, const RankCoords& rank);
/// Position among the layout's states, tp fastest, then ep, pp and dp; with etp, as ranks are
/// numbered.
uint32_t state_index(const LayoutSpec& spec, const StateCoords& state);
StateCoords state_at(const LayoutSpec& spec, uint32_t index);
inline uint32_t state_count(const LayoutSpec& spec) {
  return spec.sizes.different_ranks() * spec.sizes.pp * spec.dp_parts();
}
/// The first rank that has it.
uint64_t rank_of(const LayoutSpec& spec, const StateCoords& state);

/// What one rank wrote of one tensor.
struct WrittenTensor {
  std::string file;
  std::string name;  // as written: stage-local if the layout says so
  DType dtype = DType::kF32;
  Shape shape;                        // local
  std::optional<SaidPart> said = {};  // of this shape; nullopt: what the layout says
  bool was_whole = false;  // TensorInfo::whole_on_dp before, and is `said` to be it again
  bool by_stage = false;   // TensorInfo::by_stage
  bool in_boxes = false;   // in several arrays, each with a box of it, or one that says its box
};
struct WrittenRank {
  uint64_t global_rank = 0;
  RankCoords coords;
  std::vector<WrittenTensor> tensors;
};

/// Immutable; threads: any.
class Model {
 public:
  /// Binds tensors to rules. A tensor is bound by, in this order: a rule that matches its name; the
  /// weight whose block scales it holds; that of the quantised weight that it is part of; a
  /// parameter that it follows (optimizer state: its name has the parameter's, with or without the
  /// family's prefix, between borders of components: "exp_avg.<parameter>",
  /// "state.<parameter>.step"; same shape: same cut; one element: not cut; of a parameter of one
  /// element: as other state of its kind; in all cases the parameter's stage and expert; a float32
  /// tensor of the very name that another file has in lower precision is such state too); nothing,
  /// but it has one element: replicated; nothing (`uncovered`: cannot be cut).
  static Result<Model> bind(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                            std::vector<TensorInfo> tensors);
  /// The same of tensors that have the shapes of files with all of each: finds which of them have
  /// experts in an axis of others (TensorInfo::folded_into).
  static Result<Model> bind_as_in_files(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                                        std::vector<TensorInfo> tensors);

  /// The model that `ranks` wrote under `spec`: finds global names and shapes, and checks that each
  /// rank wrote what it holds under `spec`: nothing missing, nothing else, shapes as cut, the same
  /// dtype everywhere, all states that have tensors written at least once (replicas may be
  /// missing, or have written no tensors). Errors are kInvalidArgument, one sentence with rank,
  /// file, tensor, found and expected.
  ///
  /// Of what says which part it is (WrittenTensor::said) nothing is guessed: its whole has the
  /// shape that is said. Where parts are others than those of `spec`, or some are not there, that
  /// is no error: the file is one of `cut_otherwise`, and the caller finds out whether its parts
  /// make up the wholes.
  struct Inferred;
  static Result<Inferred> infer(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                                const LayoutSpec& spec, const std::vector<WrittenRank>& ranks);

  const RuleSet& rules() const { return *rules_; }
  std::shared_ptr<const RuleSet> rules_ptr() const { return rules_; }
  const RuleSet::Facts& facts() const { return facts_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  /// TensorInfo::file as a number: the same for those with the same, from 0 on.
  uint32_t file_number(uint32_t tensor) const { return file_number_[tensor]; }
  uint32_t files() const { return files_; }
  uint32_t layers() const { return layers_; }  // for pipeline stages

  /// True for parameters and buffers; false for what follows a parameter (optimizer state).
  bool is_parameter(uint32_t tensor) const;
  /// True for what follows a parameter, and, of names that no rule knows, for those that say so
  /// themselves ("state.0.exp_avg"): no loader of a model has a place for it.
  bool is_optimizer_state(uint32_t tensor) const;
  /// Whether dp ranks hold different parts of the tensor: under zero1 optimizer state, under fsdp
  /// parameters too; never scalars and buffers.
  bool is_cut_over_dp(uint32_t tensor, const LayoutSpec& spec) const;
  /// Among how many: not the same for all, where ep ranks share what is no expert's.
  uint32_t dp_parts(uint32_t tensor, const LayoutSpec& spec) const {
    return is_experts(bound_[tensor]) ? spec.dp_parts() : spec.dense_parts();
  }
  /// A state's part of these; and a state that has this part, where `state` says the rest.
  uint32_t dp_part(uint32_t tensor, const LayoutSpec& spec, const StateCoords& state) const;
  StateCoords with_dp_part(uint32_t tensor, const LayoutSpec& spec, StateCoords state,
                           uint32_t part) const;

  /// Whether every tensor can be cut under `spec`; kInvalidArgument names the first that cannot,
  /// its axis' length and the size that does not divide it, or the fact that is not known and where
  /// to give it, or the tensors no rule covers.
  Result<> check(const LayoutSpec& spec) const;

  /// Pipeline stages that hold the tensor: one; all; or first and last (a tied embedding, or one
  /// that layers look up which predict further tokens).
  bool on_stage(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const;

  /// What the state holds of the tensor: nullopt if nothing (other stage, other expert rank).
  Result<std::optional<SubTensor>> slice(uint32_t tensor, const LayoutSpec& spec,
                                         const StateCoords& state) const;

  struct Held {
    uint32_t tensor;
    SharedPart part;
  };
  /// All that a state holds, in the order of tensors().
  Result<std::vector<Held>> hold(const LayoutSpec& spec, const StateCoords& state) const;

  /// The same for many states of one spec: tensors of other stages and other ranks' experts are not
  /// looked at, and equal parts are made once and shared. The model outlives it. Threads: any.
  class Holdings {
   public:
    Holdings(const Model& model, LayoutSpec spec);
    const LayoutSpec& spec() const { return spec_; }
    /// Cost: O(n) in what the state holds, and the kinds of tensors.
    Result<std::vector<Held>> of(const StateCoords& state) const;

   private:
    /// Whether tensors of one kind have the same part in a state that has them.
    bool is_of_kind(uint32_t tensor) const {
      return !model_.bound_[tensor].name.expert || model_.experts_ % spec_.sizes.ep == 0;
    }
    Result<std::optional<SharedPart>> part_of(uint32_t tensor, const StateCoords& state) const;

    const Model& model_;
    const LayoutSpec spec_;
    std::vector<uint32_t> everywhere_;               // tensors
    std::vector<std::vector<uint32_t>> of_stage_;    // those of all its expert ranks
    std::vector<std::vector<uint32_t>> of_experts_;  // by stage, then ep rank
    bool all_ = false;                               // each state is asked about each tensor
    mutable Mutex mutex_;
    /// By the tensor's kind and the coordinates that count; those of some kinds are equal.
    mutable std::unordered_map<uint64_t, SharedPart> parts_ PTC_GUARDED_BY(mutex_);
    mutable DistinctParts distinct_ PTC_GUARDED_BY(mutex_);
  };

  /// Whether the tensor's name is its own in the files of all stages.
  bool keeps_name(uint32_t tensor, const LayoutSpec& spec) const {
    return (spec.naming == Naming::kGlobal && !tensors_[tensor].by_stage) || !bound_[tensor].rule;
  }
  /// Whether those of all tensors are.
  bool keeps_names(const LayoutSpec& spec) const {
    return spec.naming == Naming::kGlobal && !any_by_stage_;
  }
  /// The tensor's name in the files of a stage.
  std::string local_name(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const;

  /// The same, but that vocabularies of so many rows are padded to multiples of
  /// `multiple(rows)`·tp, also with one rank.
  Result<Model> with_vocabulary(
      const std::function<Result<uint64_t>(uint64_t rows)>& multiple) const;

  /// Of how many layers and experts there are parameters; 0: of none. Of adapters, and of layers
  /// that predict further tokens, there are none. Cost: O(n), no name is looked at.
  struct FoundNumbers {
    uint32_t layers = 0, experts = 0;
  };
  FoundNumbers found_numbers() const;
  /// The first tensor of each rule that has a `tied_head`.
  std::vector<uint32_t> embeddings() const;

  /// Why layers' heads cannot be told, where config.json contradicts the tensors: one sentence for
  /// each that is another.
  std::vector<std::string> head_problems() const;

  /// One line on how tp and ep cut the tensor; for `ptc rules`.
  std::string describe(uint32_t tensor) const;

 private:
  class Binder;
  class Inference;
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Bound {
    const Rule* rule = nullptr;  // of the tensor or of what it follows; nullptr: not bound
    uint32_t cut = kNone;        // in cuts_; kNone: replicated over tp
    uint32_t follows = kNone;    // parameter, if it follows one
    NameMatch name;              // layer_begin and layer_end point into this tensor's own name
    bool one_element = false;    // of optimizer state, or bound to nothing: not cut
    bool scales = false;         // holds the block scales of `follows`
    const QuantisedPart* part_of = nullptr;  // of a quantised weight that `rule` is for
    uint32_t weight = kNone;                 // in weights_, also of one that is stored as a whole
    bool tied_copy = false;                  // also on the last stage
    bool mtp_copy = false;                   // also on that of what predicts further tokens
    size_t tied_begin = 0;  // of a tied copy: its parameter's name without the family's prefix,
    size_t tied_end = 0;    // in this tensor's own
  };
  struct RuleCut {
    std::optional<ResolvedCut> cut;
    std::string missing_fact;  // the fact without which cut is not known
    std::string problem;       // … or why the facts and the tensors' shapes give none
  };
  /// Shapes that are what one of `tp` ranks has, but of what has said its whole's.
  struct CutShapes {
    uint32_t tp = 1;
    std::vector<bool> whole;  // by tensor
  };
  static Result<Model> bind(std::shared_ptr<const RuleSet> rules, RuleSet::Facts facts,
                            std::vector<TensorInfo> tensors, CutShapes shapes);
  static bool needs_rules(const LayoutSpec& spec);
  Result<> check_not_with(uint32_t tensor, const LayoutSpec& spec) const;
  std::optional<uint32_t> own_axis(uint32_t tensor) const;
  bool may_be_for_all(uint32_t tensor, uint32_t axis) const;
  std::optional<uint32_t> tp_axis(uint32_t tensor) const;
  uint64_t weight_extent(uint32_t tensor) const;
  Result<> cut_quantised(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks) const;
  std::string tp_that_would_do(uint32_t tensor) const;
  /// By its name, or all of a layer's in one.
  static bool is_experts(const Bound& bound) {
    return bound.name.expert || (bound.rule != nullptr && bound.rule->expert_axis);
  }
  /// Among how many ranks tp, or the etp of experts, cuts the tensor.
  uint32_t tp_ranks(uint32_t tensor, const ParallelConfig& sizes) const {
    return is_experts(bound_[tensor]) ? sizes.expert_tp() : sizes.tp;
  }
  uint32_t tp_rank(uint32_t tensor, const ParallelConfig& sizes, const StateCoords& state) const {
    return sizes.etp != 0 && is_experts(bound_[tensor]) ? state.etp : state.tp;
  }
  bool covered(const Bound& bound) const { return bound.rule != nullptr || bound.one_element; }
  Result<AxisSlice> tp_slice(uint32_t tensor, uint64_t extent, uint32_t rank, uint32_t ranks) const;
  Result<> cut_over_tp(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks) const;
  Result<> cut_over_ep(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks) const;
  void unfold(uint32_t tensor, uint32_t ep);
  /// Whether there may be so many: no tensor that has one row for each says otherwise.
  bool are_the_experts(uint64_t count) const {
    return experts_along_ == 0 || experts_along_ == count;
  }
  Result<> check_fold(uint32_t tensor, const LayoutSpec& spec) const;
  Result<> check_whole_bytes(uint32_t tensor, const SubTensor& part) const;
  Result<> cut_over_dp(SubTensor& part, uint32_t tensor, uint32_t rank, uint32_t ranks,
                       OptimizerCut cut) const;
  uint32_t chunk_on_stage(uint32_t tensor, const LayoutSpec& spec, uint32_t stage) const;
  Result<std::optional<SubTensor>> slice_unnamed(uint32_t tensor, const LayoutSpec& spec,
                                                 const StateCoords& state) const;
  Error uncovered_error() const;
  /// Of whole tensors: after their shapes change, again.
  void find_kinds();
  void number_files();

  std::shared_ptr<const RuleSet> rules_;
  RuleSet::Facts facts_;
  std::vector<TensorInfo> tensors_;
  std::vector<Bound> bound_;                    // by tensor
  std::vector<std::vector<uint32_t>> weights_;  // quantised ones: their tensors
  std::shared_ptr<const std::vector<RuleCut>> cuts_;
  std::vector<uint32_t> kind_;           // by tensor: of one kind are those that are cut alike
  std::vector<uint32_t> first_of_kind_;  // the first tensor of each
  std::vector<uint32_t> file_number_;    // by tensor
  uint32_t files_ = 0;
  bool any_by_stage_ = false;
  uint32_t layers_ = 0;
  uint32_t experts_ = 0;        // per-expert tensors: number of experts
  uint64_t experts_along_ = 0;  // by Rule::experts_along; 0: no tensor says it
  bool heads_counted_ = false;  // some layers' heads follow from the shapes of their weights
};

struct Model::Inferred {
  Model model;
  /// [position in ranks][position in its tensors] → index in model.tensors().
  std::vector<std::vector<uint32_t>> tensor_of;
  std::set<std::string> cut_otherwise;  // TensorInfo::file
};

}  // namespace ptc
