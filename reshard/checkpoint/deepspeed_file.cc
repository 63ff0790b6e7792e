#include "reshard/checkpoint/deepspeed_file.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "store/base/json.h"
#include "store/base/size_text.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/pickle_walk.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

constexpr std::string_view kZeroState = "optimizer_state_dict";
constexpr std::string_view kBaseState = "base_optimizer_state";
constexpr std::string_view kFlatMasters = "single_partition_of_fp32_groups";
constexpr std::string_view kSliceMasters = "fp32_flat_groups";
constexpr std::string_view kMappings = "param_slice_mappings";
constexpr std::string_view kPaddings = "group_paddings";
constexpr std::string_view kGaps = "param_alignment_paddings";
constexpr std::string_view kPartitions = "partition_count";
constexpr std::string_view kZeroPartitions = "ds_zero_partition_groups";

constexpr uint64_t kMostZeroGroups = 1 << 20;
constexpr size_t kMostStates = 64;  // of a parameter

bool is_text_step(const TorchStep& step, std::string_view key) {
  return step.kind == TorchStep::Kind::kKey && step.key == key;
}
bool is_number_step(const TorchStep& step) { return step.kind != TorchStep::Kind::kKey; }

/// Whether it begins_with with these keys.
bool begins_with(const std::vector<TorchStep>& path, std::initializer_list<std::string_view> keys) {
  return path.size() >= keys.size() && std::equal(keys.begin(), keys.end(), path.begin(),
                                                  [](std::string_view key, const TorchStep& step) {
                                                    return is_text_step(step, key);
                                                  });
}

/// Looks up what a pickle says in dicts and lists.
class PickleLook {
 public:
  explicit PickleLook(const Pickle& pickle) : pickle_(pickle), walk_(pickle) {}

  bool is_mapping(PickleId id) const {
    return pickle_.is(id, PickleKind::kDict) || pickle_.is(id, PickleKind::kObject);
  }
  /// f(text, value) for each pair with such a key.
  template <class F>
  Result<> for_texts(PickleId mapping, F&& f) {
    if (!is_mapping(mapping)) return ok();
    return walk_.for_pairs(mapping, [&](PickleId key, PickleId value) -> Result<> {
      if (!pickle_.is(key, PickleKind::kText)) return ok();
      PTC_TRY(walk_.count_text(pickle_.text(key)));
      return f(pickle_.text(key), value);
    });
  }
  Result<std::optional<PickleId>> value(PickleId mapping, std::string_view wanted) {
    std::optional<PickleId> found;
    PTC_TRY(for_texts(mapping, [&](std::string_view key, PickleId value) -> Result<> {
      if (key == wanted) found = value;
      return ok();
    }));
    return found;
  }
  template <class F>
  Result<> for_items(PickleId list, F&& f) {
    if (!pickle_.is(list, PickleKind::kList) && !pickle_.is(list, PickleKind::kTuple)) return ok();
    return walk_.for_items(list, f);
  }
  /// nullopt: it is none, or negative.
  std::optional<uint64_t> count(PickleId id) const {
    if (!pickle_.is(id, PickleKind::kInt) || pickle_.integer(id) < 0) return std::nullopt;
    return static_cast<uint64_t>(pickle_.integer(id));
  }
  Result<std::vector<uint64_t>> counts(PickleId list, std::string_view what) {
    std::vector<uint64_t> all;
    PTC_TRY(for_items(list, [&](PickleId item) -> Result<> {
      const auto one = count(item);
      if (!one)
        return invalid_argument("{} has {}, which is no count", what, pickle_.describe(item));
      all.push_back(*one);
      return ok();
    }));
    return all;
  }
  /// Names and their shapes. `shapes` are torch.Size.
  Result<DeepSpeedModel::Shapes> shapes(PickleId mapping, std::string_view what) {
    DeepSpeedModel::Shapes all;
    PTC_TRY(for_texts(mapping, [&](std::string_view name, PickleId value) -> Result<> {
      PTC_TRY(const auto dims, torch_dims(pickle_, value));
      if (!dims)
        return invalid_argument("{} says that {} is {}, which is no shape", what, ptc::quoted(name),
                                pickle_.describe(value));
      PTC_TRY(num_elements(*dims));
      all.emplace_back(std::string(name), *dims);
      return ok();
    }));
    return all;
  }
  /// deepspeed.utils.tensor_fragment.fragment_address, as the state that it was given.
  Result<ZeroFile::Slice> slice(std::string_view parameter, PickleId address) {
    std::optional<uint64_t> elements, start;
    const auto take = [&](PickleId state) -> Result<> {
      PTC_TRY(const auto first, value(state, "start"));
      PTC_TRY(const auto number, value(state, "numel"));
      if (first) start = count(*first);
      if (number) elements = count(*number);
      return ok();
    };
    if (pickle_.is(address, PickleKind::kObject)) {
      PTC_TRY(walk_.for_states(address, take));
    }
    if (!start || !elements)
      return invalid_argument("{} does not say where {} is", kMappings, ptc::quoted(parameter));
    return ZeroFile::Slice{std::string(parameter), *start, *elements};
  }

 private:
  const Pickle& pickle_;
  PickleWalk walk_;
};

/// An archive of torch.save's with one tensor.
Result<std::string> save_one_tensor(const ReadAt& read, const TorchTensor& tensor) {
  TorchPathValue value;
  value.dtype = tensor.dtype;
  value.shape = tensor.shape;
  PTC_TRY(const auto made, compose_torch_file(std::span(&value, 1)));
  std::string archive(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    archive.replace(piece.offset, piece.bytes.size(), piece.bytes);
  PTC_TRY(read(tensor.offset, std::as_writable_bytes(std::span(archive))
                                  .subspan(made.tensors[0].offset, made.tensors[0].bytes)));
  return archive;
}

/// Takes values one by one. What holds others is copied out of the whole pickle.
class SavedValues {
 public:
  SavedValues(const TorchFile& file, uint64_t file_bytes)
      : file_(file), most_bytes_(kLeastLimit + kMostTimes * file_bytes) {}
  Result<> add(const std::vector<TorchStep>& path, PickleId node, DeepSpeedValues& values) {
    constexpr uint64_t kMostSteps = uint64_t{1} << 29;
    switch (file_.pickle().kind(node)) {
      case PickleKind::kNone:
      case PickleKind::kFalse:
      case PickleKind::kTrue:
      case PickleKind::kInt:
      case PickleKind::kFloat:
      case PickleKind::kText:
        break;
      default:
        steps_ += file_.pickle().size();
    }
    if (steps_ > kMostSteps) return invalid_argument("it has too many values that hold others");
    PTC_TRY(auto archive, save_value(file_.pickle(), node));
    return keep(path, std::move(archive), values);
  }
  Result<> keep(const std::vector<TorchStep>& path, std::string archive, DeepSpeedValues& values) {
    bytes_ += archive.size();
    if (bytes_ > most_bytes_)
      return invalid_argument("it has too many values that are no tensors: {} of them would be {}",
                              values.size() + 1, format_size(bytes_));
    values.emplace_back(torch_path_text(path), std::move(archive));
    return ok();
  }

 private:
  // An archive is hundreds of bytes, of a value that may have been two.
  static constexpr uint64_t kLeastLimit = 1 << 20, kMostTimes = 16;
  const TorchFile& file_;
  const uint64_t most_bytes_;
  uint64_t steps_ = 0, bytes_ = 0;
};

Result<> check_opaque(const TorchFile& file) {
  if (file.opaque().empty()) return ok();
  const TorchOpaque& first = file.opaque().front();
  return invalid_argument("{} cannot be cut: {}", ptc::quoted(first.name), first.reason);
}

Error unknown_tensor(std::string_view tensor) {
  return invalid_argument("tensor {} is none that such files are known to have",
                          ptc::quoted(tensor));
}

Result<FlatArray> flat_array(const TorchTensor& tensor) {
  if (!tensor.contiguous)
    return invalid_argument("tensor {}: its elements do not follow each other",
                            ptc::quoted(tensor.name));
  PTC_TRY(const uint64_t elements, num_elements(tensor.shape));
  return FlatArray{tensor.dtype, tensor.offset, elements};
}

/// Which group's, and of which state, an array is; nullopt: of none.
struct StatePlace {
  uint64_t group;
  std::string key;  // empty: the fp32 copy itself
};
std::optional<StatePlace> state_place(const std::vector<TorchStep>& path) {
  const auto at = [&](size_t step, std::string key) -> std::optional<StatePlace> {
    const int64_t group = path[step].number;
    if (!is_number_step(path[step]) || group < 0 || static_cast<uint64_t>(group) >= kMostZeroGroups)
      return std::nullopt;
    return StatePlace{static_cast<uint64_t>(group), std::move(key)};
  };
  if (path.size() == 3 && (begins_with(path, {kZeroState, kFlatMasters}) ||
                           begins_with(path, {kZeroState, kSliceMasters})))
    return at(2, "");
  if (path.empty() || path.back().kind != TorchStep::Kind::kKey) return std::nullopt;
  if (path.size() == 5 && (begins_with(path, {kZeroState, kBaseState, "state"}) ||
                           begins_with(path, {kZeroState, kZeroState, "state"})))
    return at(3, path.back().key);
  if (path.size() == 4 && begins_with(path, {kZeroState, kBaseState}))  // of an elastic checkpoint
    return at(2, path.back().key);
  return std::nullopt;
}

/// How the writer cut it says no reader of the whole.
bool says_how_cut(const std::vector<TorchStep>& path) {
  return begins_with(path, {kZeroState, kMappings}) || begins_with(path, {kZeroState, kPaddings}) ||
         begins_with(path, {kZeroState, kGaps}) || begins_with(path, {kZeroState, kPartitions}) ||
         begins_with(path, {kZeroState, kZeroPartitions});
}

/// What it says of each group.
Result<> read_zero_groups(PickleLook& look, PickleId state, ZeroFile& zero) {
  auto& groups = zero.groups;
  PTC_TRY(const auto partitions, look.value(state, kPartitions));
  if (partitions && look.count(*partitions)) {
    for (ZeroFile::Group& group : groups) group.partitions = look.count(*partitions);
  } else if (partitions) {
    PTC_TRY(const auto counts, look.counts(*partitions, kPartitions));
    for (size_t i = 0; i < std::min(counts.size(), groups.size()); ++i)
      groups[i].partitions = counts[i];
  }
  PTC_TRY(const auto of_zero, look.value(state, kZeroPartitions));
  if (of_zero) {
    size_t i = 0;
    PTC_TRY(look.for_items(*of_zero, [&](PickleId item) -> Result<> {
      PTC_TRY(const auto count, look.value(item, kPartitions));
      if (i < groups.size() && count) groups[i].partitions = look.count(*count);
      ++i;
      return ok();
    }));
  }
  PTC_TRY(const auto paddings, look.value(state, kPaddings));
  if (paddings) {
    PTC_TRY(const auto counts, look.counts(*paddings, kPaddings));
    if (counts.size() != groups.size())
      return invalid_argument("{} has {} numbers, and there are {} groups", kPaddings,
                              counts.size(), groups.size());
    for (size_t i = 0; i < groups.size(); ++i) groups[i].padding = counts[i];
  }
  PTC_TRY(const auto gaps, look.value(state, kGaps));
  if (gaps) {
    size_t i = 0;
    PTC_TRY(look.for_items(*gaps, [&](PickleId of_group) -> Result<> {
      PTC_TRY(auto counts, look.counts(of_group, kGaps));
      if (i < groups.size()) groups[i++].gaps = std::move(counts);
      return ok();
    }));
  }
  PTC_TRY(const auto mappings, look.value(state, kMappings));
  if (!mappings) return ok();
  size_t i = 0;
  return look.for_items(*mappings, [&](PickleId mapping) -> Result<> {
    if (i == groups.size()) return ok();
    auto& slices = groups[i++].slices.emplace();
    return look.for_texts(mapping, [&](std::string_view name, PickleId address) -> Result<> {
      PTC_TRY(auto slice, look.slice(name, address));
      slices.push_back(std::move(slice));
      return ok();
    });
  });
}

}  // namespace

Result<ZeroFile> ZeroFile::read(const ReadAt& read, uint64_t file_bytes) {
  PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
  ZeroFile zero;
  std::vector<bool> has_master;
  const auto group_of = [&](uint64_t number) -> Group& {
    if (zero.groups.size() <= number) {
      zero.groups.resize(number + 1);
      has_master.resize(number + 1);
    }
    return zero.groups[number];
  };
  SavedValues taker(file, file_bytes);
  PTC_TRY(check_opaque(file));
  for (const TorchTensor& tensor : file.tensors()) {
    const std::vector<TorchStep> path = file.path(tensor.place);
    const auto place = state_place(path);
    if (tensor.shape.empty()) {  // a number: of steps, or a scale
      PTC_TRY(auto archive, save_one_tensor(read, tensor));
      PTC_TRY(taker.keep(path, std::move(archive), zero.values));
      continue;
    }
    if (!place) return unknown_tensor(tensor.name);
    if (tensor.shape.size() != 1)
      return invalid_argument("tensor {} is {}, and not flat", ptc::quoted(tensor.name),
                              tensor.shape.to_string());
    PTC_TRY(const FlatArray array, flat_array(tensor));
    // Each array here is in the file, so there are not more groups than it has arrays.
    if (place->group > file.tensors().size()) return unknown_tensor(tensor.name);
    Group& group = group_of(place->group);
    if (place->key.empty()) {
      group.master = array;
      has_master[place->group] = true;
      zero.of_stage_3 = is_text_step(path[1], kSliceMasters);
    } else {
      group.state.emplace_back(place->key, array);
      if (group.state.size() > kMostStates)
        return invalid_argument("group {} has more than {} kinds of state", place->group,
                                kMostStates);
    }
  }
  const auto missing = std::find(has_master.begin(), has_master.end(), false);
  if (zero.groups.empty() || missing != has_master.end())
    return invalid_argument("it has no {} or {} of group {}: it is no file of ZeRO's", kFlatMasters,
                            kSliceMasters, missing - has_master.begin());
  PickleLook look(file.pickle());
  PTC_TRY(const auto state, look.value(file.pickle().root(), kZeroState));
  if (state) {
    PTC_TRY(read_zero_groups(look, *state, zero));
  }
  for (const TorchLiteral& literal : file.literals()) {
    const std::vector<TorchStep> path = file.path(literal.place);
    if (path.size() < 2 || !is_text_step(path[0], kZeroState) || says_how_cut(path)) continue;
    PTC_TRY(taker.add(path, literal.node, zero.values));
  }
  return zero;
}

Result<DeepSpeedModel> DeepSpeedModel::read(const ReadAt& read, uint64_t file_bytes,
                                            bool with_values) {
  PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
  DeepSpeedModel model;
  PickleLook look(file.pickle());
  const PickleId root = file.pickle().root();
  PTC_TRY(const auto shapes, look.value(root, "param_shapes"));
  if (shapes) {
    PTC_TRY(look.for_items(*shapes, [&](PickleId group) -> Result<> {
      PTC_TRY(auto of_group, look.shapes(group, "param_shapes"));
      model.groups.push_back(std::move(of_group));
      return ok();
    }));
  }
  PTC_TRY(const auto frozen, look.value(root, "frozen_param_shapes"));
  if (frozen) {
    PTC_TRY(model.frozen, look.shapes(*frozen, "frozen_param_shapes"));
  }
  PTC_TRY(const auto ranks, look.value(root, "mp_world_size"));
  if (ranks) model.model_parallel = look.count(*ranks);
  std::unordered_set<std::string_view> buffers;
  PTC_TRY(const auto names, look.value(root, "buffer_names"));
  if (names) {
    PTC_TRY(look.for_items(*names, [&](PickleId name) -> Result<> {
      if (file.pickle().is(name, PickleKind::kText)) buffers.insert(file.pickle().text(name));
      return ok();
    }));
  }
  constexpr std::string_view kFragments = "frozen_param_fragments", kModule = "module";
  for (const TorchTensor& tensor : file.tensors()) {
    const std::vector<TorchStep> path = file.path(tensor.place);
    if (path.size() < 2) continue;
    const std::string name = torch_name(std::span(path).subspan(1));
    if (begins_with(path, {kFragments})) {
      PTC_TRY(const FlatArray array, flat_array(tensor));
      model.frozen_parts.emplace_back(name, array);
    } else if (begins_with(path, {kModule}) && buffers.contains(name)) {
      PTC_TRY(const FlatArray array, flat_array(tensor));
      model.buffers.push_back({name, tensor.shape, array});
    }
  }
  SavedValues taker(file, file_bytes);
  for (const TorchLiteral& literal : file.literals()) {
    if (!with_values) break;
    const std::vector<TorchStep> path = file.path(literal.place);
    if (path.empty() || begins_with(path, {"param_shapes"}) ||
        begins_with(path, {"frozen_param_shapes"}))
      continue;
    PTC_TRY(taker.add(path, literal.node, model.values));
  }
  return model;
}

Result<UniversalState> UniversalState::read(const ReadAt& read, uint64_t file_bytes) {
  PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
  UniversalState state;
  PTC_TRY(check_opaque(file));
  for (const TorchTensor& tensor : file.tensors()) {
    const std::vector<TorchStep> path = file.path(tensor.place);
    if (state.array || !(path.empty() || (path.size() == 1 && is_text_step(path[0], "param"))))
      return unknown_tensor(tensor.name);
    PTC_TRY(state.array, flat_array(tensor));
    state.shape = tensor.shape;
    if (!path.empty() || state.array->elements != 1) continue;
    PTC_TRY(state.number, save_one_tensor(read, tensor));
  }
  SavedValues taker(file, file_bytes);
  for (const TorchLiteral& literal : file.literals()) {
    PTC_TRY(taker.add(file.path(literal.place), literal.node, state.values));
  }
  return state;
}

}  // namespace ptc
