// How a TorchFile is read. Internal to the codec: values and names are in torch_file.cc, tensors
// and storages in torch_tensors.cc, what DTensors say of meshes in torch_sharding.cc.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "store/base/error.h"
#include "store/codec/pickle_walk.h"
#include "store/codec/torch_file.h"

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
TorchCallable torch_callable(const Pickle& pickle, PickleId id);
/// A whole number that is not negative.
std::optional<uint64_t> torch_count(const Pickle& pickle, PickleId id);

/// Reads one file, once. Not for several threads.
class TorchFileReader {
 public:
  TorchFileReader(const ReadAt& read, uint64_t file_bytes) : read_(read), file_bytes_(file_bytes) {}

  Result<TorchFile> run();

 private:
  using Kind = PickleKind;
  using Callable = TorchCallable;

  Result<> check_beginning();

  Result<std::vector<char>> content(const ZipMember& member, uint64_t most);

  Result<> read_members();

  Result<> charge(uint64_t bytes);
  /// One more in a deque, with its share of the deque's own.
  template <class T>
  Result<> charge_one() {
    return charge(sizeof(T) + sizeof(T) / 8 + 1);
  }

  /// The value under a key of a state: of a dict, or of one of a pair of dicts (plain attributes
  /// and slots).
  Result<std::optional<PickleId>> state_value(PickleId state, std::string_view key);
  Result<std::optional<PickleId>> attribute(std::optional<PickleId> object, std::string_view key);

  /// Whole numbers of a list or tuple, also of tuples in it; false: there is something else.
  Result<bool> take_numbers(PickleId id, std::vector<uint64_t>& out, int depth = 3);

  Result<uint32_t> place(uint32_t parent, uint32_t key, TorchStep::Kind kind);

  /// Whether there is a storage in a value, or in what it leads to; or a tensor that has none (of
  /// device meta, or made of an array).
  Result<bool> holds_storage(PickleId id);
  bool is_leaf(PickleId id) const;
  Callable called(PickleId object) {
    const PickleId id = pickle_->called(object);
    if (id != last_called_) last_called_ = id, last_callable_ = torch_callable(*pickle_, id);
    return last_callable_;
  }
  bool is_mapping(PickleId id) {
    return pickle_->is(id, Kind::kDict) ||
           (pickle_->is(id, Kind::kObject) && called(id) == Callable::kMapping);
  }

  Result<> visit(PickleId id, uint32_t place, size_t depth);

  Result<> too_deep() {
    return invalid_argument("value {}: it is nested deeper than {}", quoted(name_),
                            TorchFile::kMaxDepth);
  }

  Result<> visit_pairs(PickleId id, uint32_t parent, size_t depth);

  Result<> visit_items(PickleId id, uint32_t parent, size_t depth);

  Result<> visit_object(PickleId id, uint32_t place, size_t depth);

  /// torch._tensor._rebuild_from_type_v2(function, type, arguments, state).
  Result<> visit_typed(PickleId id, PickleId arguments, uint32_t place);

  Result<> add_literal(PickleId id, uint32_t place);
  Result<> add_opaque(PickleId id, uint32_t place, std::string reason);

  Error tensor_error(Error error) const;

  Result<> add_tensor(PickleId id, Callable function, PickleId arguments, uint32_t place);

  Result<> read_tensor(Callable function, PickleId arguments, TorchTensor& tensor,
                       std::string& unknown);

  /// Where its bytes are in the file.
  Result<> place_tensor(TorchTensor& tensor);

  /// The number of the storage that a persistent id names; `dtype` of its elements, if it has one.
  Result<uint32_t> storage(PickleId persistent, std::optional<DType>& dtype, std::string& unknown);

  /// A DTensor: the local tensor and what is said of the whole.
  Result<> add_dtensor(PickleId id, PickleId state, uint32_t place);

  /// A ShardedTensor, which came before DTensors: a list of local shards, each with its place, and
  /// the size of the whole.
  Result<> add_sharded_tensor(PickleId id, PickleId state, uint32_t place);

  bool is_plain_tensor(PickleId id);

  Result<> add_local(PickleId id, PickleId local, uint32_t place, TorchSharding sharding);

  /// nullptr, or the attribute that is not as expected.
  Result<const char*> read_spec(PickleId spec, TorchSharding& sharding);

  /// What a ShardOrder says; where there is none, as in older versions of torch, each axis is cut
  /// along those of the mesh in their own order. False: it is not as expected.
  Result<bool> read_orders(std::optional<PickleId> order, TorchSharding& sharding);

  /// nullptr: it is not as expected.
  Result<std::shared_ptr<const TorchMesh>> mesh(PickleId id);

  Result<bool> read_mesh(PickleId id, TorchMesh& mesh);

  static void find_box(const TorchTensor& tensor, TorchSharding& sharding);

  Result<> check_names();

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

}  // namespace ptc
