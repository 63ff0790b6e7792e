// Inference engines: under which names a worker of each keeps a model's weights, and which of them
// lie behind each other in one array. Data (engines/*.json), described in README.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// The last components of a name: "self_attn.q_proj.{x}", "experts.{expert}.up_proj.weight".
/// {x} stands for one component, {expert} for a number.
class NameTail {
 public:
  struct Match {
    size_t begin = 0;  // of the tail, in the name
    std::string_view x;
    std::optional<uint32_t> expert;
  };
  static Result<NameTail> parse(std::string_view text);
  std::optional<Match> match(std::string_view name) const;
  /// The name in which the tail that matched is this one.
  std::string put(std::string_view name, const Match& match) const;
  bool has_expert() const;

 private:
  std::vector<std::string> components_;
};

/// Immutable; threads: any.
class Engine {
 public:
  /// One array, made of others that lie behind each other along the first axis. Where those have a
  /// number of an expert, those of all of a worker's experts, on a new axis in front.
  struct Join {
    NameTail to;
    std::vector<NameTail> of;
  };
  /// An array of one float32 that is in no checkpoint, beside a weight that is.
  struct Constant {
    NameTail to;
    NameTail beside;
    float value = 0;
  };
  /// Models of these types, of config.json.
  struct Family {
    std::vector<std::string> model_types;
    std::vector<Join> joins;  // the first that matches a name holds
    std::vector<Constant> constants;
    std::vector<NameTail> unused;         // the engine has no place for them
    std::vector<NameTail> on_all_stages;  // of first or last ones, that it keeps on each
    /// Of a model whose head is its embedding: that array has the head's name where the head is.
    /// Neither or both.
    std::optional<NameTail> tied_embedding, tied_head;
    enum class Tied { kServed, kInOneStage, kNever };
    Tied tied = Tied::kServed;  // whether the engine serves such a model
    /// What each group of data-parallel attention has for itself; empty: the engine has no such
    /// attention for these models.
    std::vector<NameTail> attention;
  };
  /// How its sizes make up the workers of a stage.
  enum class Sizes {
    kBesideTp,  // dp times tp; all of them share the experts, or tp does
    kWithinTp,  // tp, of which dp are groups for attention, and ep ranks have their own experts
  };
  /// Layers that are left over when all stages have as many.
  enum class Rest {
    kBeforeLast,  // one each to the stages before the last one
    kLast,        // one each to the last stages
  };

  static Result<Engine> parse(std::string_view text);
  /// Those that are built in, by name.
  static std::span<const Engine> all();
  /// nullptr: there is none of this name.
  static const Engine* find(std::string_view name);

  const std::string& name() const { return name_; }
  /// Of the engine, with which this was compared.
  const std::string& version() const { return version_; }
  /// nullptr: its names for such models are not known here.
  const Family* family(std::string_view model_type) const;
  std::vector<std::string> model_types() const;
  /// Of those that it serves with data-parallel attention.
  std::vector<std::string> attention_types() const;

  Sizes sizes() const { return sizes_; }
  /// Of kWithinTp: neighbouring workers have the same experts, each a part of them; else those that
  /// are `ep` apart.
  bool experts_of_neighbours() const { return experts_of_neighbours_; }
  /// Whether files of all stages can lie in one directory.
  bool has_stage_files() const { return !file_of_stage_.empty(); }
  /// Beside those of families, in models of FP8 with scales of blocks; nullptr: it is not known
  /// what the engine keeps of such.
  const std::vector<Constant>* fp8_blocks() const { return fp8_blocks_ ? &*fp8_blocks_ : nullptr; }

  /// A vocabulary's rows when it is cut among `tp` workers; kInvalidArgument: it cannot be.
  Result<uint64_t> padded_vocabulary(uint64_t rows, uint32_t tp) const;
  std::vector<uint32_t> stages(uint32_t layers, uint32_t pp) const;
  /// Of a worker: "model-rank-3-part-0.safetensors".
  std::string file_name(uint32_t tp, uint32_t pp, uint32_t stages) const;

 private:
  friend class EngineParser;
  std::string name_, version_;
  Sizes sizes_ = Sizes::kBesideTp;
  bool experts_of_neighbours_ = true;
  std::optional<std::vector<Constant>> fp8_blocks_;
  uint64_t vocabulary_multiple_ = 1;
  bool vocabulary_times_tp_ = false;  // where tp does not divide a multiple of it
  Rest rest_ = Rest::kBeforeLast;
  std::string file_, file_of_stage_;  // with {tp} and {pp}
  std::vector<Family> families_;
};

}  // namespace ptc
