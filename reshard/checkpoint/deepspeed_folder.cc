#include "reshard/checkpoint/deepspeed_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>

#include "reshard/checkpoint/dcp_values.h"
#include "reshard/ptc/parameter_names.h"
#include "store/base/json.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_path.h"

namespace ptc {
namespace {

using SavedPath = std::vector<TorchStep>;

constexpr std::string_view kUniversalMaster = "fp32", kUniversalStep = "step";
constexpr std::string_view kStateEnding = ".pt";
constexpr std::string_view kOptimizerFile = "optimizer_state.pt";  // beside the directories
constexpr std::string_view kOptimizerDict = "optimizer_state_dict";
constexpr std::string_view kBaseKey = "base_optimizer_state", kGroupsKeyOf = "param_groups";
/// DeepSpeed asks for one that is not too old; this is whose reader this was compared with.
constexpr std::string_view kReaderVersion = "0.19.8";
/// DeepSpeed takes a parameter's values only where its group is listed, and a listed one that says
/// nothing leaves the run its own numbers. Who has more groups has none of those that are common.
constexpr size_t kMostUniversalGroups = 1024;

SavedPath key_path(std::initializer_list<std::string_view> keys) {
  SavedPath path;
  for (const std::string_view key : keys)
    path.push_back({TorchStep::Kind::kKey, std::string(key), 0});
  return path;
}
bool is_key_step(const TorchStep& step, std::string_view key) {
  return step.kind == TorchStep::Kind::kKey && step.key == key;
}

/// What torch.save writes of the one value that the writer was given.
Result<std::string> archive_of(PickleWriter writer) {
  const std::string bytes = std::move(writer).finish();
  PTC_TRY(const Pickle pickle, Pickle::parse(bytes));
  return save_value(pickle, pickle.root());
}
Result<std::string> archive_of_number(uint64_t number) {
  PickleWriter writer;
  writer.integer(static_cast<int64_t>(number));
  return archive_of(std::move(writer));
}

/// An object of DeepSpeed's own, which its loader takes apart: along this axis there are parts of
/// these sizes, each of which is cut by itself.
Result<std::string> archive_of_sizes(const Shape& shape, uint64_t axis,
                                     const std::vector<uint64_t>& sizes) {
  PickleWriter writer;
  writer.known_global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape");
  writer.opcode(')');
  writer.opcode('\x81');  // NEWOBJ
  writer.opcode('}');
  writer.opcode('(');
  writer.text("patterns");
  writer.opcode(']');
  writer.text("shape");
  writer.opcode('(');
  for (size_t at = 0; at < shape.size(); ++at) {
    if (at == axis) {
      writer.numbers(sizes.data(), sizes.data() + sizes.size());
    } else {
      writer.integer(static_cast<int64_t>(shape[at]));
    }
  }
  writer.opcode('t');
  writer.text("partition_dim");
  writer.integer(static_cast<int64_t>(axis));
  writer.opcode('u');
  writer.opcode('b');  // BUILD
  return archive_of(std::move(writer));
}

/// As torch's own optimizers have it: a float of no axes.
Result<std::string> archive_of_steps(uint64_t steps) {
  const TorchPathValue tensor;
  PTC_TRY(const TorchLayout made, compose_torch_file(std::span(&tensor, 1)));
  std::string archive(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    archive.replace(piece.offset, piece.bytes.size(), piece.bytes);
  const auto number = static_cast<float>(steps);
  archive.replace(made.tensors.front().offset, sizeof number,
                  std::string_view(reinterpret_cast<const char*>(&number), sizeof number));
  return archive;
}

/// The whole number in an archive; nullopt: it is something else.
std::optional<uint64_t> number_in(std::string_view archive) {
  const auto bytes = std::as_bytes(std::span(archive.data(), archive.size()));
  const auto file = TorchFile::read(read_at(bytes), archive.size());
  if (file.has_error()) return std::nullopt;
  const Pickle& pickle = file.value().pickle();
  if (!pickle.is(pickle.root(), PickleKind::kInt) || pickle.integer(pickle.root()) < 0)
    return std::nullopt;
  return static_cast<uint64_t>(pickle.integer(pickle.root()));
}

/// What DeepSpeed calls a state, of whatever optimizer's name for it. `before` and `behind` are
/// what the tensor's name has before and behind the parameter's.
std::string_view state_key_of(std::string_view before, std::string_view behind) {
  if (before.ends_with('.')) before.remove_suffix(1);
  if (behind.starts_with('.')) behind.remove_prefix(1);
  std::string_view key = behind.empty() ? before : behind;
  key = key.substr(key.rfind('.') + 1);  // 0 where there is none
  for (const std::string_view master : {"fp32_param", "master_param", "fp32_from_fp16_params"})
    if (key == master) return kUniversalMaster;
  // In Megatron's distrib_optim.pt.
  return behind.empty() && key == "param" ? kUniversalMaster : key;
}

/// One component of a path, with `ending` behind it.
bool is_file_name(std::string_view name, std::string_view ending = {}) {
  constexpr size_t kMostBytes = 255;
  return !name.empty() && name.size() + ending.size() <= kMostBytes && name != "." &&
         name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

/// How a tensor-parallel rank cuts a parameter, in DeepSpeed's words.
struct UniversalCut {
  enum class Doubt : uint8_t {
    kNone,
    kUnknown,  // no rule says it
    kUneven,   // not into as many equal pieces of each fused part: nothing can say it
  };
  uint64_t axis = 0;                 // cat_dim
  uint64_t parts = 1;                // param_n_sub_params: each is cut by itself
  std::vector<uint64_t> sizes = {};  // sub_param_shape, where these differ in size
  bool padded = false;               // vocab_tensor
  Doubt doubt = Doubt::kNone;
};

/// Tensors of one rule and shape are cut alike, so few trial cuts are made. What no rule matches is
/// not tried: each refusal would name all such tensors.
class UniversalCuts {
 public:
  explicit UniversalCuts(const Model& model) : model_(model), finder_(model.rules()) {}

  UniversalCut of(uint32_t tensor) {
    const TensorInfo& info = model_.tensors()[tensor];
    if (Box::whole(info.shape).volume() == 1) return {};
    const auto match = finder_.find(info.name);
    if (!match) return {.doubt = UniversalCut::Doubt::kUnknown};
    if (!match->rule->cut) return {};
    if (info.folded_into) return {.doubt = UniversalCut::Doubt::kUnknown};
    std::string alike =
        fmt::format("{} {} {}", fmt::ptr(match->rule), match->part_of != nullptr ? info.name : "",
                    info.shape.to_string());
    const auto [known, is_new] = known_.try_emplace(std::move(alike));
    if (is_new) known->second = find(tensor, *match->rule, match->part_of != nullptr);
    return known->second;
  }

 private:
  /// A size that does not divide the heads says nothing; the smallest that does is one of these.
  static constexpr uint32_t kMostRanks = 128;

  UniversalCut find(uint32_t tensor, const Rule& rule, bool quantised) const {
    UniversalCut cut;
    const Shape& shape = model_.tensors()[tensor].shape;
    const bool has_axis = !quantised && rule.cut->axis < shape.size();
    if (has_axis && rule.cut->vocab_multiple) {
      cut.axis = rule.cut->axis;
      cut.padded = cut.axis == 0 && shape.size() == 2;  // DeepSpeed pads no others
      return cut;
    }
    const bool refuses =
        std::find(rule.not_with.begin(), rule.not_with.end(), "tp") != rule.not_with.end();
    for (uint32_t ranks = 2; ranks <= kMostRanks && !refuses; ++ranks) {
      LayoutSpec spec;
      spec.sizes.tp = ranks;
      const auto part = model_.slice(tensor, spec, StateCoords());
      if (part.has_error()) continue;
      if (!part.value() || part.value()->flat) return cut;
      cut = of_first(*part.value(), shape, ranks);
      if (!cut.sizes.empty() && !is_of_all(cut, tensor, spec))
        return {.axis = cut.axis, .doubt = UniversalCut::Doubt::kUneven};
      return cut;
    }
    // As where the number of heads is not known.
    if (has_axis && !refuses && rule.cut->parts.size() <= 1) {
      cut.axis = rule.cut->axis;
    } else {
      cut.doubt = UniversalCut::Doubt::kUnknown;
    }
    return cut;
  }

  /// By what the first of so many ranks has.
  static UniversalCut of_first(const SubTensor& first, const Shape& shape, uint32_t ranks) {
    UniversalCut cut;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (first.local_shape[axis] >= shape[axis]) continue;
      cut.axis = axis;
      const uint64_t parts = first.pieces.size(), each = parts == 0 ? 0 : shape[axis] / parts;
      const auto is_even = [&](const Piece& one) {
        return each % ranks == 0 && one.global.extent[axis] == each / ranks &&
               one.global.offset[axis] % each == 0;
      };
      const bool even = each > 0 && each * parts == shape[axis] &&
                        std::all_of(first.pieces.begin(), first.pieces.end(), is_even);
      if (even) {
        cut.parts = parts;
      } else {
        cut.sizes = sizes_by(first, axis, shape[axis]);
        if (cut.sizes.empty()) cut.doubt = UniversalCut::Doubt::kUneven;
      }
      break;
    }
    return cut;
  }

  /// Where the parts begin of which the first rank has these pieces.
  static std::vector<uint64_t> sizes_by(const SubTensor& first, size_t axis, uint64_t end) {
    std::vector<uint64_t> sizes;
    for (size_t part = 0; part < first.pieces.size(); ++part) {
      const uint64_t begin = first.pieces[part].global.offset[axis];
      const bool is_last = part + 1 == first.pieces.size();
      const uint64_t next = is_last ? end : first.pieces[part + 1].global.offset[axis];
      if ((part == 0 && begin != 0) || next <= begin) return {};
      sizes.push_back(next - begin);
    }
    return sizes;
  }

  /// Whether each rank has its piece of each part, one behind the other, and nothing else.
  bool is_of_all(const UniversalCut& cut, uint32_t tensor, const LayoutSpec& spec) const {
    const uint32_t ranks = spec.sizes.tp;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const auto part = model_.slice(tensor, spec, {.tp = rank});
      if (part.has_error() || !part.value() || part.value()->flat) return false;
      const std::vector<Piece>& pieces = part.value()->pieces;
      if (pieces.size() != cut.sizes.size()) return false;
      uint64_t begin = 0, local = 0;
      for (size_t i = 0; i < pieces.size(); ++i) {
        const uint64_t size = cut.sizes[i], each = size / ranks;
        if (size % ranks != 0 || pieces[i].global.extent[cut.axis] != each ||
            pieces[i].global.offset[cut.axis] != begin + rank * each ||
            pieces[i].local_offset[cut.axis] != local)
          return false;
        begin += size, local += each;
      }
      if (local != part.value()->local_shape[cut.axis]) return false;
    }
    return true;
  }

  const Model& model_;
  RuleFinder finder_;
  std::unordered_map<std::string, UniversalCut> known_;
};

/// Tensors that are alike in something that LEFT_OUT.txt says.
struct NamedTensors {
  uint64_t count = 0;
  std::string first;
  void add(std::string_view name) {
    if (count++ == 0) first = quoted(name);
  }
};

std::string counted(uint64_t count, std::string_view first) {
  return count == 1 ? fmt::format("1 tensor ({})", first)
                    : fmt::format("{} tensors ({} …)", count, first);
}
std::string counted(const NamedTensors& tensors) { return counted(tensors.count, tensors.first); }

}  // namespace

class DeepSpeedFolder::Maker {
 public:
  Maker(DeepSpeedFolder& folder, const Model& model, const DeepSpeedSources& sources,
        DeepSpeedRanks ranks)
      : folder_(folder), model_(model), sources_(sources), ranks_(ranks) {}

  Result<> run() {
    PTC_TRY(sort_values());
    name_parameters();
    find_states();
    PTC_TRY(count_iterations());
    PTC_TRY(add_files());
    PTC_TRY(make_model_states());
    PTC_TRY(make_optimizer_state());
    return ok();
  }

 private:
  struct SavedValue {
    SavedPath path;
    std::string_view archive;
  };
  struct Parameter {
    uint32_t tensor = 0;
    std::string name;                                     // the module's
    std::map<std::string, uint32_t, std::less<>> states;  // tensors
    bool has_moments() const {
      return std::any_of(states.begin(), states.end(), [](const auto& one) {
        return one.first != kUniversalMaster && one.first != kUniversalStep;
      });
    }
  };

  void leave_out(std::string_view what, std::string_view why) {
    folder_.left_out_ += fmt::format("{}: {}\n", what, why);
  }

  // --- values

  Result<> sort_values() {
    const auto take = [&](const std::string& text, const std::string& archive) -> Result<> {
      PTC_TRY(auto path, parse_torch_path(text));
      if (path.empty()) return ok();
      of_deepspeed_ = of_deepspeed_ || is_key_step(path.back(), "ds_version");
      if (is_key_step(path[0], kOptimizerDict)) {
        path.erase(path.begin());
        if (!path.empty()) optimizer_values_.push_back({std::move(path), archive});
      } else {
        model_values_.push_back({std::move(path), archive});
      }
      return ok();
    };
    for (const auto& [text, archive] : sources_.model_values) {
      PTC_TRY(take(text, archive));
    }
    for (const auto& [directory, tables] : sources_.tables)
      for (const DcpTable& table : tables)
        for (const auto& [text, archive] : table.values) {
          if (directory != kUniversalDirectory) {
            PTC_TRY(take(text, archive));
            continue;
          }
          PTC_TRY(auto path, parse_torch_path(text));
          if (path.size() < 2 || path[0].kind != TorchStep::Kind::kKey ||
              path[1].kind != TorchStep::Kind::kKey)
            continue;
          auto& of_state = universal_values_[path[0].key][path[1].key];
          path.erase(path.begin(), path.begin() + 2);
          of_state.push_back({std::move(path), archive});
          of_deepspeed_ = true;
        }
    of_deepspeed_ = of_deepspeed_ || sources_.has_models;
    if (!of_deepspeed_) {  // whatever it means there
      model_values_.clear();
      optimizer_values_.clear();
    }
    for (const SavedValue& value : model_values_)
      if (value.path.size() == 1 && is_key_step(value.path[0], "global_steps"))
        steps_done_ = number_in(value.archive);
    if (!steps_done_) steps_done_ = sources_.iteration;
    folder_.tag_ = !sources_.tag.empty() ? sources_.tag
                                         : fmt::format("global_step{}", steps_done_.value_or(0));
    find_common_step();
    return ok();
  }

  /// The number of steps that the optimizer's groups say, where all say the same.
  void find_common_step() {
    for (const SavedValue& value : optimizer_values_) {
      const SavedPath& path = value.path;
      if (path.size() < 3 || !is_key_step(path.back(), kUniversalStep) ||
          !(is_key_step(path[0], kBaseKey) || is_key_step(path[0], kOptimizerDict)) ||
          is_key_step(path[1], kGroupsKeyOf))
        continue;
      steps_differ_ = steps_differ_ || (common_step_ && *common_step_ != value.archive);
      common_step_ = value.archive;
    }
    if (steps_differ_) common_step_.reset();
  }

  // --- states

  /// Of no parameter, as a loss scale; or, of a model that no rules know, a parameter's fp32 copy
  /// or number of steps.
  bool is_optimizer_s_own(uint32_t tensor) const {
    const TensorInfo& info = model_.tensors()[tensor];
    std::string_view name = info.name;
    if (name.starts_with("optimizer.") || name.starts_with("optim.")) return true;
    const bool is_step = name.ends_with(kStepEnding) && info.shape.empty();
    if (!is_step && !name.ends_with(kCopyEnding)) return false;
    name.remove_suffix((is_step ? kStepEnding : kCopyEnding).size());
    return whole_names_.contains(name);
  }

  void name_parameters() {
    for (const uint32_t tensor : sources_.parameters)
      whole_names_.insert(model_.tensors()[tensor].name);
    std::vector<std::string> names;
    std::vector<uint32_t> tensors;
    for (const uint32_t tensor : sources_.parameters)
      if (!is_optimizer_s_own(tensor)) {
        tensors.push_back(tensor);
        names.push_back(model_.tensors()[tensor].name);
      }
    names = model_.rules().without_wrappers(std::move(names));
    std::set<std::string_view> taken;
    uint64_t unnamed = 0;
    std::string first;
    parameters_.reserve(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const uint32_t tensor = tensors[i];
      const auto said = sources_.module_names.find(tensor);
      parameters_.push_back(
          {tensor, said == sources_.module_names.end() ? std::move(names[i]) : said->second, {}});
      const TensorInfo& info = model_.tensors()[tensor];
      const std::string_view own = parameters_.back().name;
      if (is_file_name(own) && own != kOptimizerFile && !torch_dtype_name(info.dtype).empty() &&
          taken.insert(own).second)
        continue;
      if (unnamed++ == 0) first = quoted(info.name);
      parameters_.pop_back();
    }
    if (unnamed > 0)
      leave_out(counted(unnamed, first),
                "its name is that of no directory, or another's, or torch has no such type");
  }

  void find_states() {
    ParameterNames known;
    std::vector<bool> is_shown(model_.tensors().size());
    for (uint32_t p = 0; p < parameters_.size(); ++p) {
      known.add(model_.tensors()[parameters_[p].tensor].name, 0, p);
      known.add(parameters_[p].name, 0, p);
      is_shown[parameters_[p].tensor] = true;
    }
    uint64_t others = 0;
    std::string first;
    for (uint32_t t = 0; t < model_.tensors().size(); ++t) {
      const TensorInfo& info = model_.tensors()[t];
      if (is_shown[t]) continue;
      const std::string_view name = info.name;
      const bool found = known.find(name, [&](const ParameterNames::Entry& entry, size_t at) {
        Parameter& parameter = parameters_[entry.parameter];
        const TensorInfo& whose = model_.tensors()[parameter.tensor];
        const bool by_own_name = name.substr(at).starts_with(whose.name);
        const size_t length = by_own_name ? whose.name.size() : parameter.name.size();
        const std::string_view behind = name.substr(std::min(at + length, name.size()));
        std::string_view key = state_key_of(name.substr(0, at), behind);
        // An fp32 copy that another file has under the very name.
        if (key.empty() && info.dtype == DType::kF32) key = kUniversalMaster;
        const bool is_step = key == kUniversalStep && Box::whole(info.shape).volume() == 1;
        if (!is_step &&
            !(info.shape_in_files() == whose.shape_in_files() && is_file_name(key, kStateEnding)))
          return false;
        return parameter.states.try_emplace(std::string(key), t).second;
      });
      if (found || !(model_.is_optimizer_state(t) || is_optimizer_s_own(t))) continue;
      if (others++ == 0) first = quoted(info.name);
    }
    if (others > 0)
      leave_out(counted(others, first), "they are not one element for each of a parameter's");
  }

  /// Megatron's distributed optimizer counts steps for all of its parameters at once.
  Result<> count_iterations() {
    if (common_step_ || of_deepspeed_ || !sources_.iteration) return ok();
    bool has_moments = false;
    for (const Parameter& parameter : parameters_) {
      if (parameter.states.contains(kUniversalStep)) return ok();
      has_moments = has_moments || parameter.has_moments();
    }
    if (!has_moments) return ok();
    PTC_TRY(iterations_, archive_of_steps(*sources_.iteration));
    common_step_ = iterations_;
    return ok();
  }

  // --- files

  Result<> add_files() {
    NamedTensors narrow, without, uncounted, of_no_rule, uneven;
    UniversalCuts cuts(model_);
    std::set<std::string_view> steps;
    bool has_moments = false;
    for (Parameter& parameter : parameters_) {
      const TensorInfo& info = model_.tensors()[parameter.tensor];
      const auto saved = universal_values_.find(parameter.name);
      const auto saved_with = [&](std::string_view state) -> const std::vector<SavedValue>* {
        if (saved == universal_values_.end()) return nullptr;
        const auto found = saved->second.find(state);
        return found == saved->second.end() ? nullptr : &found->second;
      };
      const auto [master, added] =
          parameter.states.try_emplace(std::string(kUniversalMaster), parameter.tensor);
      if (added && dtype_bits(info.dtype) < dtype_bits(DType::kF32)) narrow.add(parameter.name);

      const bool has_own_step = parameter.states.contains(kUniversalStep);
      std::optional<std::string_view> step;
      if (const auto* values = saved_with(kUniversalStep);
          values != nullptr && values->size() == 1 && values->front().path.empty()) {
        if (has_own_step) steps.insert(values->front().archive);
        else step = values->front().archive;
      }
      if (!parameter.has_moments()) {  // of what is not trained there is no step either
        without.add(parameter.name);
      } else if (!has_own_step && !step && !common_step_) {
        // DeepSpeed would load them, and fail as it trains.
        uncounted.add(parameter.name);
        std::erase_if(parameter.states,
                      [](const auto& one) { return one.first != kUniversalMaster; });
      } else {
        has_moments = true;
        if (!parameter.states.contains("exp_avg")) without.add(parameter.name);
        if (!has_own_step && !step) step = common_step_;
      }
      if (step) steps.insert(*step);

      const UniversalCut cut = cuts.of(parameter.tensor);
      if (saved_with(kUniversalMaster) == nullptr) {
        if (cut.doubt == UniversalCut::Doubt::kUnknown) of_no_rule.add(parameter.name);
        if (cut.doubt == UniversalCut::Doubt::kUneven) uneven.add(parameter.name);
      }
      for (const auto& [state, tensor] : parameter.states) {
        if (torch_dtype_name(model_.tensors()[tensor].dtype).empty()) continue;
        PTC_TRY(const uint32_t kind, kind_of(state, cut, info.shape_in_files(), saved_with(state)));
        PTC_TRY(add_file(parameter.name, state, kind, tensor));
      }
      if (!step) continue;
      DcpTable table;
      table.values.emplace_back("", std::string(*step));
      PTC_TRY(add_file(parameter.name, kUniversalStep, same_kind({std::move(table), true}), kNone));
    }
    if (of_no_rule.count > 0)
      leave_out("cat_dim of " + counted(of_no_rule),
                "no rule says how ranks cut it, and it is 0; do not load it under tensor "
                "parallelism");
    if (uneven.count > 0)
      leave_out(
          "how ranks cut " + counted(uneven),
          "ranks have more of it than their share of each of its parts, which sub_param_shape "
          "cannot say; do not load it under tensor parallelism");
    if (narrow.count > 0)
      leave_out("fp32 copies of " + counted(narrow),
                "there are none; their fp32.pt has the parameter in its own type, which DeepSpeed "
                "widens as it loads");
    const std::string remedy = fmt::format(
        "Stage 3 loads such a parameter only with load_module_only=True{}",
        has_moments ? ", stages 1 and 2 only where no other of its group has moments" : "");
    if (uncounted.count > 0)
      leave_out("moments of " + counted(uncounted),
                (steps_differ_ ? "the optimizer's groups have taken different numbers of steps. "
                               : "the checkpoint does not say after how many steps they are. ") +
                    remedy);
    if (without.count > 0)
      leave_out("exp_avg.pt and exp_avg_sq.pt of " + counted(without),
                "the checkpoint has none. " + remedy);
    if (steps.size() > 1)
      leave_out("one number of steps",
                "parameters have different ones. Stages 1 and 2 do not load such parameters in one "
                "group, and stage 3 takes the first's for all");
    return ok();
  }

  Result<uint32_t> kind_of(std::string_view state, const UniversalCut& cut, const Shape& shape,
                           const std::vector<SavedValue>* saved) {
    Kind kind;
    kind.bare = state == kUniversalStep;
    if (kind.bare) return same_kind(std::move(kind));
    const auto add = [&](std::string_view key, Result<std::string> archive) -> Result<> {
      PTC_TRY(auto text, std::move(archive));
      kind.beside.values.emplace_back(torch_path_text(key_path({key})), std::move(text));
      return ok();
    };
    if (saved != nullptr) {
      for (const SavedValue& value : *saved)
        kind.beside.values.emplace_back(torch_path_text(value.path), std::string(value.archive));
      return same_kind(std::move(kind));
    }
    PTC_TRY(add("cat_dim", archive_of_number(cut.axis)));
    if (cut.parts > 1) {
      PTC_TRY(add("param_n_sub_params", archive_of_number(cut.parts)));
    }
    if (!cut.sizes.empty()) {
      PTC_TRY(add("sub_param_shape", archive_of_sizes(shape, cut.axis, cut.sizes)));
    }
    if (cut.padded) {
      PickleWriter yes;
      yes.boolean(true);
      PTC_TRY(add("vocab_tensor", archive_of(std::move(yes))));
    }
    return same_kind(std::move(kind));
  }

  uint32_t same_kind(Kind kind) {
    std::string text(1, kind.bare ? '1' : '0');
    for (const auto& [path, archive] : kind.beside.values)
      text += fmt::format("{} {} {} ", path.size(), archive.size(), path) + archive;
    const auto [known, is_new] =
        kinds_.try_emplace(std::move(text), static_cast<uint32_t>(folder_.kinds_.size()));
    if (is_new) folder_.kinds_.push_back(std::move(kind));
    return known->second;
  }

  Result<> add_file(std::string_view parameter, std::string_view state, uint32_t kind,
                    uint32_t tensor) {
    File file{fmt::format("zero/{}/{}.pt", parameter, state), tensor, 0, kind};
    std::string alike = std::to_string(kind);
    if (tensor != kNone) {
      const TensorInfo& info = model_.tensors()[tensor];
      alike += fmt::format("{}{}", dtype_name(info.dtype), info.shape_in_files().to_string());
    }
    const auto [known, is_new] = bytes_.try_emplace(std::move(alike), 0);
    if (is_new) {
      PTC_TRY(const ImageLayout layout, folder_.lay_out(file));
      known->second = layout.bytes;
    }
    file.bytes = known->second;
    folder_.files_.push_back(std::move(file));
    return ok();
  }

  // --- what is no tensor

  Result<> make_model_states() {
    DcpTable table;
    std::set<std::string, std::less<>> there;
    const auto add = [&](std::string_view key, Result<std::string> archive) -> Result<> {
      if (there.contains(key)) return ok();
      PTC_TRY(auto text, std::move(archive));
      table.values.emplace_back(torch_path_text(key_path({key})), std::move(text));
      return ok();
    };
    for (const SavedValue& value : model_values_) {
      const TorchStep& first = value.path[0];
      const bool is_ours =
          first.kind == TorchStep::Kind::kKey &&
          (first.key == "module" || first.key == "mp_world_size" || first.key == "dp_world_size");
      if (is_ours) continue;
      if (first.kind == TorchStep::Kind::kKey) there.insert(first.key);
      table.values.emplace_back(torch_path_text(value.path), std::string(value.archive));
    }
    PickleWriter nothing, module, version;
    nothing.none();
    module.opcode('}');
    version.text(kReaderVersion);
    PTC_TRY(add("module", archive_of(std::move(module))));
    PTC_TRY(add("mp_world_size", archive_of_number(ranks_.model_parallel)));
    PTC_TRY(add("dp_world_size", archive_of_number(ranks_.data_parallel)));
    PTC_TRY(add("global_steps", archive_of_number(steps_done_.value_or(0))));
    PTC_TRY(add("skipped_steps", archive_of_number(0)));
    PTC_TRY(add("lr_scheduler", archive_of(std::move(nothing))));
    PTC_TRY(add("ds_version", archive_of(std::move(version))));
    if (!of_deepspeed_)
      leave_out("lr_scheduler, and the numbers of the optimizer's groups",
                "what another program saved of them is not DeepSpeed's; load with "
                "load_lr_scheduler_states=False where a scheduler is configured");
    if (!steps_done_ && !sources_.has_models)
      leave_out("global_steps", "the checkpoint does not say it, and it is 0");
    PTC_TRY(auto text, dcp_values_file(std::span(&table, 1)));
    folder_.model_states_ = std::make_shared<const std::string>(std::move(text));
    return ok();
  }

  Result<> make_optimizer_state() {
    DcpTable table;
    bool has_version = false, has_groups = false;
    for (const SavedValue& value : optimizer_values_) {
      const TorchStep& first = value.path[0];
      has_version = has_version || is_key_step(first, "ds_version");
      if (is_key_step(first, "zero_stage")) continue;  // it is of any now
      const bool is_base = is_key_step(first, kBaseKey) || is_key_step(first, kOptimizerDict);
      if (!is_base) {
        table.values.emplace_back(torch_path_text(value.path), std::string(value.archive));
        continue;
      }
      if (value.path.size() < 2 || !is_key_step(value.path[1], kGroupsKeyOf)) continue;
      has_groups = true;
      // Where stages 1 and 2 look for them, and where stage 3 does.
      const std::span of_groups = std::span(value.path).subspan(1);
      SavedPath of_stage_3 = key_path({kOptimizerDict});
      of_stage_3.insert(of_stage_3.end(), of_groups.begin(), of_groups.end());
      for (const std::string& text : {torch_path_text(of_groups), torch_path_text(of_stage_3)})
        table.values.emplace_back(text, std::string(value.archive));
    }
    if (!has_version) {
      PickleWriter version;
      version.text(kReaderVersion);
      PTC_TRY(auto archive, archive_of(std::move(version)));
      table.values.emplace_back(torch_path_text(key_path({"ds_version"})), std::move(archive));
    }
    if (!has_groups) {
      PickleWriter groups;
      groups.opcode(']');
      groups.opcode('(');
      for (size_t i = 0; i < kMostUniversalGroups; ++i) groups.opcode('}');
      groups.opcode('e');
      PTC_TRY(const auto archive, archive_of(std::move(groups)));
      table.values.emplace_back(torch_path_text(key_path({kGroupsKeyOf})), archive);
      table.values.emplace_back(torch_path_text(key_path({kOptimizerDict, kGroupsKeyOf})), archive);
    }
    SavedPath of_step = key_path({kOptimizerDict, "state"});
    of_step.push_back({TorchStep::Kind::kNumberKey, "", 0});
    of_step.push_back({TorchStep::Kind::kKey, std::string(kUniversalStep), 0});
    std::vector<ValueTensor> tensors;
    const auto with_step =
        std::find_if(parameters_.begin(), parameters_.end(),
                     [](const Parameter& one) { return one.states.contains(kUniversalStep); });
    if (common_step_) {
      table.values.emplace_back(torch_path_text(of_step), std::string(*common_step_));
    } else if (with_step != parameters_.end()) {
      const uint32_t tensor = with_step->states.find(kUniversalStep)->second;
      const TensorInfo& info = model_.tensors()[tensor];
      tensors.push_back({std::move(of_step), tensor, info.dtype, info.whole()});
    }
    PTC_TRY(folder_.optimizer_state_, lay_out_values(std::span(&table, 1), tensors));
    return ok();
  }

  static constexpr std::string_view kUniversalDirectory = "zero/", kCopyEnding = ".fp32";
  static constexpr std::string_view kStepEnding = ".step";

  DeepSpeedFolder& folder_;
  const Model& model_;
  const DeepSpeedSources& sources_;
  const DeepSpeedRanks ranks_;
  bool of_deepspeed_ = false;
  std::vector<SavedValue> model_values_;
  std::vector<SavedValue> optimizer_values_;  // below optimizer_state_dict
  std::map<std::string, std::map<std::string, std::vector<SavedValue>, std::less<>>, std::less<>>
      universal_values_;  // by parameter and state
  std::optional<uint64_t> steps_done_;
  std::optional<std::string_view> common_step_;
  bool steps_differ_ = false;  // between the optimizer's groups
  std::string iterations_;     // what common_step_ is of, where no step is saved
  std::unordered_set<std::string_view> whole_names_;  // of tensors that may be parameters
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, uint32_t> kinds_;  // numbers in the folder's
  std::unordered_map<std::string, uint64_t> bytes_;  // of files that are alike
};

Result<std::shared_ptr<const DeepSpeedFolder>> DeepSpeedFolder::make(
    const Model& model, const DeepSpeedSources& sources, DeepSpeedRanks ranks) {
  std::shared_ptr<DeepSpeedFolder> folder(new DeepSpeedFolder(model));
  PTC_TRY(Maker(*folder, model, sources, ranks).run());
  return std::shared_ptr<const DeepSpeedFolder>(std::move(folder));
}

Result<ImageLayout> DeepSpeedFolder::lay_out(const File& file) const {
  const Kind& kind = kinds_[file.kind];
  std::vector<ValueTensor> tensors;
  if (file.tensor != kNone) {
    const TensorInfo& info = model_.tensors()[file.tensor];
    tensors.push_back(
        {kind.bare ? SavedPath() : key_path({"param"}), file.tensor, info.dtype, info.whole()});
  }
  return lay_out_values(std::span(&kind.beside, 1), tensors);
}

}  // namespace ptc
