#include "store/codec/torch_layout.h"

#include <array>
#include <unordered_map>

#include "store/base/json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/safetensors.h"

namespace ptc {
namespace {

class TorchWriter {
 public:
  TorchWriter(const TorchFile& file, std::span<const TorchNewTensor> tensors, std::string_view root)
      : file_(file),
        pickle_(file.pickle()),
        tensors_(tensors),
        root_(root),
        layout_{{}, std::vector<TorchLayout::Place>(tensors.size()), {}} {}

  Result<TorchLayout> run() {
    if (tensors_.size() != file_.tensors().size())
      return invalid_argument("{} new tensors for a file of {}", tensors_.size(),
                              file_.tensors().size());
    if (root_.empty() || root_.find('/') != std::string::npos || root_.size() > 255)
      return invalid_argument("{} is no name for the directory in a torch file", quoted(root_));
    PTC_TRY(find_tensors());
    PTC_TRY(auto text, copy_pickle(pickle_, [this](PickleId id, PickleWriter& writer) {
              return replace(id, writer);
            }));
    ZipWriter zip;
    zip.add(root_ + "/data.pkl", text);
    // No .format_version and .storage_alignment: with them torch may compute where the storages
    // are, as its own writer would have put them, instead of reading it.
    zip.add(root_ + "/byteorder", "little");
    uint64_t sum = 0;
    for (size_t i = 0; i < storages_.size(); ++i) {
      const Storage& storage = storages_[i];
      if (__builtin_add_overflow(sum, storage.bytes, &sum) || sum >= uint64_t{1} << 62)
        return invalid_argument("the tensors have more than 2^62 bytes");
      const uint64_t offset =
          zip.add_later(root_ + "/data/" + std::to_string(i), storage.bytes, storage.crc32);
      if (storage.tensor == TorchTensor::kNone)
        layout_.copies.push_back({offset, storage.bytes, storage.source_offset});
      else layout_.tensors[storage.tensor] = {offset, storage.bytes};
    }
    for (size_t i = 0; i < tensors_.size(); ++i) layout_.tensors[i] = layout_.tensors[owner_[i]];
    zip.add(root_ + "/version", "3\n");
    layout_.zip = std::move(zip).finish();
    return std::move(layout_);
  }

 private:
  struct Storage {
    uint64_t bytes;
    uint32_t crc32;
    uint32_t tensor;         // whose it is, or kNone
    uint64_t source_offset;  // of a copy
  };

  Result<> find_tensors() {
    owner_.resize(tensors_.size());
    storage_.resize(tensors_.size());
    for (uint32_t i = 0; i < tensors_.size(); ++i) {
      const TorchTensor& old = file_.tensors()[i];
      const TorchNewTensor& tensor = tensors_[i];
      const auto error = [&](std::string_view what) {
        return invalid_argument("tensor {}: {}", quoted(old.name), what);
      };
      auto bytes = array_bytes(tensor.shape, old.dtype);
      if (!bytes)
        return std::move(bytes).error().with_context(fmt::format("tensor {}", quoted(old.name)));
      uint32_t owner = tensor.same_as;
      if (owner == TorchTensor::kNone) {
        const auto [found, is_new] = by_arguments_.try_emplace(old.arguments, i);
        owner = is_new ? i : owner_[found->second];
        if (!is_new && tensors_[owner].shape != tensor.shape)
          return error(fmt::format("it is the same as {}, and cannot have another shape",
                                   quoted(file_.tensors()[owner].name)));
      } else {
        if (owner >= i || file_.tensors()[owner].dtype != old.dtype ||
            tensors_[owner].shape != tensor.shape)
          return error("the tensor that it shares bytes with is not before it, or not like it");
        owner = owner_[owner];
        by_arguments_.try_emplace(old.arguments, i);
      }
      owner_[i] = owner;
      storage_[i] = owner == i ? static_cast<uint32_t>(storages_.size()) : storage_[owner];
      if (owner == i) storages_.push_back({bytes.value(), tensor.crc32, i, 0});
      if (tensor.plain && old.outer != old.node) plain_.emplace(old.outer, old.node);
    }
    return ok();
  }

  Result<PickleReplacement> replace(PickleId id, PickleWriter& writer) {
    using Kind = PickleReplacement::Kind;
    if (pickle_.is(id, PickleKind::kPersistent)) return replace_storage(id, writer);
    if (pickle_.is(id, PickleKind::kObject)) {
      const auto found = plain_.find(id);
      return found == plain_.end() ? PickleReplacement()
                                   : PickleReplacement{Kind::kOther, found->second, 0};
    }
    const auto found = by_arguments_.find(id);
    if (found == by_arguments_.end()) return PickleReplacement();
    const uint32_t number = found->second;
    const TorchTensor& tensor = file_.tensors()[number];
    const Storage& storage = storages_[storage_[number]];
    // The old id of the storage says of what kind it is, and where it was.
    const PickleId old = pickle_.arguments(pickle_.element(id, 0));
    const bool untyped = !torch_storage_dtype(pickle_, pickle_.element(old, 1));
    writer.opcode('(');
    PTC_TRY(write_storage(old, storage_[number],
                          untyped ? storage.bytes : storage.bytes / (dtype_bits(tensor.dtype) / 8),
                          writer));
    writer.opcode('Q');
    const Shape& shape = tensors_[number].shape;
    std::array<uint64_t, kMaxAxes> strides{};
    uint64_t stride = 1;
    for (size_t axis = shape.size(); axis-- > 0; stride *= std::max<uint64_t>(shape[axis], 1))
      strides[axis] = stride;
    writer.integer(0);
    writer.numbers(shape.begin(), shape.end());
    writer.numbers(strides.data(), strides.data() + shape.size());
    return PickleReplacement{Kind::kTuple, 0, 4};
  }

  /// A storage that belongs to no tensor that is known: its bytes are copied. Under its old key
  /// there may be another tensor's.
  Result<PickleReplacement> replace_storage(PickleId persistent, PickleWriter& writer) {
    const PickleId id = pickle_.arguments(persistent);
    if (!pickle_.is(id, PickleKind::kTuple) || pickle_.tuple_size(id) != 5 ||
        !pickle_.is(pickle_.element(id, 0), PickleKind::kText) ||
        pickle_.text(pickle_.element(id, 0)) != "storage" ||
        !pickle_.is(pickle_.element(id, 1), PickleKind::kGlobal) ||
        !pickle_.is(pickle_.element(id, 2), PickleKind::kText) ||
        !pickle_.is(pickle_.element(id, 4), PickleKind::kInt))
      return invalid_argument("a storage in it is not named as torch does");
    const std::string_view key = pickle_.text(pickle_.element(id, 2));
    const ZipMember* member = file_.storage_member(key);
    if (member == nullptr)
      return invalid_argument("storage {} is not in the zip archive", quoted(key));
    if (!member->stored())
      return invalid_argument("storage {} is {}", quoted(key), zip_method_text(member->method));
    const auto [found, is_new] = copied_.try_emplace(key, static_cast<uint32_t>(storages_.size()));
    if (is_new)
      storages_.push_back({member->bytes, member->crc32, TorchTensor::kNone, member->data_offset});
    writer.opcode('(');
    PTC_TRY(write_id(id, found->second, writer));
    return PickleReplacement{PickleReplacement::Kind::kTuple, 0, 4};
  }

  Result<> write_id(PickleId old, uint32_t storage, PickleWriter& writer) {
    writer.text("storage");
    PTC_TRY(writer.global(pickle_.module(pickle_.element(old, 1)),
                          pickle_.name(pickle_.element(old, 1))));
    writer.text(std::to_string(storage));
    const PickleId location = pickle_.element(old, 3);
    writer.text(pickle_.is(location, PickleKind::kText) ? pickle_.text(location) : "cpu");
    return ok();
  }
  Result<> write_storage(PickleId old, uint32_t storage, uint64_t count, PickleWriter& writer) {
    writer.opcode('(');
    PTC_TRY(write_id(old, storage, writer));
    writer.integer(static_cast<int64_t>(count));
    writer.opcode('t');
    return ok();
  }

  const TorchFile& file_;
  const Pickle& pickle_;
  std::span<const TorchNewTensor> tensors_;
  std::string root_;
  TorchLayout layout_;
  std::vector<uint32_t> owner_;    // by tensor: the one whose bytes it has
  std::vector<uint32_t> storage_;  // by tensor: number of its new storage
  std::vector<Storage> storages_;
  std::unordered_map<PickleId, uint32_t> by_arguments_;
  std::unordered_map<PickleId, PickleId> plain_;
  std::unordered_map<std::string_view, uint32_t> copied_;
};

}  // namespace

std::vector<TorchNewTensor> same_tensors(const TorchFile& file) {
  std::vector<TorchNewTensor> tensors;
  std::unordered_map<uint64_t, uint32_t> first;  // by all that says which elements they are, hashed
  for (uint32_t i = 0; i < file.tensors().size(); ++i) {
    const TorchTensor& tensor = file.tensors()[i];
    TorchNewTensor& made = tensors.emplace_back();
    made.shape = tensor.shape;
    uint64_t hash = tensor.storage * 0x9E3779B97F4A7C15u + tensor.storage_offset;
    for (const Dims& dims : {tensor.shape, tensor.strides})
      for (const uint64_t n : dims) hash = (hash ^ hash >> 32) * 0x9E3779B97F4A7C15u + n;
    const auto [found, is_new] = first.try_emplace(hash, i);
    if (is_new) continue;
    const TorchTensor& other = file.tensors()[found->second];
    if (other.storage == tensor.storage && other.storage_offset == tensor.storage_offset &&
        other.dtype == tensor.dtype && other.shape == tensor.shape &&
        other.strides == tensor.strides)
      made.same_as = found->second;
  }
  return tensors;
}

Result<TorchLayout> lay_out_torch_file(const TorchFile& file,
                                       std::span<const TorchNewTensor> tensors,
                                       std::string_view root) {
  return TorchWriter(file, tensors, root).run();
}

}  // namespace ptc
