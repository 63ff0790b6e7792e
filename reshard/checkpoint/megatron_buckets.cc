#include "reshard/checkpoint/megatron_buckets.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>

#include "reshard/checkpoint/json_numbers.h"
#include "reshard/checkpoint/megatron_optimizer.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "store/base/json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

using Kind = TorchStep::Kind;

/// Then the length of a Description's text, that, and an outline of torch's.
constexpr std::string_view kBucketsMagic = "ptcbuckt";
constexpr uint64_t kAlignment = 64;  // elements
constexpr uint64_t kElementBytes = 4;
constexpr uint64_t kMostElements = uint64_t{1} << 62;
constexpr size_t kMostKeys = 16;  // Adam's are three
constexpr uint32_t kNoArray = UINT32_MAX;
constexpr std::string_view kCoalesced = "buckets_coalesced", kElements = "numel_unpadded";
constexpr std::string_view kAdvice =
    "save with --ckpt-format torch_dist, which is cut with all of its state; or move the file "
    "away, to take the model without the optimizer's state";

/// Of a parameter's master copy or of a moment.
std::string state_name(std::string_view key, std::string_view parameter) {
  return fmt::format("{}.{}", key, parameter);
}

/// The stretch of layers that a parameter is in.
uint32_t chunk_of(std::string_view name) {
  const size_t bytes = megatron_chunk_bytes(name);
  return bytes > 0 ? megatron_chunk(name.substr(0, bytes - 1)).value_or(0) : 0;
}

/// Of several stages, the embedding and the head that is its copy.
bool is_shared(std::string_view name) {
  return name.ends_with(kMegatronEmbedding) || name.ends_with(kMegatronHead);
}

/// How large a bucket of the first stretch of layers shall be; nullopt: all of a buffer is one.
std::optional<uint64_t> bucket_size(std::span<const MegatronParameter> parameters,
                                    std::span<const uint64_t> elements, const MegatronDdp& ddp) {
  constexpr uint64_t kLeast = 40'000'000, kForEachRank = 1'000'000;
  const auto any = [&](std::string_view name) {
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const MegatronParameter& one) { return one.name.ends_with(name); });
  };
  const bool is_first_stage = ddp.stages == 1 || (any(kMegatronEmbedding) && !any(kMegatronHead));
  if (!ddp.overlaps || !is_first_stage) return std::nullopt;
  if (ddp.bucket_elements) return ddp.bucket_elements;
  if (!ddp.buckets) return std::max(kLeast, kForEachRank * ddp.data_parallel);
  uint64_t all = 0;
  for (const uint64_t count : elements) all += count;
  return all / std::max<uint64_t>(*ddp.buckets, 1);
}

/// Gives a buffer's parameters their offsets.
void place(MegatronBuffer& buffer, std::span<const MegatronParameter> parameters,
           std::span<const uint64_t> elements, bool tied, std::optional<uint64_t> size) {
  buffer.offsets.resize(buffer.parameters.size());
  uint64_t begin = 0, end = 0;  // of the bucket, and in it
  bool empty = true;
  for (size_t i = buffer.parameters.size(); i-- > 0;) {
    const uint32_t number = buffer.parameters[i];
    const bool own_bucket = tied && is_shared(parameters[number].name);
    end = (end + kAlignment - 1) / kAlignment * kAlignment;
    if (own_bucket && !empty) begin += std::exchange(end, 0);
    buffer.offsets[i] = begin + end;
    end += elements[number];
    empty = own_bucket || (size && end >= *size);
    if (empty) begin += std::exchange(end, 0);
  }
  buffer.elements = begin + end;
}

/// What an outline says beside the file's own bytes.
struct Description {
  std::vector<MegatronParameter> parameters;
  MegatronDdp ddp;
  std::vector<std::string> keys;       // "param", "exp_avg", "exp_avg_sq", as the file has them
  std::map<DType, std::string> types;  // of parameters: "torch.bfloat16,torch.float32"
  bool is_list = false;

  std::string text() const;
  /// Takes it off the beginning of `outline`; what is left is one of torch's.
  static Result<Description> take(std::string_view& outline);
};

json::value optional_number(const std::optional<uint64_t>& number) {
  return number ? json::value(*number) : json::value(nullptr);
}

std::string Description::text() const {
  json::array all, names;
  for (const MegatronParameter& one : parameters)
    all.push_back(json::array{one.name, dtype_name(one.dtype), to_array(one.shape)});
  for (const std::string& key : keys) names.push_back(json::value(key));
  json::object by_type;
  for (const auto& [dtype, type] : types) by_type[dtype_name(dtype)] = type;
  const std::string text =
      json::serialize(json::object{{"parameters", std::move(all)},
                                   {"keys", std::move(names)},
                                   {"types", std::move(by_type)},
                                   {"is_list", is_list},
                                   {"experts_apart", ddp.experts_apart},
                                   {"tied", ddp.tied},
                                   {"overlaps", ddp.overlaps},
                                   {"bucket_elements", optional_number(ddp.bucket_elements)},
                                   {"buckets", optional_number(ddp.buckets)},
                                   {"stages", ddp.stages},
                                   {"data_parallel", ddp.data_parallel}});
  const uint64_t length = text.size();
  std::string result(kBucketsMagic);
  return result.append(reinterpret_cast<const char*>(&length), sizeof length).append(text);
}

Result<Description> Description::take(std::string_view& outline) {
  const auto damaged = [] { return make_error(Code::kCorrupt, "its outline is damaged"); };
  uint64_t length = 0;
  if (!outline.starts_with(kBucketsMagic) || outline.size() < kBucketsMagic.size() + sizeof length)
    return damaged();
  outline.remove_prefix(kBucketsMagic.size());
  std::memcpy(&length, outline.data(), sizeof length);
  outline.remove_prefix(sizeof length);
  if (length > outline.size()) return damaged();
  PTC_TRY(const auto value, parse_json(outline.substr(0, length), {.max_bytes = size_t{1} << 30}));
  outline.remove_prefix(length);
  Description found;
  try {
    const json::object& object = value.as_object();
    for (const json::value& item : object.at("parameters").as_array()) {
      const json::array& one = item.as_array();
      PTC_TRY(const DType dtype, parse_dtype(std::string_view(one.at(1).as_string())));
      found.parameters.push_back({std::string(one.at(0).as_string()), dtype, dims_from(one.at(2))});
    }
    for (const json::value& key : object.at("keys").as_array())
      found.keys.emplace_back(key.as_string());
    for (const auto& [name, type] : object.at("types").as_object()) {
      PTC_TRY(const DType dtype, parse_dtype(name));
      found.types.emplace(dtype, type.as_string());
    }
    const auto number = [&](std::string_view key) -> std::optional<uint64_t> {
      if (object.at(key).is_null()) return std::nullopt;
      return object.at(key).to_number<uint64_t>();
    };
    found.is_list = object.at("is_list").as_bool();
    found.ddp.experts_apart = object.at("experts_apart").as_bool();
    found.ddp.tied = object.at("tied").as_bool();
    found.ddp.overlaps = object.at("overlaps").as_bool();
    found.ddp.bucket_elements = number("bucket_elements");
    found.ddp.buckets = number("buckets");
    found.ddp.stages = number("stages").value_or(1);
    found.ddp.data_parallel = number("data_parallel").value_or(1);
  } catch (const std::exception&) {
    return damaged();
  }
  return found;
}

/// The arrays of a buffer, as a file has them.
struct FoundBuffer {
  std::string types;
  std::vector<std::pair<std::string, uint32_t>> arrays;  // by key, numbers in the file
  std::optional<uint64_t> elements;
};

/// A file by its pickle alone.
struct FoundBuffers {
  std::map<std::pair<uint32_t, uint32_t>, FoundBuffer> buffers;  // by optimizer and number
  bool is_list = false;
  bool first_is_none = false;  // of a list

  static Result<FoundBuffers> find(const TorchFile& file);

 private:
  Result<> check_apart(const TorchFile& file) const;
};

/// What is laid out again has arrays of their own.
Result<> FoundBuffers::check_apart(const TorchFile& file) const {
  std::vector<const TorchTensor*> all;
  for (const auto& [where, buffer] : buffers)
    for (const auto& [key, array] : buffer.arrays)
      if (file.tensors()[array].bytes > 0) all.push_back(&file.tensors()[array]);
  std::sort(all.begin(), all.end(),
            [](const TorchTensor* a, const TorchTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < all.size(); ++i)
    if (all[i]->offset < all[i - 1]->offset + all[i - 1]->bytes)
      return invalid_argument("{} and {} share some of their bytes: save .clone() of one",
                              quoted(all[i - 1]->name), quoted(all[i]->name));
  return ok();
}

Result<FoundBuffers> FoundBuffers::find(const TorchFile& file) {
  FoundBuffers found;
  const auto strange = [&](std::string_view name) {
    return invalid_argument("what {} is in it is not known: {}", quoted(name), kAdvice);
  };
  for (const TorchOpaque& opaque : file.opaque()) return strange(opaque.name);
  for (const TorchPair& pair : file.pairs()) return strange(file.name(pair.place));
  std::map<uint32_t, bool> coalesced;  // by optimizer
  /// Takes the optimizer off the beginning; nullopt: it is in none.
  const auto take_optimizer = [&](std::vector<TorchStep>& path) -> std::optional<uint32_t> {
    if (path.empty() || path[0].kind != Kind::kListIndex)
      return found.is_list ? std::nullopt : std::optional<uint32_t>(0);
    if (path[0].number > 1) return std::nullopt;
    const auto optimizer = static_cast<uint32_t>(path[0].number);
    found.is_list = true;
    path.erase(path.begin());
    return optimizer;
  };
  /// The buffer of "0.<types>.param"; nullptr: it is of none.
  const auto buffer_of = [&](uint32_t optimizer, const std::vector<TorchStep>& path) {
    if (path.size() != 3 || path[0].kind != Kind::kNumberKey || path[0].number < 0 ||
        path[0].number > UINT16_MAX || path[1].kind != Kind::kTypesKey ||
        path[2].kind != Kind::kKey)
      return static_cast<FoundBuffer*>(nullptr);
    FoundBuffer& buffer = found.buffers[{optimizer, static_cast<uint32_t>(path[0].number)}];
    if (buffer.types.empty()) buffer.types = path[1].key;
    return buffer.types == path[1].key ? &buffer : nullptr;
  };
  /// Whether one more array of a buffer may be called that: names of tensors begin with it.
  const auto is_key = [](const FoundBuffer& buffer, const std::string& key) {
    return !key.empty() && key.find('.') == std::string::npos && key != kElements &&
           buffer.arrays.size() < kMostKeys &&
           std::none_of(buffer.arrays.begin(), buffer.arrays.end(),
                        [&](const auto& other) { return other.first == key; });
  };
  for (uint32_t i = 0; i < file.tensors().size(); ++i) {
    const TorchTensor& tensor = file.tensors()[i];
    std::vector<TorchStep> path = file.path(tensor.place);
    const auto optimizer = take_optimizer(path);
    FoundBuffer* const buffer = optimizer ? buffer_of(*optimizer, path) : nullptr;
    if (buffer == nullptr || !is_key(*buffer, path[2].key) || tensor.dtype != DType::kF32 ||
        tensor.shape.size() != 1 || !tensor.contiguous || tensor.sharding != TorchTensor::kNone)
      return strange(tensor.name);
    buffer->arrays.emplace_back(path[2].key, i);
  }
  for (const TorchLiteral& literal : file.literals()) {
    std::vector<TorchStep> path = file.path(literal.place);
    const Pickle& pickle = file.pickle();
    const auto optimizer = take_optimizer(path);
    if (optimizer && path.empty() && pickle.is(literal.node, PickleKind::kNone)) {
      found.first_is_none = found.first_is_none || (found.is_list && *optimizer == 0);
      continue;
    }
    if (optimizer && path.size() == 1 && path[0].key == kCoalesced) {
      coalesced[*optimizer] = pickle.is(literal.node, PickleKind::kTrue);
      continue;
    }
    FoundBuffer* const buffer = optimizer ? buffer_of(*optimizer, path) : nullptr;
    if (buffer == nullptr || path[2].key != kElements || !pickle.is(literal.node, PickleKind::kInt))
      return strange(file.name(literal.place));
    buffer->elements = static_cast<uint64_t>(pickle.integer(literal.node));
  }
  for (const auto& [where, buffer] : found.buffers)
    if (!coalesced[where.first])
      return invalid_argument(
          "it has its buckets one by one, as Megatron-LM kept them until February 2024: {}",
          kAdvice);
  PTC_TRY(found.check_apart(file));
  return found;
}

/// Where each parameter's state is in a file: by parameter and key, the number of its array and
/// the offset there in elements.
struct BufferedPlace {
  uint32_t array = kNoArray;  // it is in the file of the first expert rank alone
  uint64_t offset = 0;
};
struct PlacedState {
  Description description;
  std::vector<BufferedPlace> places;  // by parameter, then by key
};

/// Compares what a file has with the parameters that it should have.
Result<PlacedState> place_state(const TorchFile& file, std::vector<MegatronParameter> parameters,
                                const MegatronDdp& ddp) {
  PTC_TRY(const FoundBuffers found, FoundBuffers::find(file));
  PTC_TRY(const auto buffers, megatron_buffers(parameters, ddp));
  PlacedState state;
  state.description.is_list = found.is_list;
  if (found.buffers.empty()) return invalid_argument("it has no state of any parameter");
  for (const auto& [key, array] : found.buffers.begin()->second.arrays)
    state.description.keys.push_back(key);
  const size_t keys = state.description.keys.size();
  state.places.resize(parameters.size() * keys);
  const auto name_of = [&](const MegatronBuffer& buffer) {
    return found.is_list ? fmt::format("buffer {} of optimizer {}", buffer.number, buffer.optimizer)
                         : fmt::format("buffer {}", buffer.number);
  };
  size_t absent = 0;
  for (const MegatronBuffer& buffer : buffers) {
    if (found.first_is_none && ddp.experts_apart && buffer.optimizer == 0) {
      ++absent;
      continue;
    }
    const auto known = found.buffers.find({buffer.optimizer, buffer.number});
    if (known == found.buffers.end())
      return invalid_argument(
          "it has no {}, and by the model beside it and its args {} has {} parameters of type {}: "
          "{}",
          name_of(buffer), quoted(parameters[buffer.parameters.front()].name),
          buffer.parameters.size(), dtype_name(buffer.dtype), kAdvice);
    const FoundBuffer& here = known->second;
    const std::string type = fmt::format("torch.{}", torch_dtype_name(buffer.dtype));
    if (here.types.substr(0, here.types.find(',')) != type)
      return invalid_argument("{} is of {}, and by the model beside it of {}: {}", name_of(buffer),
                              here.types, type, kAdvice);
    state.description.types.try_emplace(buffer.dtype, here.types);
    for (size_t k = 0; k < keys; ++k) {
      const std::string& key = state.description.keys[k];
      const auto array = std::find_if(here.arrays.begin(), here.arrays.end(),
                                      [&](const auto& one) { return one.first == key; });
      if (array == here.arrays.end() || here.arrays.size() != keys)
        return invalid_argument("{} has other arrays than the first: {}", name_of(buffer), kAdvice);
      const uint64_t elements = file.tensors()[array->second].shape[0];
      if (elements != buffer.elements || here.elements.value_or(elements) != elements)
        return invalid_argument(
            "{} of {} has {} elements, and by the parameters of the model beside it, and the sizes "
            "of buckets that its args say, {}: whose the state is cannot be told; {}",
            quoted(key), name_of(buffer), elements, buffer.elements, kAdvice);
      for (size_t i = 0; i < buffer.parameters.size(); ++i)
        state.places[buffer.parameters[i] * keys + k] = {array->second, buffer.offsets[i]};
    }
  }
  if (buffers.size() - absent != found.buffers.size())
    return invalid_argument("it has {} buffers, and by the model beside it and its args {}: {}",
                            found.buffers.size(), buffers.size() - absent, kAdvice);
  state.description.parameters = std::move(parameters);
  state.description.ddp = ddp;
  return state;
}

/// All that an outline says.
struct ReadOutline {
  Literals literals;
  std::optional<TorchFile> file;
  PlacedState state;

  static Result<ReadOutline> of(const FileOutline& outline) {
    ReadOutline read;
    std::string_view text = outline.text;
    PTC_TRY(auto said, Description::take(text));
    PTC_TRY(read.literals, torch_literals({text, outline.file_bytes}));
    PTC_TRY(auto file, TorchFile::read(read_torch_literals(read.literals), outline.file_bytes));
    read.file.emplace(std::move(file));
    PTC_TRY(read.state, place_state(*read.file, std::move(said.parameters), said.ddp));
    return read;
  }
};

/// What is to be in a new file beside arrays, each a pickle of its own.
class Values {
 public:
  template <class Write>
  Result<> add(std::vector<TorchStep> path, Write write) {
    PickleWriter writer;
    write(writer);
    texts_.push_back(std::move(writer).finish());
    PTC_TRY(auto pickle, Pickle::parse(texts_.back()));
    pickles_.push_back(std::move(pickle));
    values.push_back({std::move(path), &pickles_.back(), pickles_.back().root()});
    return ok();
  }
  /// Its number among the values.
  size_t add_array(std::vector<TorchStep> path, uint64_t elements) {
    values.push_back({std::move(path)});
    values.back().dtype = DType::kF32;
    values.back().shape = Shape{elements};
    return values.size() - 1;
  }
  std::vector<TorchPathValue> values;

 private:
  std::deque<std::string> texts_;
  std::deque<Pickle> pickles_;
};

/// By kind of parameter the type that it has in the files that were written.
using ParameterTypes = std::unordered_map<std::string, DType>;

/// The parameters of which a new file has state, in the model's order, and by each and key the
/// number of its array.
struct NewState {
  std::vector<MegatronParameter> parameters;
  std::vector<uint32_t> arrays;
};

Result<NewState> new_state(std::span<const NewArray> arrays, const Description& first,
                           const ParameterTypes& types) {
  constexpr uint32_t kNone = UINT32_MAX;
  const size_t keys = first.keys.size();
  std::unordered_map<std::string_view, size_t> number;  // by parameter
  std::vector<std::string_view> names;
  std::vector<uint32_t> by_name;
  for (uint32_t i = 0; i < arrays.size(); ++i) {
    const std::string_view name = arrays[i].name;
    const size_t dot = std::min(name.find('.'), name.size() - 1);
    const auto key = std::find(first.keys.begin(), first.keys.end(), name.substr(0, dot));
    if (key == first.keys.end())
      return invalid_argument("{} is no state of a parameter", quoted(name));
    const std::string_view parameter = name.substr(dot + 1);
    const auto [known, is_new] = number.try_emplace(parameter, names.size());
    if (is_new) {
      names.push_back(parameter);
      by_name.resize(by_name.size() + keys, kNone);
    }
    by_name[known->second * keys + static_cast<size_t>(key - first.keys.begin())] = i;
  }
  // As the model beside it has them, whether that is like the writer's or made anew.
  std::vector<uint32_t> order;
  for (const MegatronParameter& one : first.parameters)
    if (const auto known = number.find(one.name); known != number.end())
      order.push_back(static_cast<uint32_t>(known->second));
  if (order.size() != names.size() || names.size() != first.parameters.size())
    order = megatron_order(names);
  NewState state;
  for (const uint32_t i : order) {
    const DType* const type = find_megatron_kind(types, names[i]);
    if (type == nullptr)
      return invalid_argument("no file that was written says of what type {} is", quoted(names[i]));
    for (size_t k = 0; k < keys; ++k) {
      const uint32_t array = by_name[i * keys + k], of_first = by_name[i * keys];
      if (array == kNone || of_first == kNone || *arrays[array].shape != *arrays[of_first].shape)
        return invalid_argument("{} is not all there, or not all of one shape",
                                quoted(state_name("*", names[i])));
      state.arrays.push_back(array);
    }
    state.parameters.push_back({std::string(names[i]), *type, *arrays[by_name[i * keys]].shape});
  }
  return state;
}

/// Those of a buffer that no file has: gradients are of one type, or each of its parameter's.
void add_types(std::map<DType, std::string>& types, DType dtype) {
  constexpr std::string_view kSummed = "torch.float32";
  std::string_view gradients = kSummed;
  const std::string own = fmt::format("torch.{}", torch_dtype_name(dtype));
  for (const auto& [other, text] : types)
    if (!text.ends_with(kSummed)) gradients = own;
  types.try_emplace(dtype, fmt::format("{},{}", own, gradients));
}

class BucketsFormat final : public FileFormat {
 public:
  Result<std::string> outline(const ReadAt&, uint64_t, std::optional<DType>) const override {
    return invalid_argument(
        "it has the state of the distributed optimizer in buckets, and there is no "
        "model_optim_rng.pt of Megatron-LM's beside it, which says what lies where");
  }

  Result<FileTensors> tensors(const FileOutline& outline, std::string_view,
                              std::optional<DType>) const override {
    FileTensors found;
    PTC_TRY(auto read, ReadOutline::of(outline));
    found.literals = std::move(read.literals);
    const PlacedState& state = read.state;
    const size_t keys = state.description.keys.size();
    for (size_t i = 0; i < state.places.size(); ++i) {
      const MegatronParameter& parameter = state.description.parameters[i / keys];
      PTC_TRY(const uint64_t elements, num_elements(parameter.shape));
      const BufferedPlace& place = state.places[i];
      if (place.array == kNoArray) continue;
      found.tensors.push_back(
          {state_name(state.description.keys[i % keys], parameter.name), DType::kF32,
           parameter.shape, read.file->tensors()[place.array].offset + place.offset * kElementBytes,
           elements * kElementBytes});
    }
    found.of_megatron_stage = true;
    return found;
  }

  Result<FileLayout> lay_out(std::span<const NewArray> arrays, std::span<const FileOutline> like,
                             std::span<const NewArgument> arguments) const override {
    if (like.empty())
      return make_error(Code::kInternal, "there is no file that buckets could be like");
    std::optional<Description> first;
    ParameterTypes kinds;
    std::map<DType, std::string> types;
    for (const FileOutline& outline : like) {
      PTC_TRY(auto read, ReadOutline::of(outline));
      Description& said = read.state.description;
      for (const MegatronParameter& one : said.parameters)
        kinds.try_emplace(megatron_kind(one.name), one.dtype);
      for (const auto& [dtype, type] : said.types) types.try_emplace(dtype, type);
      if (!first) first = std::move(said);
    }
    MegatronDdp ddp = first->ddp;
    for (const NewArgument& argument : arguments) {
      if (argument.name == "pipeline_model_parallel_size")
        ddp.stages = static_cast<uint64_t>(argument.value.value_or(1));
      if (argument.name == kDataParallelArgument)
        ddp.data_parallel = static_cast<uint64_t>(argument.value.value_or(1));
    }
    PTC_TRY(const auto state, new_state(arrays, *first, kinds));
    PTC_TRY(const auto buffers, megatron_buffers(state.parameters, ddp));
    for (const MegatronBuffer& buffer : buffers) add_types(types, buffer.dtype);
    return compose(*first, types, state, buffers);
  }

 private:
  static Result<FileLayout> compose(const Description& like,
                                    const std::map<DType, std::string>& types,
                                    const NewState& state,
                                    const std::vector<MegatronBuffer>& buffers) {
    const size_t keys = like.keys.size();
    // Experts that are apart in the writer's file may be none on this rank, and the other way
    // round.
    const bool is_list = std::any_of(buffers.begin(), buffers.end(),
                                     [](const auto& buffer) { return buffer.optimizer > 0; });
    Values made;
    struct Array {
      size_t value;
      uint64_t offset;
    };
    std::vector<Array> place_of(state.arrays.size());  // by array
    for (uint32_t optimizer = 0; optimizer < (is_list ? 2u : 1u); ++optimizer) {
      std::vector<TorchStep> top;
      if (is_list) top.push_back({Kind::kListIndex, {}, optimizer});
      const auto below = [&](std::initializer_list<TorchStep> steps) {
        std::vector<TorchStep> path = top;
        path.insert(path.end(), steps);
        return path;
      };
      const auto key_step = [](std::string_view key) {
        return TorchStep{Kind::kKey, std::string(key), 0};
      };
      if (std::none_of(buffers.begin(), buffers.end(),
                       [&](const auto& buffer) { return buffer.optimizer == optimizer; })) {
        PTC_TRY(made.add(top, [](PickleWriter& writer) { writer.none(); }));
        continue;
      }
      PTC_TRY(made.add(below({key_step(kCoalesced)}),
                       [](PickleWriter& writer) { writer.boolean(true); }));
      for (const MegatronBuffer& buffer : buffers) {
        if (buffer.optimizer != optimizer) continue;
        const TorchStep number{Kind::kNumberKey, {}, buffer.number},
            type{Kind::kTypesKey, types.at(buffer.dtype), 0};
        for (size_t k = 0; k < keys; ++k) {
          const size_t value =
              made.add_array(below({number, type, key_step(like.keys[k])}), buffer.elements);
          for (size_t i = 0; i < buffer.parameters.size(); ++i)
            place_of[state.arrays[buffer.parameters[i] * keys + k]] = {value, buffer.offsets[i]};
        }
        PTC_TRY(made.add(below({number, type, key_step(kElements)}), [&](PickleWriter& writer) {
          writer.integer(static_cast<int64_t>(buffer.elements));
        }));
      }
    }
    PTC_TRY(auto layout, compose_torch_file(made.values));
    std::vector<uint64_t> offsets(place_of.size());
    for (size_t i = 0; i < place_of.size(); ++i)
      offsets[i] = layout.tensors[place_of[i].value].offset + place_of[i].offset * kElementBytes;
    return finish_torch_layout(std::move(layout), std::move(offsets), {});
  }
};

}  // namespace

bool is_megatron_buckets(std::string_view path) {
  return path.substr(path.rfind('/') + 1) == kMegatronBuckets;
}

MegatronDdp MegatronDdp::of(const MegatronFile& megatron) {
  const auto positive = [&](std::string_view name) -> std::optional<uint64_t> {
    const auto value = megatron.argument(name);
    return value && *value > 0 ? std::optional(static_cast<uint64_t>(*value)) : std::nullopt;
  };
  MegatronDdp ddp;
  ddp.experts_apart = megatron.size("expert_model_parallel_size") > 1;
  ddp.tied = !megatron.flag("untie_embeddings_and_output_weights");
  ddp.overlaps = megatron.flag("overlap_grad_reduce");
  ddp.bucket_elements = positive("ddp_bucket_size");
  ddp.buckets = positive("ddp_num_buckets");
  ddp.stages = positive("pipeline_model_parallel_size").value_or(1);
  ddp.data_parallel = positive("data_parallel_size").value_or(1) *
                      std::min<uint64_t>(positive("context_parallel_size").value_or(1), 1 << 20);
  return ddp;
}

Result<std::vector<MegatronBuffer>> megatron_buffers(std::span<const MegatronParameter> parameters,
                                                     const MegatronDdp& ddp) {
  std::vector<uint64_t> elements;
  uint64_t sum = 0;
  for (const MegatronParameter& one : parameters) {
    PTC_TRY(const uint64_t count, num_elements(one.shape));
    elements.push_back(count);
    if (__builtin_add_overflow(sum, count, &sum) || sum > kMostElements)
      return invalid_argument("its parameters have more than 2^62 elements");
  }
  // By optimizer and stretch of layers; of these by type, in the order of the first of each.
  std::map<std::pair<uint32_t, uint32_t>, std::vector<MegatronBuffer>> by_chunk;
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    const MegatronParameter& one = parameters[i];
    const uint32_t optimizer = ddp.experts_apart && is_megatron_expert(one.name) ? 1 : 0;
    std::vector<MegatronBuffer>& of_chunk = by_chunk[{optimizer, chunk_of(one.name)}];
    auto buffer = std::find_if(of_chunk.begin(), of_chunk.end(),
                               [&](const auto& other) { return other.dtype == one.dtype; });
    if (buffer == of_chunk.end()) {
      of_chunk.push_back({optimizer, 0, one.dtype, {}, {}, 0});
      buffer = of_chunk.end() - 1;
    }
    buffer->parameters.push_back(i);
  }
  const std::optional<uint64_t> size = bucket_size(parameters, elements, ddp);
  std::vector<MegatronBuffer> buffers;
  std::map<uint32_t, uint32_t> next;  // number by optimizer
  for (auto& [where, of_chunk] : by_chunk)
    for (MegatronBuffer& buffer : of_chunk) {
      buffer.number = next[buffer.optimizer]++;
      place(buffer, parameters, elements, ddp.tied && ddp.stages > 1,
            where.second == 0 ? size : std::nullopt);
      buffers.push_back(std::move(buffer));
    }
  return buffers;
}

Result<std::string> megatron_buckets_outline(const ReadAt& read, uint64_t file_bytes,
                                             std::vector<MegatronParameter> parameters,
                                             const MegatronDdp& ddp) {
  PTC_TRY(const auto file, TorchFile::read(read, file_bytes));
  PTC_TRY(const auto state, place_state(file, std::move(parameters), ddp));
  const size_t keys = state.description.keys.size();
  std::vector<TorchOutlineRange> arrays;
  for (size_t i = 0; i < state.places.size(); ++i) {
    PTC_TRY(const uint64_t elements, num_elements(state.description.parameters[i / keys].shape));
    const BufferedPlace& place = state.places[i];
    if (place.array == kNoArray) continue;
    const uint64_t begin = file.tensors()[place.array].offset + place.offset * kElementBytes;
    if (elements > 0) arrays.push_back({begin, begin + elements * kElementBytes});
  }
  PTC_TRY(const auto outline, read_torch_outline(read, file_bytes, std::move(arrays)));
  return state.description.text() + outline;
}

Result<std::vector<TensorEntry>> megatron_buckets_absent(const FileOutline& outline) {
  PTC_TRY(const auto read, ReadOutline::of(outline));
  const Description& said = read.state.description;
  std::vector<TensorEntry> absent;
  for (size_t i = 0; i < read.state.places.size(); ++i) {
    if (read.state.places[i].array != kNoArray) continue;
    const MegatronParameter& parameter = said.parameters[i / said.keys.size()];
    absent.push_back({state_name(said.keys[i % said.keys.size()], parameter.name), DType::kF32,
                      parameter.shape});
  }
  return absent;
}

const FileFormat& megatron_buckets_format() {
  static const BucketsFormat format;
  return format;
}

}  // namespace ptc
