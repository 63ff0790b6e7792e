// Rule sets: how each parameter of a model family is cut. Data (reshard/rules/*.json), parsed here.
// The format is described in reshard/rules/README.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "reshard/ptc/name_pattern.h"
#include "store/base/error.h"

namespace ptc {

/// A number in a rule: given, or the name of a fact of the model ("kv_heads").
using RuleNumber = std::variant<uint64_t, std::string>;

/// One of several blocks that lie behind each other on the axis that is cut.
struct CutPart {
  RuleNumber size = uint64_t{1};          // relative to the other parts
  std::optional<RuleNumber> heads;        // indivisible units in this part; absent: its elements
  bool share = false;                     // more ranks than heads: neighbours hold the same head
};

/// How tensor parallelism cuts one axis. No parts: replicated.
struct TensorCut {
  uint32_t axis = 0;
  std::vector<CutPart> parts;
  std::optional<uint64_t> vocab_multiple;  // padded to a multiple of this × tp
  uint64_t block = 1;                      // cuts fall on multiples of this many elements only
};

enum class StagePlace {
  kLayer,  // the stage that has the layer
  kFirst,
  kLast,
  kAll,
};

struct Rule {
  std::vector<NamePattern> names;
  std::optional<TensorCut> cut;          // nullopt: replicated over tp
  std::optional<uint32_t> expert_axis;   // stacked experts: cut over ep on this axis
  StagePlace stage = StagePlace::kLayer;
  std::optional<NamePattern> tied_head;  // also on the last stage where the head is tied (see Model)
  std::string description;               // one line for people: `ptc rules`
};

/// A parsed rule set. Immutable.
class RuleSet {
 public:
  /// `text` is a rule set, or a job's rules.json that `extends` one of the built-in families (its
  /// rules come first, its facts override). Errors: kInvalidArgument with line and column.
  static Result<std::shared_ptr<const RuleSet>> parse(std::string_view text);
  /// Of a family that is built in; kNotFound otherwise.
  static Result<std::shared_ptr<const RuleSet>> builtin(std::string_view family);
  /// Names of the built-in families, sorted.
  static std::vector<std::string> builtin_families();
  /// By config.json's model_type if there is one (nullptr where no family knows it), else the family
  /// most of whose rules match the names and that covers every name best; nullptr if none does.
  static std::shared_ptr<const RuleSet> choose(std::optional<std::string_view> model_type,
                                               const std::vector<std::string>& tensor_names);
  /// The family "none": no rules. Its models can be stored and read, but not cut.
  static std::shared_ptr<const RuleSet> none();

  const std::string& family() const { return family_; }
  const std::vector<Rule>& rules() const { return rules_; }
  const std::vector<std::string>& model_types() const { return model_types_; }

  struct Match {
    const Rule* rule;
    NameMatch name;
  };
  /// The first rule that matches, also behind one of the family's prefixes ("bert.").
  std::optional<Match> find(std::string_view tensor_name) const;

  /// Facts of a model from its config.json (fact → keys tried in turn), under the rule set's own.
  /// `config_text` empty: only those. A config.json that is no JSON object is kInvalidArgument.
  struct Facts {
    std::map<std::string, uint64_t, std::less<>> numbers;  // "heads" → 32
    std::optional<bool> tied;                              // tie_word_embeddings
  };
  Result<Facts> facts(std::string_view config_text) const;

  /// The rule set as text that parse() reads to an equal one; stored with a checkpoint so that it
  /// never changes its meaning.
  const std::string& text() const { return text_; }

 private:
  friend class RuleSetParser;
  std::string family_;
  std::vector<std::string> model_types_;
  std::vector<std::string> prefixes_;
  std::vector<Rule> rules_;
  std::map<std::string, std::vector<std::string>> fact_keys_;
  std::map<std::string, uint64_t, std::less<>> fixed_facts_;
  std::string tied_key_;
  std::optional<bool> tied_default_;
  std::string text_;
};

/// model_type of a config.json, if it says one.
std::optional<std::string> model_type_of(std::string_view config_text);

}  // namespace ptc
