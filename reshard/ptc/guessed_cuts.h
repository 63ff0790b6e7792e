// How parameters that no rule knows are probably cut: by transformers' plan, by what config.json
// says of their extents, and by how parameters are usually called.
#pragma once

#include <boost/json/object.hpp>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/tensor/box.h"

namespace ptc {

/// Tensors of one kind: "model.layers.{0-3}.mlp.up_proj.weight", or the name of one of them.
struct NamedShape {
  std::string names;
  Shape shape;  // of one of them, whole
};

/// What is known of a model beside its names and shapes.
struct ModelHints {
  std::string config;  // the text of config.json; empty: none
  /// transformers' plan of tensor parallelism, by modules and parameters:
  /// {"layers.*.self_attn.q_proj": "colwise"}.
  boost::json::object plan;
};

/// A kind of tensor, with its name taken apart.
struct TensorKind {
  std::string name;     // of one of them
  std::string pattern;  // of all: "model.layers.{layer}.mlp.up_proj.weight"
  bool in_layer = false, in_expert = false;
  std::string module;     // its name's component before the last, which is no number
  std::string last;       // "weight"
  std::string container;  // what has the parameter: all but the last component of the pattern
  Shape shape;
  bool is_known = false;                            // it has a rule
  std::optional<size_t> known_axis = std::nullopt;  // that this cuts
};
TensorKind kind_of(const NamedShape& parameters);

/// Whether transformers' plan has the parameter, or its module.
bool is_planned(const boost::json::object& plan, const TensorKind& kind);

/// The pipeline stage of what is in no layer, as it is usually called: "first", "last" or "all".
std::string usual_stage(const std::string& name);

/// A rule but for its names.
struct GuessedRule {
  boost::json::object rule;
  std::string why;
};

/// Threads: any, once made.
class CutGuesses {
 public:
  /// `all`: what may tell how others are cut, a bias as its weight.
  CutGuesses(const ModelHints& hints, const std::vector<TensorKind>& all);

  /// What nothing tells is whole on each rank.
  GuessedRule of(const TensorKind& kind) const;

  /// The facts that guessed cuts name, and the keys of config.json that have them.
  boost::json::object facts_of(const boost::json::object& rule) const;

 private:
  struct Cut {
    boost::json::object cut;  // of a rule; empty: whole
    std::optional<uint32_t> expert_axis;
    bool is_vocabulary = false;
    std::string why;
    /// What it is cut together with: weights of the attention, or of the MLP; or either.
    enum class Part { kEither, kAttention, kMlp } part = Part::kEither;
  };
  struct Number {
    std::string key;  // of config.json: "text_config.num_attention_heads"
    uint64_t value = 0;
  };

  uint64_t number(std::string_view name) const;  // 0: not known
  boost::json::object cut_in_heads(int axis, std::string_view heads) const;
  std::optional<Cut> by_plan(const TensorKind& kind) const;
  std::optional<Cut> by_extents(const TensorKind& kind) const;
  std::optional<Cut> by_extents_of_experts(const TensorKind& kind) const;
  std::optional<Cut> by_name(const TensorKind& kind) const;
  Cut cut_alone(const TensorKind& kind) const;
  Cut cut_of(const TensorKind& kind) const;

  boost::json::object plan_;
  std::map<std::string, Number, std::less<>> numbers_;
  /// Of the weights of a layer: whether any's outputs are cut, and any's inputs; of the attention,
  /// and of the MLP.
  struct CutSides {
    bool outputs[2] = {}, inputs[2] = {};
  };
  static bool matches(const bool (&sides)[2], Cut::Part part);
  std::map<std::string, CutSides, std::less<>> sides_;
  std::map<std::string, Cut, std::less<>> outputs_cut_;  // weights, by what has them
};

}  // namespace ptc
