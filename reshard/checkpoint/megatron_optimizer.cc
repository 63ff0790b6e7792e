#include "reshard/checkpoint/megatron_optimizer.h"

#include <algorithm>
#include <map>
#include <unordered_set>

#include "reshard/checkpoint/torch_names.h"
#include "store/base/json.h"
#include "store/tensor/dtype.h"

namespace ptc {
namespace {

using Path = std::vector<TorchStep>;
using Kind = TorchStep::Kind;

constexpr std::string_view kOptimizerKey = "optimizer", kStateKey = "state",
                           kGroupsKey = "param_groups", kCopiesKey = "fp32_from_fp16_params";
constexpr size_t kMostGroups = 256;
/// The tied head has its group.
constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";

bool is_key(const TorchStep& step, std::string_view key) {
  return step.kind == Kind::kKey && step.key == key;
}

/// Whether the optimizer has it, as far as its name and type tell.
bool is_trained(const MegatronArray& array) {
  constexpr std::string_view kBuffers[] = {"_extra_state", "expert_bias", "inv_freq",
                                           "local_tokens_per_expert"};
  if (array.dtype != DType::kF32 && array.dtype != DType::kF16 && array.dtype != DType::kBF16)
    return false;
  return std::none_of(std::begin(kBuffers), std::end(kBuffers),
                      [&](std::string_view buffer) { return array.name.ends_with(buffer); });
}

bool is_norm_of_heads(std::string_view name) {
  return name.find("q_layernorm.") != name.npos || name.find("k_layernorm.") != name.npos;
}

bool has_one_element(std::span<const uint64_t> shape) {
  return std::all_of(shape.begin(), shape.end(), [](uint64_t extent) { return extent == 1; });
}

bool has_master(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

TorchStep key_step(std::string_view text) { return {Kind::kKey, std::string(text), 0}; }
TorchStep list_step(size_t index) { return {Kind::kListIndex, {}, static_cast<int64_t>(index)}; }

Path joined(Path path, std::initializer_list<TorchStep> more) {
  path.insert(path.end(), more);
  return path;
}

}  // namespace

class MegatronOptimizer::Finder {
 public:
  Finder(const TorchFile& file, std::span<const MegatronArray> arrays,
         std::span<const uint32_t> numbers)
      : file_(file), arrays_(arrays), numbers_(numbers) {}

  Result<std::optional<MegatronOptimizer>> run() {
    PTC_TRY(find_groups());
    PTC_TRY(find_state());
    // The distributed optimizer's groups list nothing.
    const bool lists_any = std::any_of(groups_.begin(), groups_.end(), [](const auto& group) {
      return !group.second.numbers.empty();
    });
    if (!lists_any && state_.empty() && copies_.empty()) return std::optional<MegatronOptimizer>();
    PTC_TRY(divide());
    PTC_TRY(check_state());
    PTC_TRY(name_state());
    return std::optional(std::move(found_));
  }

 private:
  struct Group {
    std::vector<int64_t> numbers;
    std::optional<double> wd_mult;
    std::vector<uint32_t> parameters;  // in arrays_, in the order of numbers
    std::vector<uint32_t> masters;     // those of them that have a master copy
  };
  struct State {
    uint32_t array;
    int64_t number;
    std::string kind;
  };
  struct Copy {
    uint32_t array;
    size_t group, position;
  };

  Result<> set_unit(std::span<const TorchStep> unit) {
    const Path path(unit.begin(), unit.end());
    if (found_.unit_.empty()) found_.unit_ = path;
    if (found_.unit_ == path) return ok();
    return invalid_argument(
        "it has several optimizers ({} and {}), and whose their state is cannot be told: save "
        "with --ckpt-format torch_dist, or without optimizer (--no-save-optim)",
        quoted(torch_name(found_.unit_)), quoted(torch_name(path)));
  }

  Result<> find_groups() {
    const Pickle& pickle = file_.pickle();
    for (const TorchLiteral& literal : file_.literals()) {
      const Path path = file_.path(literal.place);
      const size_t size = path.size();
      if (size < 4 || !is_key(path[0], kOptimizerKey)) continue;
      if (!is_key(path[size - 3], kGroupsKey) || path[size - 2].kind != Kind::kListIndex) {
        for (size_t i = 1; i + 1 < size; ++i)
          if (is_key(path[i], kStateKey) && path[i + 1].kind == Kind::kNumberKey)
            return invalid_argument(
                "{} is state of the optimizer by number, and no tensor: it cannot follow its "
                "parameter; save without optimizer (--no-save-optim)",
                quoted(torch_name(path)));
        continue;
      }
      const auto index = static_cast<size_t>(path[size - 2].number);
      if (is_key(path[size - 1], "wd_mult")) {
        if (pickle.is(literal.node, PickleKind::kFloat))
          groups_[index].wd_mult = pickle.number(literal.node);
        if (pickle.is(literal.node, PickleKind::kInt))
          groups_[index].wd_mult = static_cast<double>(pickle.integer(literal.node));
      }
      if (!is_key(path[size - 1], "params") || !pickle.is(literal.node, PickleKind::kList))
        continue;
      PTC_TRY(set_unit(std::span(path).first(size - 3)));
      Group& group = groups_[index];
      PTC_TRY(pickle.for_items(literal.node, [&](PickleId item) -> Result<> {
        if (!pickle.is(item, PickleKind::kInt))
          return invalid_argument("{} has {}, and no number", quoted(torch_name(path)),
                                  pickle.describe(item));
        group.numbers.push_back(pickle.integer(item));
        return ok();
      }));
    }
    return ok();
  }

  Result<> find_state() {
    for (uint32_t i = 0; i < arrays_.size(); ++i) {
      const Path path = file_.path(file_.tensors()[numbers_[i]].place);
      const size_t size = path.size();
      if (path.empty() || !is_key(path[0], kOptimizerKey)) {
        if (is_trained(arrays_[i])) parameters_.push_back(i);
        continue;
      }
      if (size >= 4 && is_key(path[size - 3], kStateKey) &&
          path[size - 2].kind == Kind::kNumberKey && path[size - 1].kind == Kind::kKey &&
          path[size - 1].key.find('.') == std::string::npos) {
        PTC_TRY(set_unit(std::span(path).first(size - 3)));
        state_.push_back({i, path[size - 2].number, path[size - 1].key});
      } else if (size >= 4 && is_key(path[size - 3], kCopiesKey) &&
                 path[size - 2].kind == Kind::kListIndex &&
                 path[size - 1].kind == Kind::kListIndex) {
        const Path list(path.begin(), path.end() - 2);
        if (found_.copies_.empty()) found_.copies_ = list;
        if (found_.copies_ != list) return set_unit(list);
        copies_.push_back({i, static_cast<size_t>(path[size - 2].number),
                           static_cast<size_t>(path[size - 1].number)});
      }
    }
    return ok();
  }

  /// Gives each group its parameters.
  Result<> divide() {
    if (groups_.size() > kMostGroups) return several_alike();
    size_t listed = 0;
    for (const auto& [index, group] : groups_) listed += group.numbers.size();
    for (const bool heads_too : {false, true}) {
      for (auto& [index, group] : groups_) group.parameters.clear();
      bool fits = true;
      for (const uint32_t i : parameters_) {
        Group* const group = group_for(arrays_[i], heads_too);
        if (group == nullptr) return several_alike();
        group->parameters.push_back(i);
      }
      for (const auto& [index, group] : groups_)
        fits = fits && group.parameters.size() == group.numbers.size();
      if (!fits) continue;
      for (auto& [index, group] : groups_) {
        for (size_t n = 0; n < group.numbers.size(); ++n) {
          if (!by_number_.try_emplace(group.numbers[n], group.parameters[n]).second)
            return invalid_argument("parameter {} is in two of the optimizer's groups",
                                    group.numbers[n]);
          if (has_master(arrays_[group.parameters[n]].dtype))
            group.masters.push_back(group.parameters[n]);
        }
      }
      return ok();
    }
    return invalid_argument(
        "its optimizer has state of {} parameters by number, and which of the {} of the model "
        "these "
        "are cannot be told by their order: save with --ckpt-format torch_dist, or without "
        "optimizer (--no-save-optim)",
        listed, parameters_.size());
  }

  /// nullptr: several could be.
  Group* group_for(const MegatronArray& array, bool heads_too) {
    const bool plain = array.shape.size() != 1 && !array.name.ends_with(".bias");
    const bool decays = plain || (heads_too && is_norm_of_heads(array.name));
    Group* only = nullptr;
    Group* of_its_kind = nullptr;
    size_t count = 0, of_kind = 0;
    for (auto& [index, group] : groups_) {
      if (group.numbers.empty()) continue;
      ++count;
      only = &group;
      if ((group.wd_mult.value_or(1) != 0) != decays) continue;
      ++of_kind;
      of_its_kind = &group;
    }
    if (of_kind == 1) return of_its_kind;
    return count == 1 ? only : nullptr;
  }

  Error several_alike() const {
    return invalid_argument(
        "its optimizer has {} groups, and which parameters each has cannot be told: save with "
        "--ckpt-format torch_dist, or without optimizer (--no-save-optim)",
        groups_.size());
  }

  Result<> check_state() const {
    auto check = [&](uint32_t array, uint32_t parameter, bool scalar) -> Result<> {
      const auto shape = arrays_[array].shape, wanted = arrays_[parameter].shape;
      if (std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end()) ||
          (scalar && has_one_element(shape)))
        return ok();
      return invalid_argument(
          "{} should be of {} by the order of parameters, and has another shape: whose the "
          "optimizer's state is cannot be told; save without optimizer (--no-save-optim)",
          quoted(arrays_[array].name), quoted(arrays_[parameter].name));
    };
    for (const State& state : state_) {
      const auto parameter = by_number_.find(state.number);
      if (parameter == by_number_.end())
        return invalid_argument("{} is of a parameter that is in none of the optimizer's groups",
                                quoted(arrays_[state.array].name));
      PTC_TRY(check(state.array, parameter->second, true));
    }
    std::map<size_t, size_t> counts;
    for (const Copy& copy : copies_) {
      const auto group = groups_.find(copy.group);
      if (group == groups_.end() || copy.position >= group->second.masters.size())
        return invalid_argument(
            "{} is a master copy of a parameter that is in none of the optimizer's groups",
            quoted(arrays_[copy.array].name));
      PTC_TRY(check(copy.array, group->second.masters[copy.position], false));
      ++counts[copy.group];
    }
    for (const auto& [index, count] : counts)
      if (count != groups_.at(index).masters.size())
        return invalid_argument("{}, group {}: {} master copies for {} parameters",
                                quoted(torch_name(found_.copies_)), index, count,
                                groups_.at(index).masters.size());
    return ok();
  }

  Result<> name_state() {
    const size_t most = 4 * file_.pickle_bytes().size() + (1 << 20);
    size_t bytes = 0;
    auto take = [&](std::string name, uint32_t array) -> Result<> {
      bytes += name.size();
      found_.names_[array] = std::move(name);
      if (bytes <= most) return ok();
      return invalid_argument("the names of its optimizer's state take more than {} bytes", most);
    };
    found_.names_.resize(arrays_.size());
    found_.groups_ = groups_.empty() ? 0 : groups_.rbegin()->first + 1;
    found_.state_prefix_ = torch_name(joined(found_.unit_, {key_step(kStateKey)})) + '.';
    if (!found_.copies_.empty()) found_.copies_prefix_ = torch_name(found_.copies_) + '.';
    for (const auto& [index, group] : groups_)
      for (const uint32_t i : group.parameters)
        found_.group_of_.try_emplace(without_numbers(arrays_[i].name),
                                     static_cast<uint32_t>(index));
    for (const State& state : state_) {
      PTC_TRY(take(fmt::format("{}{}.{}", found_.state_prefix_,
                               arrays_[by_number_.at(state.number)].name, state.kind),
                   state.array));
    }
    for (const Copy& copy : copies_) {
      PTC_TRY(take(fmt::format("{}{}", found_.copies_prefix_,
                               arrays_[groups_.at(copy.group).masters[copy.position]].name),
                   copy.array));
    }
    return ok();
  }

  const TorchFile& file_;
  const std::span<const MegatronArray> arrays_;
  const std::span<const uint32_t> numbers_;
  MegatronOptimizer found_;
  std::map<size_t, Group> groups_;
  std::vector<uint32_t> parameters_;  // in arrays_
  std::vector<State> state_;
  std::vector<Copy> copies_;
  std::unordered_map<int64_t, uint32_t> by_number_;  // in arrays_
};

Result<std::optional<MegatronOptimizer>> MegatronOptimizer::find(
    const TorchFile& file, std::span<const MegatronArray> arrays,
    std::span<const uint32_t> numbers) {
  return Finder(file, arrays, numbers).run();
}

const std::optional<std::string>& MegatronOptimizer::name(size_t array) const {
  return names_[array];
}

std::optional<MegatronOptimizer::State> MegatronOptimizer::state_of(std::string_view name) const {
  if (!copies_prefix_.empty() && name.starts_with(copies_prefix_))
    return State{name.substr(copies_prefix_.size()), {}};
  const size_t dot = name.rfind('.');
  if (!name.starts_with(state_prefix_) || dot < state_prefix_.size()) return std::nullopt;
  return State{name.substr(state_prefix_.size(), dot - state_prefix_.size()), name.substr(dot + 1)};
}

std::optional<uint32_t> MegatronOptimizer::group_of(std::string_view parameter) const {
  std::string kind = without_numbers(parameter);
  if (const auto found = group_of_.find(kind); found != group_of_.end()) return found->second;
  for (const auto& [own, other] :
       {std::pair(kMegatronHead, kEmbedding), std::pair(kEmbedding, kMegatronHead)}) {
    if (!parameter.ends_with(own)) continue;
    kind.replace(kind.size() - own.size(), own.size(), other);
    if (const auto found = group_of_.find(kind); found != group_of_.end()) return found->second;
  }
  return std::nullopt;
}

void MegatronOptimizer::add(const MegatronOptimizer& other) {
  if (copies_.empty()) copies_ = other.copies_, copies_prefix_ = other.copies_prefix_;
  groups_ = std::max(groups_, other.groups_);
  for (const auto& [kind, group] : other.group_of_) group_of_.try_emplace(kind, group);
}

Result<MegatronOptimizer::Places> MegatronOptimizer::places(
    std::span<const MegatronArray> arrays) const {
  Places places;
  places.paths.resize(arrays.size());
  std::unordered_set<std::string_view> with_copy;  // parameters
  std::vector<std::string_view> parameters, last;
  for (const MegatronArray& array : arrays) {
    if (const auto state = state_of(array.name)) {
      if (state->kind.empty()) with_copy.insert(state->parameter);
    } else if (is_trained(array) && !array.name.starts_with("optimizer.")) {
      (array.name.ends_with(kMegatronHead) ? last : parameters).push_back(array.name);
    }
  }
  parameters.insert(parameters.end(), last.begin(), last.end());
  std::vector<std::vector<std::string_view>> groups(groups_);
  for (const std::string_view parameter : parameters) {
    const auto group = group_of(parameter);
    if (!group || *group >= groups.size())
      return invalid_argument(
          "no file that was written says which of the optimizer's groups has {}",
          quoted(parameter));
    groups[*group].push_back(parameter);
  }
  struct Place {
    size_t group, copy;
    int64_t number;
  };
  std::unordered_map<std::string_view, Place> place_of;
  int64_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    size_t copies = 0;
    std::vector<int64_t> numbers;
    for (const std::string_view parameter : groups[g]) {
      place_of.emplace(parameter, Place{g, copies, number});
      if (with_copy.contains(parameter)) ++copies;
      numbers.push_back(number++);
    }
    places.groups.emplace_back(
        joined(unit_, {key_step(kGroupsKey), list_step(g), key_step("params")}),
        std::move(numbers));
    if (copies == 0 && !copies_.empty())
      places.empty_lists.push_back(joined(copies_, {list_step(g)}));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const auto state = state_of(arrays[i].name);
    if (!state) continue;
    const auto place = place_of.find(state->parameter);
    if (place == place_of.end())
      return invalid_argument("{} is of a parameter that is not in the file",
                              quoted(arrays[i].name));
    const auto& [group, copy, at] = place->second;
    places.paths[i] =
        state->kind.empty()
            ? joined(copies_, {list_step(group), list_step(copy)})
            : joined(unit_,
                     {key_step(kStateKey), {Kind::kNumberKey, {}, at}, key_step(state->kind)});
  }
  return places;
}

}  // namespace ptc
