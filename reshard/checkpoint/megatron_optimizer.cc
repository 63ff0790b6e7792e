#include "reshard/checkpoint/megatron_optimizer.h"

#include <algorithm>
#include <map>
#include <unordered_set>

#include "reshard/checkpoint/megatron_file.h"
#include "reshard/checkpoint/torch_names.h"
#include "store/base/json.h"
#include "store/tensor/dtype.h"

namespace ptc {
namespace {

using Path = std::vector<TorchStep>;
using Kind = TorchStep::Kind;

constexpr std::string_view kOptimizerKey = "optimizer", kStateKey = "state",
                           kGroupsKey = "param_groups", kCopiesKey = "fp32_from_fp16_params";
constexpr size_t kMostGroups = 256, kMostUnits = 16;

bool is_key(const TorchStep& step, std::string_view key) {
  return step.kind == Kind::kKey && step.key == key;
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

std::vector<uint32_t> megatron_order(std::span<const std::string_view> names) {
  // What is before each number of a name, and the number; at last all of it without numbers.
  std::vector<std::vector<std::pair<uint32_t, uint64_t>>> keys(names.size());
  std::unordered_map<std::string, uint32_t> first;  // by what is before a number
  for (uint32_t i = 0; i < names.size(); ++i) {
    const std::string_view name = names[i];
    std::string before;
    for (size_t at = 0; at < name.size();) {
      const size_t begin = std::min(name.find_first_of("0123456789", at), name.size());
      before += name.substr(at, begin - at);
      if (begin == name.size()) break;
      at = std::min(name.find_first_not_of("0123456789", begin), name.size());
      const std::string_view digits = name.substr(begin, std::min<size_t>(at - begin, 18));
      // "layers.3.", "weight3", and not "linear_fc1".
      if (!before.ends_with('.') && !before.ends_with("weight") && !before.ends_with("bias")) {
        before += digits;
        continue;
      }
      uint64_t number = 0;
      for (const char digit : digits) number = number * 10 + static_cast<uint64_t>(digit - '0');
      keys[i].emplace_back(first.try_emplace(before, i).first->second, number);
      before += '#';
    }
    keys[i].emplace_back(first.try_emplace(before + '.', i).first->second, 0);
  }
  std::vector<uint32_t> order(names.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto is_head = [&](uint32_t i) { return names[i].ends_with(kMegatronHead); };
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return is_head(a) != is_head(b) ? is_head(b) : keys[a] < keys[b];
  });
  return order;
}

bool is_megatron_parameter(std::string_view name, DType dtype) {
  constexpr std::string_view kBuffers[] = {"_extra_state", "expert_bias", "inv_freq",
                                           "local_tokens_per_expert"};
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) return false;
  return std::none_of(std::begin(kBuffers), std::end(kBuffers),
                      [&](std::string_view buffer) { return name.ends_with(buffer); });
}

bool is_megatron_expert(std::string_view name) { return name.find(".experts.") != name.npos; }

std::string megatron_kind(std::string_view name) {
  name.remove_prefix(megatron_chunk_bytes(name));
  return without_numbers(name);
}

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
    bool of_experts = false;
    std::vector<uint32_t> parameters;  // in arrays_, in the order of numbers
    std::vector<uint32_t> masters;     // those of them that have a master copy
  };
  struct State {
    uint32_t array, unit;
    int64_t number;
    std::string kind;
  };
  struct Copy {
    uint32_t array, unit;
    size_t group, position;
  };
  using GroupKey = std::pair<uint32_t, size_t>;  // unit, position

  Result<uint32_t> unit_of(std::span<const TorchStep> unit) {
    const Path path(unit.begin(), unit.end());
    for (uint32_t u = 0; u < found_.units_.size(); ++u)
      if (found_.units_[u].path == path) return u;
    if (found_.units_.size() == kMostUnits) return several_optimizers(path);
    found_.units_.push_back({path});
    return static_cast<uint32_t>(found_.units_.size() - 1);
  }
  Error several_optimizers(const Path& other) const {
    return invalid_argument(
        "it has several optimizers ({} and {}), and whose their state is cannot be told: save "
        "with --ckpt-format torch_dist, or without optimizer (--no-save-optim)",
        quoted(torch_name(found_.units_.front().path)), quoted(torch_name(other)));
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
      const bool wd_mult = is_key(path[size - 1], "wd_mult"),
                 of_experts = is_key(path[size - 1], "is_expert_parallel"),
                 params =
                     is_key(path[size - 1], "params") && pickle.is(literal.node, PickleKind::kList);
      if (!wd_mult && !of_experts && !params) continue;
      PTC_TRY(const uint32_t unit, unit_of(std::span(path).first(size - 3)));
      Group& group = groups_[{unit, static_cast<size_t>(path[size - 2].number)}];
      if (of_experts) group.of_experts = pickle.is(literal.node, PickleKind::kTrue);
      if (wd_mult && pickle.is(literal.node, PickleKind::kFloat))
        group.wd_mult = pickle.number(literal.node);
      if (wd_mult && pickle.is(literal.node, PickleKind::kInt))
        group.wd_mult = static_cast<double>(pickle.integer(literal.node));
      if (!params) continue;
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
        if (is_megatron_parameter(arrays_[i].name, arrays_[i].dtype)) parameters_.push_back(i);
        continue;
      }
      if (size >= 4 && is_key(path[size - 3], kStateKey) &&
          path[size - 2].kind == Kind::kNumberKey && path[size - 1].kind == Kind::kKey &&
          path[size - 1].key.find('.') == std::string::npos) {
        PTC_TRY(const uint32_t unit, unit_of(std::span(path).first(size - 3)));
        state_.push_back({i, unit, path[size - 2].number, path[size - 1].key});
      } else if (size >= 4 && is_key(path[size - 3], kCopiesKey) &&
                 path[size - 2].kind == Kind::kListIndex &&
                 path[size - 1].kind == Kind::kListIndex) {
        copies_.push_back({i, 0, static_cast<size_t>(path[size - 2].number),
                           static_cast<size_t>(path[size - 1].number)});
      }
    }
    return find_units_of_copies();
  }

  /// Master copies lie beside the optimizer that has their moments.
  Result<> find_units_of_copies() {
    for (Copy& copy : copies_) {
      Path list = file_.path(file_.tensors()[numbers_[copy.array]].place);
      list.resize(list.size() - 2);
      Path beside(list.begin(), list.end() - 1);
      beside.push_back(key_step(kOptimizerKey));
      // One alone may be anywhere.
      if (found_.units_.size() > 1 || found_.units_.empty()) {
        PTC_TRY(copy.unit, unit_of(beside));
      }
      Unit& unit = found_.units_[copy.unit];
      if (unit.copies.empty()) unit.copies = list;
      if (unit.copies != list) return several_optimizers(list);
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
          if (!by_number_.try_emplace({index.first, group.numbers[n]}, group.parameters[n]).second)
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
    const bool experts_apart = std::any_of(groups_.begin(), groups_.end(), [](const auto& group) {
      return group.second.of_experts && !group.second.numbers.empty();
    });
    Group* only = nullptr;
    Group* of_its_kind = nullptr;
    size_t count = 0, of_kind = 0;
    for (auto& [index, group] : groups_) {
      if (group.numbers.empty()) continue;
      if (experts_apart && group.of_experts != is_megatron_expert(array.name)) continue;
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
      const auto parameter = by_number_.find({state.unit, state.number});
      if (parameter == by_number_.end())
        return invalid_argument("{} is of a parameter that is in none of the optimizer's groups",
                                quoted(arrays_[state.array].name));
      PTC_TRY(check(state.array, parameter->second, true));
    }
    std::map<GroupKey, size_t> counts;
    for (const Copy& copy : copies_) {
      const auto group = groups_.find({copy.unit, copy.group});
      if (group == groups_.end() || copy.position >= group->second.masters.size())
        return invalid_argument(
            "{} is a master copy of a parameter that is in none of the optimizer's groups",
            quoted(arrays_[copy.array].name));
      PTC_TRY(check(copy.array, group->second.masters[copy.position], false));
      ++counts[{copy.unit, copy.group}];
    }
    for (const auto& [index, count] : counts)
      if (count != groups_.at(index).masters.size())
        return invalid_argument("{}, group {}: {} master copies for {} parameters",
                                quoted(torch_name(found_.units_[index.first].copies)), index.second,
                                count, groups_.at(index).masters.size());
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
    for (Unit& unit : found_.units_) {
      unit.state_prefix = torch_name(joined(unit.path, {key_step(kStateKey)})) + '.';
      if (!unit.copies.empty()) unit.copies_prefix = torch_name(unit.copies) + '.';
    }
    for (const auto& [index, group] : groups_) {
      found_.units_[index.first].groups = index.second + 1;  // the last is the highest
      for (const uint32_t i : group.parameters)
        found_.group_of_.try_emplace(megatron_kind(arrays_[i].name),
                                     GroupId{index.first, static_cast<uint32_t>(index.second)});
    }
    for (const State& state : state_) {
      PTC_TRY(take(fmt::format("{}{}.{}", found_.units_[state.unit].state_prefix,
                               arrays_[by_number_.at({state.unit, state.number})].name, state.kind),
                   state.array));
    }
    for (const Copy& copy : copies_) {
      const Group& group = groups_.at({copy.unit, copy.group});
      PTC_TRY(take(fmt::format("{}{}", found_.units_[copy.unit].copies_prefix,
                               arrays_[group.masters[copy.position]].name),
                   copy.array));
    }
    return ok();
  }

  const TorchFile& file_;
  const std::span<const MegatronArray> arrays_;
  const std::span<const uint32_t> numbers_;
  MegatronOptimizer found_;
  std::map<GroupKey, Group> groups_;
  std::vector<uint32_t> parameters_;  // in arrays_
  std::vector<State> state_;
  std::vector<Copy> copies_;
  std::map<std::pair<uint32_t, int64_t>, uint32_t> by_number_;  // unit and number → in arrays_
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
  for (uint32_t u = 0; u < units_.size(); ++u) {
    const std::string &copies = units_[u].copies_prefix, &state = units_[u].state_prefix;
    if (!copies.empty() && name.starts_with(copies))
      return State{u, name.substr(copies.size()), {}};
    const size_t dot = name.rfind('.');
    if (!name.starts_with(state) || dot < state.size()) continue;
    return State{u, name.substr(state.size(), dot - state.size()), name.substr(dot + 1)};
  }
  return std::nullopt;
}

void MegatronOptimizer::add(const MegatronOptimizer& other) {
  std::vector<uint32_t> unit_here;
  for (const Unit& unit : other.units_) {
    const auto same = std::find_if(units_.begin(), units_.end(),
                                   [&](const Unit& one) { return one.path == unit.path; });
    unit_here.push_back(static_cast<uint32_t>(same - units_.begin()));
    if (same == units_.end()) {
      units_.push_back(unit);
      continue;
    }
    if (same->copies.empty()) same->copies = unit.copies, same->copies_prefix = unit.copies_prefix;
    same->groups = std::max(same->groups, unit.groups);
  }
  for (const auto& [kind, id] : other.group_of_)
    group_of_.try_emplace(kind, GroupId{unit_here[id.unit], id.group});
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
    } else if (is_megatron_parameter(array.name, array.dtype) &&
               !array.name.starts_with("optimizer.")) {
      (array.name.ends_with(kMegatronHead) ? last : parameters).push_back(array.name);
    }
  }
  parameters.insert(parameters.end(), last.begin(), last.end());
  std::vector<std::vector<std::vector<std::string_view>>> groups;  // by unit
  for (const Unit& unit : units_) groups.emplace_back(unit.groups);
  for (const std::string_view parameter : parameters) {
    const GroupId* const group = find_megatron_kind(group_of_, parameter);
    if (group == nullptr || group->group >= groups[group->unit].size())
      return invalid_argument(
          "no file that was written says which of the optimizer's groups has {}",
          quoted(parameter));
    groups[group->unit][group->group].push_back(parameter);
  }
  struct Place {
    size_t group, copy;
    int64_t number;
  };
  std::unordered_map<std::string_view, Place> place_of;
  for (size_t u = 0; u < groups.size(); ++u) {
    const Unit& unit = units_[u];
    int64_t number = 0;
    for (size_t g = 0; g < groups[u].size(); ++g) {
      size_t copies = 0;
      std::vector<int64_t> numbers;
      for (const std::string_view parameter : groups[u][g]) {
        place_of.emplace(parameter, Place{g, copies, number});
        if (with_copy.contains(parameter)) ++copies;
        numbers.push_back(number++);
      }
      places.groups.emplace_back(
          joined(unit.path, {key_step(kGroupsKey), list_step(g), key_step("params")}),
          std::move(numbers));
      if (copies == 0 && !unit.copies.empty())
        places.empty_lists.push_back(joined(unit.copies, {list_step(g)}));
    }
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
            ? joined(units_[state->unit].copies, {list_step(group), list_step(copy)})
            : joined(units_[state->unit].path,
                     {key_step(kStateKey), {Kind::kNumberKey, {}, at}, key_step(state->kind)});
  }
  return places;
}

}  // namespace ptc
