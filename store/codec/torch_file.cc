#include "store/codec/torch_file.h"

#include <algorithm>
#include <unordered_set>

#include "store/base/json.h"
#include "store/codec/torch_file_reader.h"

namespace ptc {
namespace {

constexpr std::string_view kOldMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
                                     14);
constexpr std::string_view kSaveAgain = "load it and torch.save it again";

std::span<std::byte> writable(std::vector<char>& text) {
  return std::as_writable_bytes(std::span(text));
}

}  // namespace

Result<TorchFile> TorchFileReader::run() {
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

Result<> TorchFileReader::check_beginning() {
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
    return invalid_argument("it is a tar, as torch.save wrote before torch 0.1.10: {}", kSaveAgain);
  if (text.starts_with('\x80'))
    return invalid_argument("it is a plain pickle, and has no tensors by offsets: {}", kSaveAgain);
  return invalid_argument("it is no zip archive, as torch.save writes it");
}

Result<std::vector<char>> TorchFileReader::content(const ZipMember& member, uint64_t most) {
  if (!member.stored())
    return invalid_argument("zip member {} is {}; torch stores members as they are",
                            quoted(member.name), zip_method_text(member.method));
  if (member.bytes > most)
    return invalid_argument("zip member {} has {} bytes; at most {} are read", quoted(member.name),
                            member.bytes, most);
  std::vector<char> bytes(member.bytes);
  PTC_TRY(read_(member.data_offset, writable(bytes)));
  return bytes;
}

Result<> TorchFileReader::read_members() {
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
  if (found->bytes > TorchFile::kMostPickleBytes)
    return invalid_argument(
        "its pickle has {} bytes, and at most {} are read: what is no tensor (arrays of NumPy's, "
        "long lists of numbers) is kept in it; save it as tensors, or in a file that is no "
        ".pt, .pth, .bin or .ckpt. Or there are too many tensors in one file: save them in "
        "several, "
        "or as safetensors",
        found->bytes, TorchFile::kMostPickleBytes);
  PTC_TRY(auto bytes, content(*found, TorchFile::kMostPickleBytes));
  file_.bytes_ = std::make_unique<std::vector<char>>(std::move(bytes));
  member_ += "data/";
  return ok();
}

Result<> TorchFileReader::charge(uint64_t bytes) {
  if (bytes > budget_)
    return invalid_argument(
        "the names of the values in it take more memory than a pickle of {} bytes may: it uses "
        "few "
        "values very often",
        file_.pickle_bytes().size());
  budget_ -= bytes;
  return ok();
}

Result<std::optional<PickleId>> TorchFileReader::state_value(PickleId state, std::string_view key) {
  PTC_TRY(auto found, walk_->value(state, key));
  if (!pickle_->is(state, Kind::kTuple) || pickle_->tuple_size(state) != 2) return found;
  for (size_t i = 0; i < 2; ++i) {
    PTC_TRY(auto value, walk_->value(pickle_->element(state, i), key));
    if (value) found = value;
  }
  return found;
}

Result<std::optional<PickleId>> TorchFileReader::attribute(std::optional<PickleId> object,
                                                           std::string_view key) {
  std::optional<PickleId> found;
  if (!object || !pickle_->is(*object, Kind::kObject)) return found;
  PTC_TRY(walk_->for_states(*object, [&](PickleId state) -> Result<> {
    PTC_TRY(auto value, state_value(state, key));
    if (value) found = value;
    return ok();
  }));
  return found;
}

Result<bool> TorchFileReader::take_numbers(PickleId id, std::vector<uint64_t>& out, int depth) {
  if (const auto number = torch_count(*pickle_, id)) {
    PTC_TRY(charge(3 * sizeof(uint64_t)));
    out.push_back(*number);
    return true;
  }
  if (depth == 0 || (!pickle_->is(id, Kind::kTuple) && !pickle_->is(id, Kind::kList))) return false;
  bool numbers = true;
  PTC_TRY(walk_->for_items(id, [&](PickleId item) -> Result<> {
    if (!numbers) return ok();
    PTC_TRY(numbers, take_numbers(item, out, depth - 1));
    return ok();
  }));
  return numbers;
}

Result<uint32_t> TorchFileReader::place(uint32_t parent, uint32_t key, TorchStep::Kind kind) {
  PTC_TRY(charge_one<TorchFile::Place>());
  file_.places_.push_back({parent, key, kind});
  return static_cast<uint32_t>(file_.places_.size() - 1);
}

Result<bool> TorchFileReader::holds_storage(PickleId id) {
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

bool TorchFileReader::is_leaf(PickleId id) const {
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

Result<> TorchFileReader::visit(PickleId id, uint32_t place, size_t depth) {
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

Result<> TorchFileReader::visit_pairs(PickleId id, uint32_t parent, size_t depth) {
  if (depth == TorchFile::kMaxDepth) {
    PTC_TRY(auto holds, holds_storage(id));
    return holds ? too_deep() : add_literal(id, parent);
  }
  bool empty = true;
  PTC_TRY(walk_->for_pairs(id, [&](PickleId key, PickleId value) -> Result<> {
    empty = false;
    const size_t length = name_.size();
    auto kind = TorchStep::Kind::kNumberKey;
    if (pickle_->is(key, Kind::kText)) {
      kind = TorchStep::Kind::kKey;
      PTC_TRY(walk_->count_text(pickle_->text(key)));
      append_torch_name(name_, pickle_->text(key));
    } else if (pickle_->is(key, Kind::kInt)) {
      append_torch_name(name_, fmt::format_int(pickle_->integer(key)).c_str());
    } else if (const auto types = torch_dtypes_text(*pickle_, key)) {
      kind = TorchStep::Kind::kTypesKey;
      PTC_TRY(walk_->count_text(*types));
      append_torch_name(name_, *types);
    } else {
      PTC_TRY(auto in_key, holds_storage(key));
      PTC_TRY(auto in_value, holds_storage(value));
      if (in_key || in_value) {
        PTC_TRY(add_opaque(value, parent,
                           fmt::format("its key, {}, is neither a text nor a whole number",
                                       pickle_->describe(key))));
      } else {
        PTC_TRY(charge_one<TorchPair>());
        file_.pairs_.push_back({parent, key, value});
      }
      return ok();
    }
    PTC_TRY(auto place, this->place(parent, key, kind));
    PTC_TRY(visit(value, place, depth + 1));
    name_.resize(length);
    return ok();
  }));
  return empty ? add_literal(id, parent) : ok();
}

Result<> TorchFileReader::visit_items(PickleId id, uint32_t parent, size_t depth) {
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

Result<> TorchFileReader::visit_object(PickleId id, uint32_t place, size_t depth) {
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

Result<> TorchFileReader::visit_typed(PickleId id, PickleId arguments, uint32_t place) {
  const PickleId type = pickle_->element(arguments, 1), state = pickle_->element(arguments, 3);
  const Callable function = torch_callable(*pickle_, pickle_->element(arguments, 0));
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

Result<> TorchFileReader::add_literal(PickleId id, uint32_t place) {
  PTC_TRY(charge_one<TorchLiteral>());
  file_.literals_.push_back({place, id});
  return ok();
}

Result<> TorchFileReader::add_opaque(PickleId id, uint32_t place, std::string reason) {
  PTC_TRY(charge(3 * sizeof(TorchOpaque) + name_.size() + reason.size() + 2));
  file_.opaque_.push_back({name_, std::move(reason), place, id});
  return ok();
}

Result<> TorchFileReader::check_names() {
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
      case TorchStep::Kind::kTypesKey:
        path.push_back({at.kind, torch_dtypes_text(*pickle_, at.key).value_or(""), 0});
        break;
      default:
        path.push_back({at.kind, {}, at.key});
    }
  }
  std::reverse(path.begin(), path.end());
  return path;
}

}  // namespace ptc
