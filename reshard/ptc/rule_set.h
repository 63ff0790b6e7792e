// Rule sets: how each parameter of a model family is cut. Data (reshard/rules/*.json), parsed here.
// The format is described in reshard/rules/README.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "reshard/ptc/name_pattern.h"
#include "store/base/error.h"

namespace ptc {

/// A number in a rule: given, or a fact of the model ("kv_heads"), or a product of facts and
/// numbers ("mamba_heads*mamba_head_dim").
using RuleNumber = std::variant<uint64_t, std::string>;

/// One of several blocks that lie behind each other on the axis that is cut.
struct CutPart {
  RuleNumber size = uint64_t{1};    // relative to the other parts; 0: no such part
  std::optional<RuleNumber> heads;  // indivisible units in this part; absent: its elements
  bool share = false;               // more ranks than heads: neighbours hold the same head
  bool split = false;               // … each head is cut over its ranks
  /// There only in models of which these facts have these values.
  std::vector<std::pair<std::string, uint64_t>> when;
};

/// How tensor parallelism cuts one axis. No parts: replicated.
struct TensorCut {
  uint32_t axis = 0;
  std::vector<CutPart> parts;
  std::optional<uint64_t> vocab_multiple;  // padded to a multiple of this × tp
  bool pad_single_rank = false;            // a vocabulary: padded with tp = 1 too
  uint64_t block = 1;                      // cuts fall on multiples of this many elements only
};

enum class StagePlace {
  kLayer,  // the stage that has the layer
  kFirst,
  kLast,
  kMtp,  // the one that has what predicts further tokens: the last, if no other is named
  kAll,
};

/// What of a layer's attention a weight is. How many key-value heads the layer has follows from
/// them: attention_heads.h.
enum class AttentionPart { kNone, kQueries, kKeys, kValues, kOutput, kFused };

struct Rule {
  std::vector<NamePattern> names;
  std::optional<TensorCut> cut;         // nullopt: replicated over tp
  std::optional<uint32_t> expert_axis;  // stacked experts: cut over ep on this axis
  /// Files have no axis of the experts, which is the first: this one of theirs is as many times as
  /// long. `cut` counts the axes that are in memory.
  std::optional<uint32_t> folded_into;
  /// Not cut, and as long on this axis as there are experts.
  std::optional<uint32_t> experts_along;
  StagePlace stage = StagePlace::kLayer;
  // Also on the last stage, where the model's head is tied, no tensor matches tied_head, and some
  // tensor matches tied_when if there is one.
  std::optional<NamePattern> tied_head;
  std::optional<NamePattern> tied_when;
  bool with_mtp = false;  // also on the stage of what predicts further tokens, if anything does
  /// Sizes that layouts of a model with such a tensor may not have: no cut follows the order in it.
  std::vector<std::string> not_with;               // "tp", "pp", "ep"
  bool inputs_first = false;                       // a weight stored [in, out]: Conv1D, embeddings
  bool buffer = false;                             // no parameter: FSDP does not cut it
  AttentionPart attention = AttentionPart::kNone;  // of the weights among the names
  bool or_one = false;  // a tensor of one element is for all that the cut divides: whole
  /// Other models have such names with another order inside: only where the model's type is known.
  bool needs_type = false;
  std::string description;  // one line for people: `ptc rules`
};

/// Scales of block-wise quantised weights: tensor `P<suffix>` has one element for each block of
/// `block` elements on every axis of tensor P (fewer at the end), and is cut as P is.
struct BlockScales {
  std::string suffix;
  uint64_t block = 0;
};

/// Tensors that a quantised weight is kept in, in place of `X.weight` or beside it: `X.<name>`, or
/// `X.weight<suffix>`. Each is cut as the weight is, on its own axis for the one that is cut, and
/// in proportion: packed words and groups of elements that have one scale are never cut through.
struct QuantisedPart {
  enum class Axes {
    kWeight,  // those of the weight; of one axis only: the weight's outputs
    kInOut,   // inputs, outputs
    kIn,      // inputs
    kOne,     // one element
    kHeads,   // one element, or one for each head that the weight's outputs are
    kWhole,   // whole on each rank, whatever its shape
  };
  std::vector<std::string> names;     // last components
  std::vector<std::string> suffixes;  // of the weight's name
  Axes axes = Axes::kWeight;
  bool groups = false;  // one element for each group of the weight's inputs
  /// Says which group each input belongs to: unless the fact `act_order` is 0, what `groups` marks
  /// is whole where the inputs are cut.
  bool order = false;
};

/// Low-rank adapters beside a weight, PEFT's LoRA: tensor `<module>.<in>…` is [rank, in], tensor
/// `<module>.<out>…` is [out, rank] or [out]. Each is cut as `<module>.weight` is on the axis of
/// its inputs or outputs, and replicated where that is not cut.
struct Adapters {
  std::string prefix;                 // of all names, before the family's own
  std::vector<std::string> wrappers;  // components put between a module and its parameters' names
  std::vector<std::string> in, out;   // components
};

/// Components that PyTorch puts into the names of a module that it wraps; no rule has them.
struct Wrappers {
  std::vector<std::string> leading;   // before a name: "module" (DistributedDataParallel)
  std::vector<std::string> anywhere;  // "_orig_mod" (torch.compile), of the model or a layer of it
};

/// A parsed rule set. Immutable.
class RuleSet {
 public:
  /// `text` is a rule set, or a job's rules.json that `extends` one of the built-in families (its
  /// rules come first, its facts override). Errors: kInvalidArgument with line and column.
  static Result<std::shared_ptr<const RuleSet>> parse(std::string_view text);
  /// The same of a text that a user saves now. It may be refused for more: checkpoints and jobs
  /// keep texts that were taken before.
  static Result<std::shared_ptr<const RuleSet>> parse_new(std::string_view text);
  /// Of a family that is built in; kNotFound otherwise.
  static Result<std::shared_ptr<const RuleSet>> builtin(std::string_view family);
  /// Names of the built-in families, sorted.
  static std::vector<std::string> builtin_families();
  /// By config.json's model_type where a family knows it; else the family that covers most kinds of
  /// names (equal but for numbers), of several the one of whose rules the largest share matches;
  /// nullptr if none matches a name with a layer. A family that is `known_by` some names is only
  /// one of them where one of these is there. Of a model_type that no family knows it must cover
  /// all names, and none by a rule that needs the type.
  static std::shared_ptr<const RuleSet> choose(std::optional<std::string_view> model_type,
                                               const std::vector<std::string>& tensor_names);
  /// The family "none": no rules. Its models can be stored and read, but not cut.
  static std::shared_ptr<const RuleSet> none();

  const std::string& family() const { return family_; }
  const std::string& description() const { return description_; }
  /// The rules as written, and behind them those that follow from them: of layers that predict
  /// further tokens, and of adapters.
  const std::vector<Rule>& rules() const { return rules_; }
  size_t written_rules() const { return written_rules_; }
  /// Which of the written ones a rule of rules() is, or follows from.
  size_t written_rule(const Rule& rule) const;
  const std::vector<std::string>& model_types() const { return model_types_; }

  const std::optional<BlockScales>& scales() const { return scales_; }

  struct Match {
    const Rule* rule;
    NameMatch name;
    size_t prefix_length = 0;                // of the family's prefix in the name
    const QuantisedPart* part_of = nullptr;  // it is a part of a weight that the rule is for
  };
  /// The first rule that matches, also behind one of the family's prefixes ("bert."). Where none
  /// does, that of the weight of which the tensor is a quantised part. For many names use a
  /// RuleFinder.
  std::optional<Match> find(std::string_view tensor_name) const;
  /// These names without wrappers: leading ones where all have one, and where no two become the
  /// same; else as they are. So a holder's ("model." of Lightning's), without which rules know
  /// them.
  std::vector<std::string> without_wrappers(std::vector<std::string> names) const;
  /// The name of the weight of which a tensor of this name is such a part; empty: of none.
  static std::string weight_of(std::string_view name, const QuantisedPart& part);
  /// Whether a component stands between a module and its parameters' names: "base_layer".
  bool is_adapter_wrapper(std::string_view component) const;
  /// Whether names that differ in their numbers alone may have different rules.
  bool numbers_matter() const { return numbers_matter_; }
  /// Whether the pattern matches, also behind one of the prefixes, or a quantised part's weight.
  bool matches(const NamePattern& pattern, std::string_view tensor_name) const;

  /// Facts of a model from its config.json (fact → keys tried in turn), under the rule set's own.
  /// `config_text` empty: only those. A config.json that is no JSON object is kInvalidArgument.
  struct Facts {
    std::map<std::string, uint64_t, std::less<>> numbers;  // "heads" → 32
    std::optional<bool> tied;                              // tie_word_embeddings; absent: unknown
  };
  Result<Facts> facts(std::string_view config_text) const;

  /// The rule set as text that parse() reads to an equal one; stored with a checkpoint so that it
  /// never changes its meaning.
  const std::string& text() const { return text_; }

 private:
  friend class RuleSetParser;
  friend class RuleFinder;
  enum class AdapterSide { kNone, kIn, kOut };
  /// A tensor's name as the rules have it: without wrappers, and the adapters' prefix and wrappers;
  /// of an adapter the name of the weight beside it.
  struct PlainName {
    std::string_view name;
    AdapterSide side = AdapterSide::kNone;
    size_t prefix_length = 0;
    std::string storage;  // what `name` points to, where it is no part of the tensor's name
    struct Gap {
      size_t at, bytes;
    };
    std::vector<Gap>
        gaps;  // how many bytes of the tensor's name are missing before which of `name`
  };
  static size_t in_tensor_name(size_t at, const PlainName& plain);
  size_t leading_wrapper(std::string_view name) const;  // its bytes and the dot's; 0: there is none
  void plain_name(std::string_view tensor_name, PlainName& plain) const;
  struct Knowledge;
  Knowledge knowledge_of(const std::vector<std::string_view>& names) const;
  bool has_parameter_in(std::string_view name) const;
  Result<> derive_mtp_rules(size_t most);
  void derive_adapter_rules();
  size_t holder(std::string_view name) const;  // its bytes and the dot's; 0: there is none
  std::optional<Match> find_behind(std::string_view tensor_name, bool held) const;
  std::optional<Match> match_rule(size_t rule, const PlainName& plain, size_t behind) const;
  std::optional<Match> match_rule(size_t rule, const PlainName& plain) const;
  bool take_off_part(PlainName& plain, size_t part) const;

  std::string family_;
  std::string description_;
  std::vector<std::string> model_types_;
  std::vector<std::string> prefixes_;
  std::vector<Rule> rules_;
  size_t written_rules_ = 0;
  size_t weight_rules_ = 0;  // … and those of layers that predict further tokens
  /// What stands in place of "layers.{layer}" in the names of these: "mtp.layers.*".
  std::vector<std::string> mtp_layers_;
  std::vector<uint32_t> mtp_rule_of_;  // the written rule each of them follows from
  struct AdapterRules {
    uint32_t in, out;  // indices in rules_
  };
  std::vector<AdapterRules> adapter_rules_;  // by weight rule; empty: none
  std::optional<Adapters> adapters_;
  Wrappers wrappers_;
  std::vector<NamePattern> known_by_;  // empty: by any
  std::map<std::string, std::vector<std::string>> fact_keys_;
  std::map<std::string, uint64_t, std::less<>> fixed_facts_;
  std::vector<std::string> tied_keys_;
  std::optional<bool> tied_default_;
  std::vector<std::string> tied_types_;  // model types that are tied unless config.json says not
  std::optional<BlockScales> scales_;
  std::vector<QuantisedPart> quantised_;
  bool numbers_matter_ = false;  // some pattern names a number, "mlp.0.weight"
  std::string text_;
  /// Before all names of a model, if a module that holds it was saved, as Lightning's is: "model".
  /// Looked behind where no rule knows a name with it.
  std::vector<std::string> holders_;
};

/// RuleSet::find for many names: remembers the rule of names that differ only in their numbers.
/// Threads: one. Lifetime: the rule set outlives it.
class RuleFinder {
 public:
  explicit RuleFinder(const RuleSet& rules) : rules_(rules) {}
  std::optional<RuleSet::Match> find(std::string_view tensor_name);

 private:
  const RuleSet& rules_;
  struct Known {
    uint32_t rule;
    uint32_t part;  // in quantised_; its size: none
  };
  std::unordered_map<std::string, Known> rule_of_;  // by name without numbers
  std::string key_;
};

/// model_type of a config.json, if it says one.
std::optional<std::string> model_type_of(std::string_view config_text);

}  // namespace ptc
