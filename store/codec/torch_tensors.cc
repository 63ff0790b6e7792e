#include <algorithm>

#include "store/base/json.h"
#include "store/codec/torch_file_reader.h"

namespace ptc {
namespace {

struct NamedType {
  std::string_view name, storage;
  DType dtype;
};
constexpr NamedType kTorchTypes[] = {
    {"float32", "FloatStorage", DType::kF32},
    {"bfloat16", "BFloat16Storage", DType::kBF16},
    {"float16", "HalfStorage", DType::kF16},
    {"float64", "DoubleStorage", DType::kF64},
    {"int64", "LongStorage", DType::kI64},
    {"int32", "IntStorage", DType::kI32},
    {"int16", "ShortStorage", DType::kI16},
    {"int8", "CharStorage", DType::kI8},
    {"uint8", "ByteStorage", DType::kU8},
    {"bool", "BoolStorage", DType::kBool},
    {"complex64", "ComplexFloatStorage", DType::kC64},
    {"uint16", {}, DType::kU16},
    {"uint32", {}, DType::kU32},
    {"uint64", {}, DType::kU64},
    {"float8_e4m3fn", {}, DType::kF8E4M3},
    {"float8_e5m2", {}, DType::kF8E5M2},
    {"float8_e8m0fnu", {}, DType::kF8E8M0},
    {"float8_e4m3fnuz", {}, DType::kF8E4M3Fnuz},
    {"float8_e5m2fnuz", {}, DType::kF8E5M2Fnuz},
};

}  // namespace

TorchCallable torch_callable(const Pickle& pickle, PickleId id) {
  using Callable = TorchCallable;
  if (!pickle.is(id, PickleKind::kGlobal)) return Callable::kOther;
  const std::string_view module = pickle.module(id), name = pickle.name(id);
  if (module == "torch._utils") {
    if (name == "_rebuild_tensor_v2") return Callable::kTensorV2;
    if (name == "_rebuild_tensor_v3") return Callable::kTensorV3;
    if (name == "_rebuild_tensor") return Callable::kTensor;
    if (name == "_rebuild_parameter") return Callable::kParameter;
    if (name == "_rebuild_parameter_with_state") return Callable::kParameterWithState;
    if (name == "_rebuild_wrapper_subclass") return Callable::kWrapper;
    if (name.starts_with("_rebuild_")) return Callable::kRebuilt;
  } else if (module == "torch._tensor" && name == "_rebuild_from_type_v2") {
    return Callable::kFromType;
  } else if (module == "collections" &&
             (name == "OrderedDict" || name == "defaultdict" || name == "Counter")) {
    return Callable::kMapping;
  }
  return Callable::kOther;
}

std::optional<uint64_t> torch_count(const Pickle& pickle, PickleId id) {
  if (!pickle.is(id, PickleKind::kInt) || pickle.integer(id) < 0) return {};
  return static_cast<uint64_t>(pickle.integer(id));
}

std::optional<DType> torch_dtype(const Pickle& pickle, PickleId id) {
  if (!pickle.is(id, PickleKind::kGlobal) || pickle.module(id) != "torch") return {};
  const std::string_view name = pickle.name(id);
  for (const NamedType& type : kTorchTypes)
    if (type.name == name) return type.dtype;
  return {};
}

std::optional<std::string> torch_dtypes_text(const Pickle& pickle, PickleId id) {
  constexpr size_t kMost = 4;
  if (!pickle.is(id, PickleKind::kTuple) || pickle.tuple_size(id) == 0 ||
      pickle.tuple_size(id) > kMost)
    return {};
  std::string text;
  for (size_t i = 0; i < pickle.tuple_size(id); ++i) {
    const PickleId type = pickle.element(id, i);
    if (!torch_dtype(pickle, type)) return {};
    text.append(i == 0 ? "" : ",").append("torch.").append(pickle.name(type));
  }
  return text;
}

std::optional<DType> torch_storage_dtype(const Pickle& pickle, PickleId id) {
  if (!pickle.is(id, PickleKind::kGlobal) || pickle.module(id) != "torch") return {};
  const std::string_view name = pickle.name(id);
  for (const NamedType& type : kTorchTypes)
    if (!type.storage.empty() && type.storage == name) return type.dtype;
  return {};
}

Result<std::optional<Dims>> torch_dims(const Pickle& pickle, PickleId id) {
  if (pickle.is(id, PickleKind::kObject) && pickle.is_global(pickle.called(id), "torch", "Size")) {
    const PickleId arguments = pickle.arguments(id);
    if (!pickle.is(arguments, PickleKind::kTuple) || pickle.tuple_size(arguments) > 1)
      return std::optional<Dims>();
    if (pickle.tuple_size(arguments) == 0) return std::optional(Dims());
    id = pickle.element(arguments, 0);
  }
  Dims dims;
  if (pickle.is(id, PickleKind::kTuple)) {
    if (pickle.tuple_size(id) > kMaxAxes)
      return invalid_argument("it has {} axes; at most {} are supported", pickle.tuple_size(id),
                              kMaxAxes);
    for (size_t i = 0; i < pickle.tuple_size(id); ++i) {
      const auto count = torch_count(pickle, pickle.element(id, i));
      if (!count) return std::optional<Dims>();
      dims.push_back(*count);
    }
    return std::optional(dims);
  }
  if (!pickle.is(id, PickleKind::kList)) return std::optional<Dims>();
  bool numbers = true;
  auto taken = pickle.for_items(id, [&](PickleId item) -> Result<> {
    const auto count = torch_count(pickle, item);
    if (!count) return numbers = false, invalid_argument("no number");
    if (dims.size() == kMaxAxes)
      return invalid_argument("it has more than {} axes, which are not supported", kMaxAxes);
    dims.push_back(*count);
    return ok();
  });
  if (!numbers) return std::optional<Dims>();
  if (!taken) return std::move(taken).error();
  return std::optional(dims);
}

std::string_view torch_dtype_name(DType dtype) {
  for (const NamedType& type : kTorchTypes)
    if (type.dtype == dtype) return type.name;
  return {};
}

std::string_view torch_storage_name(DType dtype) {
  for (const NamedType& type : kTorchTypes)
    if (type.dtype == dtype) return type.storage;
  return {};
}

Error TorchFileReader::tensor_error(Error error) const {
  return std::move(error).with_context(fmt::format("tensor {}", quoted(name_)));
}

Result<> TorchFileReader::add_tensor(PickleId id, Callable function, PickleId arguments,
                                     uint32_t place) {
  TorchTensor tensor;
  std::string unknown;
  auto read = read_tensor(function, arguments, tensor, unknown);
  if (!read) return tensor_error(std::move(read).error());
  if (!unknown.empty()) return add_opaque(id, place, std::move(unknown));
  tensor.place = place;
  tensor.node = tensor.outer = id;
  tensor.arguments = arguments;
  tensor.name = name_;
  PTC_TRY(charge(3 * sizeof(TorchTensor) + name_.size() + 80));
  file_.tensors_.push_back(std::move(tensor));
  return ok();
}

Result<> TorchFileReader::read_tensor(Callable function, PickleId arguments, TorchTensor& tensor,
                                      std::string& unknown) {
  const auto damaged = [] {
    return invalid_argument("what should rebuild it is not as torch writes it");
  };
  const size_t count = pickle_->is(arguments, Kind::kTuple) ? pickle_->tuple_size(arguments) : 0;
  const size_t least = function == Callable::kTensor ? 4 : function == Callable::kTensorV2 ? 6 : 7;
  if (count < least || count > least + 1) return damaged();
  auto argument = [&](size_t i) { return pickle_->element(arguments, i); };
  const auto offset = torch_count(*pickle_, argument(1));
  PTC_TRY(auto shape, torch_dims(*pickle_, argument(2)));
  PTC_TRY(auto strides, torch_dims(*pickle_, argument(3)));
  if (!offset || !shape || !strides || strides->size() != shape->size()) return damaged();
  tensor.storage_offset = *offset;
  tensor.shape = *shape;
  tensor.strides = *strides;
  if (count > least) {  // flags of torch's own: what is lazily conjugated or negated
    const PickleId flags = argument(least);
    bool set = !pickle_->is(flags, Kind::kDict) && !pickle_->is(flags, Kind::kNone);
    PTC_TRY(walk_->for_pairs(flags, [&](PickleId, PickleId value) -> Result<> {
      set = set || !pickle_->is(value, Kind::kFalse);
      return ok();
    }));
    if (set)
      return unknown =
                 "its bytes are not its values: it is a lazy conjugate or negative "
                 "(resolve_conj, resolve_neg)",
             ok();
  }

  std::optional<DType> dtype;
  PTC_TRY(tensor.storage, storage(argument(0), dtype, unknown));
  if (!unknown.empty()) return ok();
  if (function == Callable::kTensorV3) {
    const PickleId type = argument(6);
    if (type != last_dtype_) last_dtype_ = type, last_known_dtype_ = torch_dtype(*pickle_, type);
    dtype = last_known_dtype_;
    if (!dtype)
      return unknown = fmt::format("its type is not supported: {}", pickle_->describe(type)), ok();
  }
  if (!dtype) return damaged();
  tensor.dtype = *dtype;
  return place_tensor(tensor);
}

Result<> TorchFileReader::place_tensor(TorchTensor& tensor) {
  const TorchStorage& storage = file_.storages_[tensor.storage];
  const uint64_t item = dtype_bits(tensor.dtype) / 8;
  PTC_TRY(auto elements, num_elements(tensor.shape));
  tensor.contiguous = true;
  uint64_t expected = 1, last = tensor.storage_offset;
  bool overflow = false;
  for (size_t axis = tensor.shape.size(); axis-- > 0 && elements > 0;) {
    const uint64_t n = tensor.shape[axis], stride = tensor.strides[axis];
    if (n > 1 && stride != expected) tensor.contiguous = false;
    expected *= n;
    uint64_t reach = 0;
    overflow = overflow || __builtin_mul_overflow(n - 1, stride, &reach) ||
               __builtin_add_overflow(last, reach, &last);
  }
  const uint64_t items = storage.bytes / item;
  if (elements == 0) {
    tensor.offset = storage.offset;
    return ok();
  }
  if (overflow || last >= items)
    return invalid_argument(
        "its elements, {} with strides {} from {} on, do not lie in its storage {} of {} bytes",
        tensor.shape.to_string(), tensor.strides.to_string(), tensor.storage_offset,
        quoted(storage.key), storage.bytes);
  tensor.offset = storage.offset + tensor.storage_offset * item;
  tensor.bytes = (last + 1 - tensor.storage_offset) * item;
  return ok();
}

Result<uint32_t> TorchFileReader::storage(PickleId persistent, std::optional<DType>& dtype,
                                          std::string& unknown) {
  const auto damaged = [] { return invalid_argument("its storage is not named as torch does"); };
  if (!pickle_->is(persistent, Kind::kPersistent)) return damaged();
  const PickleId id = pickle_->arguments(persistent);
  if (!pickle_->is(id, Kind::kTuple) || pickle_->tuple_size(id) != 5) return damaged();
  const PickleId what = pickle_->element(id, 0), type = pickle_->element(id, 1),
                 key_id = pickle_->element(id, 2);
  const auto count = torch_count(*pickle_, pickle_->element(id, 4));
  if (!pickle_->is(what, Kind::kText) || pickle_->text(what) != "storage" ||
      !pickle_->is(key_id, Kind::kText) || !count)
    return damaged();
  uint64_t bytes = *count, item = 1;
  if (type != last_storage_type_) {
    last_storage_type_ = type;
    last_storage_dtype_ = torch_storage_dtype(*pickle_, type);
    untyped_ = pickle_->is_global(type, "torch.storage", "UntypedStorage") ||
               pickle_->is_global(type, "torch", "UntypedStorage");
  }
  if (!untyped_) {
    dtype = last_storage_dtype_;
    if (!dtype)
      return unknown = fmt::format("the type of its storage is not supported: {}",
                                   pickle_->describe(type)),
             0;
    item = dtype_bits(*dtype) / 8;
    if (__builtin_mul_overflow(bytes, item, &bytes)) return damaged();
  }
  const std::string_view key = pickle_->text(key_id);
  PTC_TRY(walk_->count_text(key));
  auto [found, is_new] = by_key_.try_emplace(key, static_cast<uint32_t>(file_.storages_.size()));
  if (is_new) {
    PTC_TRY(charge(3 * sizeof(TorchStorage) + 80));
    const size_t length = member_.size();
    const ZipMember* member = file_.directory_->find(member_.append(key));
    member_.resize(length);
    if (member == nullptr)
      return invalid_argument("its storage {} is not in the zip archive", quoted(key));
    if (!member->stored())
      return invalid_argument("its storage {} is {}", quoted(key), zip_method_text(member->method));
    file_.storages_.push_back({key, member->data_offset, member->bytes});
  }
  const TorchStorage& storage = file_.storages_[found->second];
  // Less than an item may be left over: of a storage that was made for smaller ones.
  if (storage.bytes < bytes || storage.bytes - bytes >= item)
    return invalid_argument("its storage {} should have {} bytes, but the zip archive has {} of it",
                            quoted(key), bytes, storage.bytes);
  return found->second;
}
}  // namespace ptc
