#include "store/codec/torch_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <unordered_set>

#include "store/base/json.h"
#include "store/base/utf8.h"
#include "store/codec/pickle_walk.h"

namespace ptc {

/// What is known of a global that a pickle would call.
enum class TorchCallable : uint8_t {
  kOther,
  kTensor,
  kTensorV2,
  kTensorV3,
  kParameter,
  kParameterWithState,
  kFromType,
  kWrapper,
  kRebuilt,  // a tensor of another kind
  kMapping
};

namespace {

using Callable = TorchCallable;

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

constexpr std::string_view kOldMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
                                     14);
constexpr std::string_view kSaveAgain = "load it and torch.save it again";

Callable callable(const Pickle& pickle, PickleId id) {
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

std::optional<uint64_t> count_of(const Pickle& pickle, PickleId id) {
  if (!pickle.is(id, PickleKind::kInt) || pickle.integer(id) < 0) return {};
  return static_cast<uint64_t>(pickle.integer(id));
}

std::span<std::byte> writable(std::vector<char>& text) {
  return std::as_writable_bytes(std::span(text));
}

}  // namespace

std::optional<DType> torch_dtype(const Pickle& pickle, PickleId id) {
  if (!pickle.is(id, PickleKind::kGlobal) || pickle.module(id) != "torch") return {};
  const std::string_view name = pickle.name(id);
  for (const NamedType& type : kTorchTypes)
    if (type.name == name) return type.dtype;
  return {};
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
      const auto count = count_of(pickle, pickle.element(id, i));
      if (!count) return std::optional<Dims>();
      dims.push_back(*count);
    }
    return std::optional(dims);
  }
  if (!pickle.is(id, PickleKind::kList)) return std::optional<Dims>();
  bool numbers = true;
  auto taken = pickle.for_items(id, [&](PickleId item) -> Result<> {
    const auto count = count_of(pickle, item);
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

class TorchFileReader {
 public:
  TorchFileReader(const ReadAt& read, uint64_t file_bytes) : read_(read), file_bytes_(file_bytes) {}

  Result<TorchFile> run() {
    PTC_TRY(check_beginning());
    PTC_TRY(auto directory, ZipDirectory::read(read_, file_bytes_));
    file_.directory_ = std::make_unique<ZipDirectory>(std::move(directory));
    PTC_TRY(read_members());
    PTC_TRY(auto pickle, Pickle::parse(file_.pickle_bytes()));
    file_.pickle_ = std::make_unique<Pickle>(std::move(pickle));
    pickle_ = file_.pickle_.get();
    const uint64_t bytes = file_.pickle_bytes().size(), taken = pickle_->memory_bytes();
    budget_ = (bytes * 28 > taken ? bytes * 28 - taken : 0) + (1 << 20);
    walk_.emplace(*pickle_);
    file_.places_.push_back({0, 0, TorchStep::Kind::kKey});
    PTC_TRY(visit(pickle_->root(), 0, 0));
    PTC_TRY(check_names());
    return std::move(file_);
  }

 private:
  using Kind = PickleKind;

  Result<> check_beginning() {
    std::vector<char> beginning(std::min<uint64_t>(file_bytes_, 512));
    PTC_TRY(read_(0, writable(beginning)));
    const std::string_view text(beginning.data(), beginning.size());
    if (text.starts_with("PK\3\4")) return ok();
    if (text.starts_with(kOldMagic))
      return invalid_argument(
          "it has the form that torch.save wrote before torch 1.6 (or still, with "
          "_use_new_zipfile_serialization=False), in which tensors have no places: {}",
          kSaveAgain);
    if (text.size() > 262 && text.substr(257, 5) == "ustar")
      return invalid_argument("it is a tar, as torch.save wrote before torch 0.1.10: {}",
                              kSaveAgain);
    if (text.starts_with('\x80'))
      return invalid_argument("it is a plain pickle, and has no tensors by offsets: {}",
                              kSaveAgain);
    return invalid_argument("it is no zip archive, as torch.save writes it");
  }

  Result<std::vector<char>> content(const ZipMember& member, uint64_t most) {
    if (!member.stored())
      return invalid_argument("zip member {} is {}; torch stores members as they are",
                              quoted(member.name), zip_method_text(member.method));
    if (member.bytes > most)
      return invalid_argument("zip member {} has {} bytes; at most {} are read",
                              quoted(member.name), member.bytes, most);
    std::vector<char> bytes(member.bytes);
    PTC_TRY(read_(member.data_offset, writable(bytes)));
    return bytes;
  }

  Result<> read_members() {
    constexpr std::string_view kPickle = "/data.pkl";
    const ZipMember* found = nullptr;
    for (const ZipMember& member : file_.directory_->members()) {
      if (!member.name.ends_with(kPickle) ||
          member.name.find('/') != member.name.size() - kPickle.size())
        continue;
      if (found != nullptr)
        return invalid_argument("the zip archive has both {} and {}", quoted(found->name),
                                quoted(member.name));
      found = &member;
    }
    if (found == nullptr)
      return invalid_argument(
          "the zip archive has no data.pkl in a directory: torch.save did not write it");
    file_.root_ = found->name.substr(0, found->name.size() - kPickle.size());
    member_ = std::string(file_.root_) + "/";
    if (file_.directory_->find(member_ + "constants.pkl") != nullptr)
      return invalid_argument(
          "it is a TorchScript program (torch.jit.save), not a state that torch.save wrote");
    if (const ZipMember* order = file_.directory_->find(member_ + "byteorder")) {
      PTC_TRY(auto text, content(*order, 64));
      if (const std::string_view byte_order(text.data(), text.size()); byte_order != "little")
        return invalid_argument("its bytes are in the order {}; only little-endian files are read",
                                quoted(byte_order));
    }
    PTC_TRY(auto bytes, content(*found, INT32_MAX));
    file_.bytes_ = std::make_unique<std::vector<char>>(std::move(bytes));
    member_ += "data/";
    return ok();
  }

  Result<> charge(uint64_t bytes) {
    if (bytes > budget_)
      return invalid_argument(
          "the names of the values in it take more memory than a pickle of {} bytes may: it uses "
          "few "
          "values very often",
          file_.pickle_bytes().size());
    budget_ -= bytes;
    return ok();
  }
  /// One more in a deque, with its share of the deque's own.
  template <class T>
  Result<> charge_one() {
    return charge(sizeof(T) + sizeof(T) / 8 + 1);
  }

  /// The value under a key of a state: of a dict, or of one of a pair of dicts (plain attributes
  /// and slots).
  Result<std::optional<PickleId>> state_value(PickleId state, std::string_view key) {
    PTC_TRY(auto found, walk_->value(state, key));
    if (!pickle_->is(state, Kind::kTuple) || pickle_->tuple_size(state) != 2) return found;
    for (size_t i = 0; i < 2; ++i) {
      PTC_TRY(auto value, walk_->value(pickle_->element(state, i), key));
      if (value) found = value;
    }
    return found;
  }
  Result<std::optional<PickleId>> attribute(std::optional<PickleId> object, std::string_view key) {
    std::optional<PickleId> found;
    if (!object || !pickle_->is(*object, Kind::kObject)) return found;
    PTC_TRY(walk_->for_states(*object, [&](PickleId state) -> Result<> {
      PTC_TRY(auto value, state_value(state, key));
      if (value) found = value;
      return ok();
    }));
    return found;
  }

  /// Whole numbers of a list or tuple, also of tuples in it; false: there is something else.
  Result<bool> take_numbers(PickleId id, std::vector<uint64_t>& out, int depth = 3) {
    if (const auto number = count_of(*pickle_, id)) {
      PTC_TRY(charge(3 * sizeof(uint64_t)));
      out.push_back(*number);
      return true;
    }
    if (depth == 0 || (!pickle_->is(id, Kind::kTuple) && !pickle_->is(id, Kind::kList)))
      return false;
    bool numbers = true;
    PTC_TRY(walk_->for_items(id, [&](PickleId item) -> Result<> {
      if (!numbers) return ok();
      PTC_TRY(numbers, take_numbers(item, out, depth - 1));
      return ok();
    }));
    return numbers;
  }

  Result<uint32_t> place(uint32_t parent, uint32_t key, TorchStep::Kind kind) {
    PTC_TRY(charge_one<TorchFile::Place>());
    file_.places_.push_back({parent, key, kind});
    return static_cast<uint32_t>(file_.places_.size() - 1);
  }

  /// Whether there is a storage in a value, or in what it leads to; or a tensor that has none (of
  /// device meta, or made of an array).
  Result<bool> holds_storage(PickleId id) {
    if (is_leaf(id)) return false;
    if (clean_.empty()) clean_.resize(pickle_->size());
    if (clean_[id]) return false;
    seen_.assign(1, id);
    clean_[id] = true;
    bool found = false;
    for (size_t next = 0; next < seen_.size() && !found; ++next) {
      const PickleId at = seen_[next];
      PTC_TRY(walk_->count());
      auto look = [&](PickleId value) -> Result<> {
        if (pickle_->is(value, Kind::kPersistent)) {
          found = true;
        } else if (!is_leaf(value) && !clean_[value]) {
          clean_[value] = true;
          seen_.push_back(value);
        }
        return walk_->count();
      };
      if (pickle_->is(at, Kind::kPersistent)) {
        found = true;
      } else if (pickle_->is(at, Kind::kTuple) || pickle_->is(at, Kind::kFrozenSet)) {
        for (size_t i = 0; i < pickle_->tuple_size(at); ++i) {
          PTC_TRY(look(pickle_->element(at, i)));
        }
      } else {
        if (pickle_->is(at, Kind::kObject)) {
          found = called(at) == Callable::kRebuilt;
          PTC_TRY(look(pickle_->called(at)));
          PTC_TRY(look(pickle_->arguments(at)));
        }
        for (Pickle::Changes changes = pickle_->changes(at); changes.more(); changes.next()) {
          for (uint32_t i = 0; i < (*changes).count; ++i) {
            PTC_TRY(look(pickle_->value((*changes).first + i)));
          }
        }
      }
    }
    if (found)  // what was seen before is not known to be clean
      for (const PickleId seen : seen_) clean_[seen] = false;
    return found;
  }
  bool is_leaf(PickleId id) const {
    switch (pickle_->kind(id)) {
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
      case Kind::kSet:
      case Kind::kFrozenSet:
      case Kind::kObject:
      case Kind::kPersistent:
        return false;
      default:
        return true;
    }
  }
  Callable called(PickleId object) {
    const PickleId id = pickle_->called(object);
    if (id != last_called_) last_called_ = id, last_callable_ = callable(*pickle_, id);
    return last_callable_;
  }
  bool is_mapping(PickleId id) {
    return pickle_->is(id, Kind::kDict) ||
           (pickle_->is(id, Kind::kObject) && called(id) == Callable::kMapping);
  }

  Result<> visit(PickleId id, uint32_t place, size_t depth) {
    PTC_TRY(walk_->count());
    switch (pickle_->kind(id)) {
      case Kind::kDict:
        return visit_pairs(id, place, depth);
      case Kind::kTuple:
      case Kind::kList:
        return visit_items(id, place, depth);
      case Kind::kObject:
        return visit_object(id, place, depth);
      case Kind::kPersistent:
        return add_opaque(id, place, "it is a storage without a tensor");
      case Kind::kSet:
      case Kind::kFrozenSet:
        break;
      default:
        return add_literal(id, place);
    }
    PTC_TRY(auto holds, holds_storage(id));
    return holds ? add_opaque(id, place, "tensors in a set have no names") : add_literal(id, place);
  }

  Result<> too_deep() {
    return invalid_argument("value {}: it is nested deeper than {}", quoted(name_),
                            TorchFile::kMaxDepth);
  }

  Result<> visit_pairs(PickleId id, uint32_t parent, size_t depth) {
    if (depth == TorchFile::kMaxDepth) {
      PTC_TRY(auto holds, holds_storage(id));
      return holds ? too_deep() : add_literal(id, parent);
    }
    bool empty = true;
    PTC_TRY(walk_->for_pairs(id, [&](PickleId key, PickleId value) -> Result<> {
      empty = false;
      const size_t length = name_.size();
      const bool text = pickle_->is(key, Kind::kText);
      if (text) {
        PTC_TRY(walk_->count_text(pickle_->text(key)));
        append_torch_name(name_, pickle_->text(key));
      } else if (pickle_->is(key, Kind::kInt)) {
        append_torch_name(name_, fmt::format_int(pickle_->integer(key)).c_str());
      } else {
        PTC_TRY(auto in_key, holds_storage(key));
        PTC_TRY(auto in_value, holds_storage(value));
        if (in_key || in_value) {
          PTC_TRY(add_opaque(value, parent,
                             fmt::format("its key, {}, is neither a text nor a whole number",
                                         pickle_->describe(key))));
        }
        return ok();
      }
      PTC_TRY(auto place,
              this->place(parent, key, text ? TorchStep::Kind::kKey : TorchStep::Kind::kNumberKey));
      PTC_TRY(visit(value, place, depth + 1));
      name_.resize(length);
      return ok();
    }));
    return empty ? add_literal(id, parent) : ok();
  }

  Result<> visit_items(PickleId id, uint32_t parent, size_t depth) {
    bool mappings = false;
    PTC_TRY(walk_->for_items(id, [&](PickleId item) -> Result<> {
      mappings = mappings || is_mapping(item);
      return ok();
    }));
    PTC_TRY(auto holds, holds_storage(id));
    if (depth == TorchFile::kMaxDepth) return holds ? too_deep() : add_literal(id, parent);
    if (!mappings && !holds) return add_literal(id, parent);
    const auto kind =
        pickle_->is(id, Kind::kTuple) ? TorchStep::Kind::kTupleIndex : TorchStep::Kind::kListIndex;
    uint32_t index = 0;
    return walk_->for_items(id, [&](PickleId item) -> Result<> {
      const size_t length = name_.size();
      append_torch_name(name_, fmt::format_int(index).c_str());
      PTC_TRY(auto place, this->place(parent, index, kind));
      PTC_TRY(visit(item, place, depth + 1));
      name_.resize(length);
      ++index;
      return ok();
    });
  }

  Result<> visit_object(PickleId id, uint32_t place, size_t depth) {
    const PickleId arguments = pickle_->arguments(id);
    const size_t count = pickle_->is(arguments, Kind::kTuple) ? pickle_->tuple_size(arguments) : 0;
    const bool changed = pickle_->changes(id).more();
    switch (called(id)) {
      case Callable::kTensor:
      case Callable::kTensorV2:
      case Callable::kTensorV3:
        if (!changed) return add_tensor(id, called(id), arguments, place);
        break;
      case Callable::kParameter:
      case Callable::kParameterWithState:
        if (count < 3 || changed) break;
        if (count > 3) {
          PTC_TRY(auto holds, holds_storage(pickle_->element(arguments, 3)));
          if (holds) break;
        }
        if (depth == TorchFile::kMaxDepth) return too_deep();
        return visit(pickle_->element(arguments, 0), place, depth + 1);
      case Callable::kFromType:
        if (count == 4 && !changed) return visit_typed(id, arguments, place);
        break;
      case Callable::kMapping: {
        PTC_TRY(auto holds, holds_storage(arguments));
        for (Pickle::Changes changes = pickle_->changes(id); changes.more() && !holds;
             changes.next()) {
          const Pickle::Change change = *changes;
          PTC_TRY(walk_->count());
          if (change.kind == Pickle::Change::Kind::kPairs) continue;
          for (uint32_t i = 0; i < change.count && !holds; ++i) {
            PTC_TRY(walk_->count());
            PTC_TRY(holds, holds_storage(pickle_->value(change.first + i)));
          }
        }
        if (!holds) return visit_pairs(id, place, depth);
        break;
      }
      default:
        break;
    }
    PTC_TRY(auto holds, holds_storage(id));
    if (!holds) return add_literal(id, place);
    return add_opaque(id, place,
                      fmt::format("its tensors are in an object of a kind that is not known: {}",
                                  pickle_->describe(id)));
  }

  /// torch._tensor._rebuild_from_type_v2(function, type, arguments, state).
  Result<> visit_typed(PickleId id, PickleId arguments, uint32_t place) {
    const PickleId type = pickle_->element(arguments, 1), state = pickle_->element(arguments, 3);
    const Callable function = callable(*pickle_, pickle_->element(arguments, 0));
    const bool is_tensor = function == Callable::kTensor || function == Callable::kTensorV2 ||
                           function == Callable::kTensorV3;
    if (is_tensor && (pickle_->is_global(type, "torch", "Tensor") ||
                      pickle_->is_global(type, "torch.nn.parameter", "Parameter"))) {
      PTC_TRY(auto holds, holds_storage(state));
      if (!holds) return add_tensor(id, function, pickle_->element(arguments, 2), place);
    }
    if (function == Callable::kWrapper && pickle_->is(type, Kind::kGlobal) &&
        pickle_->name(type) == "DTensor")
      return add_dtensor(id, state, place);
    if (function == Callable::kWrapper && pickle_->is(type, Kind::kGlobal) &&
        pickle_->name(type) == "ShardedTensor")
      return add_sharded_tensor(id, state, place);
    return add_opaque(
        id, place,
        fmt::format("it is a tensor of a type that is not known: {}", pickle_->describe(type)));
  }

  Result<> add_literal(PickleId id, uint32_t place) {
    PTC_TRY(charge_one<TorchLiteral>());
    file_.literals_.push_back({place, id});
    return ok();
  }
  Result<> add_opaque(PickleId id, uint32_t place, std::string reason) {
    PTC_TRY(charge(3 * sizeof(TorchOpaque) + name_.size() + reason.size() + 2));
    file_.opaque_.push_back({name_, std::move(reason), place, id});
    return ok();
  }

  Error tensor_error(Error error) const {
    return std::move(error).with_context(fmt::format("tensor {}", quoted(name_)));
  }

  Result<> add_tensor(PickleId id, Callable function, PickleId arguments, uint32_t place) {
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

  Result<> read_tensor(Callable function, PickleId arguments, TorchTensor& tensor,
                       std::string& unknown) {
    const auto damaged = [] {
      return invalid_argument("what should rebuild it is not as torch writes it");
    };
    const size_t count = pickle_->is(arguments, Kind::kTuple) ? pickle_->tuple_size(arguments) : 0;
    const size_t least = function == Callable::kTensor     ? 4
                         : function == Callable::kTensorV2 ? 6
                                                           : 7;
    if (count < least || count > least + 1) return damaged();
    auto argument = [&](size_t i) { return pickle_->element(arguments, i); };
    const auto offset = count_of(*pickle_, argument(1));
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
        return unknown = fmt::format("its type is not supported: {}", pickle_->describe(type)),
               ok();
    }
    if (!dtype) return damaged();
    tensor.dtype = *dtype;
    return place_tensor(tensor);
  }

  /// Where its bytes are in the file.
  Result<> place_tensor(TorchTensor& tensor) {
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

  /// The number of the storage that a persistent id names; `dtype` of its elements, if it has one.
  Result<uint32_t> storage(PickleId persistent, std::optional<DType>& dtype, std::string& unknown) {
    const auto damaged = [] { return invalid_argument("its storage is not named as torch does"); };
    if (!pickle_->is(persistent, Kind::kPersistent)) return damaged();
    const PickleId id = pickle_->arguments(persistent);
    if (!pickle_->is(id, Kind::kTuple) || pickle_->tuple_size(id) != 5) return damaged();
    const PickleId what = pickle_->element(id, 0), type = pickle_->element(id, 1),
                   key_id = pickle_->element(id, 2);
    const auto count = count_of(*pickle_, pickle_->element(id, 4));
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
        return invalid_argument("its storage {} is {}", quoted(key),
                                zip_method_text(member->method));
      file_.storages_.push_back({key, member->data_offset, member->bytes});
    }
    const TorchStorage& storage = file_.storages_[found->second];
    // Less than an item may be left over: of a storage that was made for smaller ones.
    if (storage.bytes < bytes || storage.bytes - bytes >= item)
      return invalid_argument(
          "its storage {} should have {} bytes, but the zip archive has {} of it", quoted(key),
          bytes, storage.bytes);
    return found->second;
  }

  /// A DTensor: the local tensor and what is said of the whole.
  Result<> add_dtensor(PickleId id, PickleId state, uint32_t place) {
    PTC_TRY(const auto local, state_value(state, "_local_tensor"));
    PTC_TRY(const auto spec, state_value(state, "_spec"));
    TorchSharding sharding;
    const char* what =
        local && spec && is_plain_tensor(*local) ? nullptr : "_local_tensor or _spec";
    if (what == nullptr) {
      PTC_TRY(what, read_spec(*spec, sharding));
    }
    if (what != nullptr)
      return add_opaque(id, place,
                        fmt::format("it is a DTensor whose {} is not as expected", what));
    return add_local(id, *local, place, std::move(sharding));
  }

  /// A ShardedTensor, which came before DTensors: a list of local shards, each with its place, and
  /// the size of the whole.
  Result<> add_sharded_tensor(PickleId id, PickleId state, uint32_t place) {
    const bool pair = pickle_->is(state, Kind::kTuple) && pickle_->tuple_size(state) >= 2 &&
                      pickle_->is(pickle_->element(state, 0), Kind::kList);
    std::vector<PickleId> shards;
    if (pair) {
      PTC_TRY(walk_->for_items(pickle_->element(state, 0), [&](PickleId shard) -> Result<> {
        if (shards.size() < 2) shards.push_back(shard);
        return ok();
      }));
    }
    if (shards.size() != 1)
      return add_opaque(id, place, "it is a ShardedTensor that has not one local shard");
    PTC_TRY(const auto local, attribute(shards[0], "tensor"));
    PTC_TRY(const auto metadata, attribute(shards[0], "metadata"));
    PTC_TRY(const auto size, attribute(pickle_->element(state, 1), "size"));
    PTC_TRY(const auto offsets, attribute(metadata, "shard_offsets"));
    PTC_TRY(const auto sizes, attribute(metadata, "shard_sizes"));
    if (!local || !size || !offsets || !sizes || !is_plain_tensor(*local))
      return add_opaque(id, place, "it is a ShardedTensor that is not as expected");
    PTC_TRY(auto shape, torch_dims(*pickle_, *size));
    PTC_TRY(auto offset, torch_dims(*pickle_, *offsets));
    PTC_TRY(auto extent, torch_dims(*pickle_, *sizes));
    bool within = shape && offset && extent && offset->size() == shape->size() &&
                  extent->size() == shape->size();
    for (size_t axis = 0; within && axis < shape->size(); ++axis)
      within =
          (*offset)[axis] <= (*shape)[axis] && (*extent)[axis] <= (*shape)[axis] - (*offset)[axis];
    if (!within) return add_opaque(id, place, "it is a ShardedTensor whose shard is not within it");
    TorchSharding sharding;
    sharding.global_shape = *shape;
    sharding.box = Box{*offset, *extent};
    return add_local(id, *local, place, std::move(sharding));
  }

  bool is_plain_tensor(PickleId id) {
    if (!pickle_->is(id, Kind::kObject)) return false;
    const Callable function = callable(*pickle_, pickle_->called(id));
    return function == Callable::kTensor || function == Callable::kTensorV2 ||
           function == Callable::kTensorV3;
  }

  Result<> add_local(PickleId id, PickleId local, uint32_t place, TorchSharding sharding) {
    const size_t tensors = file_.tensors_.size();
    PTC_TRY(add_tensor(local, callable(*pickle_, pickle_->called(local)), pickle_->arguments(local),
                       place));
    if (file_.tensors_.size() == tensors) return ok();
    TorchTensor& tensor = file_.tensors_.back();
    tensor.outer = id;
    PTC_TRY(charge(3 * sizeof(TorchSharding) + 8 * 64));
    find_box(tensor, sharding);
    tensor.sharding = static_cast<uint32_t>(file_.shardings_.size());
    file_.shardings_.push_back(std::move(sharding));
    return ok();
  }

  /// nullptr, or the attribute that is not as expected.
  Result<const char*> read_spec(PickleId spec, TorchSharding& sharding) {
    PTC_TRY(const auto meta, attribute(spec, "tensor_meta"));
    PTC_TRY(const auto placements, attribute(spec, "placements"));
    PTC_TRY(const auto mesh, attribute(spec, "mesh"));
    PTC_TRY(const auto order, attribute(spec, "shard_order"));
    if (!meta || !pickle_->is(*meta, Kind::kObject) ||
        !pickle_->is(pickle_->arguments(*meta), Kind::kTuple) ||
        pickle_->tuple_size(pickle_->arguments(*meta)) < 3)
      return "tensor_meta";
    PTC_TRY(auto shape, torch_dims(*pickle_, pickle_->element(pickle_->arguments(*meta), 0)));
    if (!shape) return "tensor_meta";
    sharding.global_shape = *shape;
    if (!placements || !pickle_->is(*placements, Kind::kTuple) ||
        pickle_->tuple_size(*placements) > kMaxAxes)
      return "placements";
    for (size_t i = 0; i < pickle_->tuple_size(*placements); ++i) {
      const PickleId object = pickle_->element(*placements, i);
      TorchSharding::Placement placement;
      if (!pickle_->is(object, Kind::kObject) ||
          !pickle_->is(pickle_->called(object), Kind::kGlobal))
        return "placements";
      const std::string_view name = pickle_->name(pickle_->called(object));
      using PlacementKind = TorchSharding::Placement::Kind;
      if (name == "Replicate") placement.kind = PlacementKind::kReplicate;
      else if (name == "Shard") placement.kind = PlacementKind::kShard;
      else if (name == "_StridedShard") placement.kind = PlacementKind::kStridedShard;
      else if (name == "Partial" || name == "_MaskPartial")
        placement.kind = PlacementKind::kPartial;
      else return "placements";
      if (placement.kind == PlacementKind::kShard ||
          placement.kind == PlacementKind::kStridedShard) {
        PTC_TRY(const auto axis, attribute(object, "dim"));
        PTC_TRY(const auto factor, attribute(object, "split_factor"));
        const auto number = axis ? count_of(*pickle_, *axis) : std::nullopt;
        if (!number || *number >= shape->size()) return "placements";
        placement.axis = *number;
        if (factor) placement.split_factor = count_of(*pickle_, *factor).value_or(1);
      }
      sharding.placements.push_back(placement);
    }
    PTC_TRY(sharding.mesh_order, is_mesh_order(order));
    if (!mesh) return "mesh";
    PTC_TRY(sharding.mesh, this->mesh(*mesh));
    const size_t axes = sharding.placements.size();
    const bool known =
        sharding.mesh && (sharding.mesh->shape.empty() || sharding.mesh->shape.size() == axes) &&
        (sharding.mesh->coordinate.empty() || sharding.mesh->coordinate.size() == axes);
    return known ? nullptr : "mesh";
  }

  /// Whether a ShardOrder says that each axis is cut along those of the mesh in their own order; so
  /// it is where there is none, as older versions of torch have it.
  Result<bool> is_mesh_order(std::optional<PickleId> order) {
    if (!order || pickle_->is(*order, Kind::kNone)) return true;
    if (!pickle_->is(*order, Kind::kTuple) || pickle_->tuple_size(*order) > kMaxAxes) return false;
    for (size_t i = 0; i < pickle_->tuple_size(*order); ++i) {
      const PickleId entry = pickle_->element(*order, i);
      if (!pickle_->is(entry, Kind::kObject)) return false;
      const PickleId arguments = pickle_->arguments(entry);  // the tensor's axis, the mesh's axes
      if (!pickle_->is(arguments, Kind::kTuple) || pickle_->tuple_size(arguments) != 2)
        return false;
      const auto axes = torch_dims(*pickle_, pickle_->element(arguments, 1));
      if (!axes || !axes.value() || !std::is_sorted(axes.value()->begin(), axes.value()->end()))
        return false;
      PTC_TRY(walk_->count());
    }
    return true;
  }

  /// nullptr: it is not as expected.
  Result<std::shared_ptr<const TorchMesh>> mesh(PickleId id) {
    const auto [found, is_new] = meshes_.try_emplace(id);
    if (!is_new) return found->second;
    auto made = std::make_shared<TorchMesh>();
    PTC_TRY(charge(sizeof(TorchMesh) + 200));
    PTC_TRY(const bool known, read_mesh(id, *made));
    if (!known) return found->second;
    // Of a part of a mesh the ranks are those of the whole.
    uint64_t count = 1;
    for (const uint64_t n : made->shape)
      if (__builtin_mul_overflow(count, n, &count)) count = 0;
    if (count != made->ranks.size()) made->ranks = {};
    return found->second = std::move(made);
  }

  Result<bool> read_mesh(PickleId id, TorchMesh& mesh) {
    PTC_TRY(const auto layout, attribute(id, "_layout"));
    if (layout) {
      PTC_TRY(const auto axes, attribute(layout, "axes"));
      PTC_TRY(const auto whole, attribute(layout, "shape"));
      if (axes && pickle_->is(*axes, Kind::kTuple)) {
        if (pickle_->tuple_size(*axes) > kMaxAxes) return false;
        for (size_t i = 0; i < pickle_->tuple_size(*axes); ++i) {
          PTC_TRY(const auto shape, attribute(pickle_->element(*axes, i), "shape"));
          std::vector<uint64_t> sizes;
          if (!shape) return false;
          PTC_TRY(const bool numbers, take_numbers(*shape, sizes));
          if (!numbers) return false;
          uint64_t size = 1;
          for (const uint64_t n : sizes)
            if (__builtin_mul_overflow(size, n, &size)) return false;
          mesh.shape.push_back(size);
        }
      } else if (whole) {
        PTC_TRY(const bool numbers, take_numbers(*whole, mesh.shape));
        if (!numbers) return false;
      }
    }
    PTC_TRY(const auto ranks, attribute(id, "_flatten_rank_map"));
    if (ranks) {
      PTC_TRY(const bool numbers, take_numbers(*ranks, mesh.ranks));
      if (!numbers) return false;
    }
    PTC_TRY(const auto coordinate, attribute(id, "_coordinate_on_dim"));
    if (coordinate && !pickle_->is(*coordinate, Kind::kNone)) {
      PTC_TRY(const bool numbers, take_numbers(*coordinate, mesh.coordinate));
      if (!numbers) return false;
    }
    for (const char* key : {"_mesh_dim_names", "mesh_dim_names"}) {
      PTC_TRY(const auto names, attribute(id, key));
      if (!names || !mesh.names.empty()) continue;
      bool few = true;
      PTC_TRY(walk_->for_items(*names, [&](PickleId name) -> Result<> {
        if (!pickle_->is(name, Kind::kText)) return ok();
        few = few && mesh.names.size() < kMaxAxes;
        if (!few) return ok();
        mesh.names.emplace_back(printable(pickle_->text(name), 100));
        return charge(3 * sizeof(std::string) + mesh.names.back().size());
      }));
      if (!few) return false;
    }
    // Before torch 2.10 the mesh was a tensor, whose shape says as much.
    if (mesh.shape.empty()) {
      PTC_TRY(const auto tensor, attribute(id, "mesh"));
      if (tensor && pickle_->is(*tensor, Kind::kObject) && called(*tensor) == Callable::kTensorV2 &&
          pickle_->is(pickle_->arguments(*tensor), Kind::kTuple) &&
          pickle_->tuple_size(pickle_->arguments(*tensor)) > 3) {
        const auto shape = torch_dims(*pickle_, pickle_->element(pickle_->arguments(*tensor), 2));
        if (shape && shape.value()) mesh.shape.assign(shape.value()->begin(), shape.value()->end());
      }
    }
    return true;
  }

  static void find_box(const TorchTensor& tensor, TorchSharding& sharding) {
    if (tensor.shape.size() != sharding.global_shape.size() || !sharding.mesh_order)
      return sharding.box.reset();
    Box box = sharding.box.value_or(Box::whole(sharding.global_shape));
    sharding.box.reset();
    for (size_t i = 0; i < sharding.placements.size(); ++i) {
      const TorchSharding::Placement& placement = sharding.placements[i];
      if (placement.kind == TorchSharding::Placement::Kind::kReplicate) continue;
      if (placement.kind != TorchSharding::Placement::Kind::kShard ||
          sharding.mesh->coordinate.empty() || sharding.mesh->shape.empty())
        return;
      const uint64_t ranks = sharding.mesh->shape[i], rank = sharding.mesh->coordinate[i],
                     n = box.extent[placement.axis];
      if (rank >= ranks) return;
      const uint64_t step = n / ranks + (n % ranks != 0);
      const uint64_t begin = step == 0 || rank > n / step ? n : std::min(n, rank * step);
      box.offset[placement.axis] += begin;
      box.extent[placement.axis] = std::min(step, n - begin);
    }
    if (box.extent == tensor.shape) sharding.box = box;
  }

  Result<> check_names() {
    std::unordered_set<std::string_view> names;
    names.reserve(file_.tensors_.size());
    for (const TorchTensor& tensor : file_.tensors_) {
      if (!names.insert(tensor.name).second)
        return invalid_argument(
            "two tensors are at {}: their keys differ, but not when they are joined by dots",
            quoted(tensor.name));
    }
    return ok();
  }

  const ReadAt& read_;
  uint64_t file_bytes_;
  TorchFile file_;
  const Pickle* pickle_ = nullptr;
  std::optional<PickleWalk> walk_;
  std::string member_;  // "archive/data/", to which a key is added
  std::string name_;    // of the value that is visited
  uint64_t budget_ = 0;
  std::unordered_map<std::string_view, uint32_t> by_key_;
  std::unordered_map<PickleId, std::shared_ptr<const TorchMesh>> meshes_;  // nullptr: no such one
  std::vector<bool> clean_;    // by value: there is no storage in it
  std::deque<PickleId> seen_;  // of holds_storage(); it grows without a copy
  PickleId last_called_ = UINT32_MAX, last_dtype_ = UINT32_MAX, last_storage_type_ = UINT32_MAX;
  Callable last_callable_ = Callable::kOther;
  std::optional<DType> last_known_dtype_, last_storage_dtype_;
  bool untyped_ = false;
};

Result<TorchFile> TorchFile::read(const ReadAt& read, uint64_t file_bytes) {
  return TorchFileReader(read, file_bytes).run();
}

const ZipMember* TorchFile::storage_member(std::string_view key) const {
  return directory_->find(fmt::format("{}/data/{}", root_, key));
}

std::vector<TorchStep> TorchFile::path(uint32_t place) const {
  std::vector<TorchStep> path;
  for (; place != 0; place = places_[place].parent) {
    const Place& at = places_[place];
    switch (at.kind) {
      case TorchStep::Kind::kKey:
        path.push_back({at.kind, std::string(pickle_->text(at.key)), 0});
        break;
      case TorchStep::Kind::kNumberKey:
        path.push_back({at.kind, {}, pickle_->integer(at.key)});
        break;
      default:
        path.push_back({at.kind, {}, at.key});
    }
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace ptc
