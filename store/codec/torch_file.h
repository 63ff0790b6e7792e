// What torch.save writes (.pt, .pth, .bin, .ckpt): a zip archive with a pickle, and one member for
// each storage. Read by offsets: of the file only the zip directory and the pickle are looked at,
// the tensors' bytes stay where they are.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "store/base/error.h"
#include "store/codec/pickle.h"
#include "store/codec/torch_path.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// Bytes that tensors are views of: the bytes [offset, offset + bytes) of the file.
struct TorchStorage {
  std::string_view key;  // "0": of the member <root>/data/0
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

/// The ranks that the parts of a tensor are on.
struct TorchMesh {
  std::vector<uint64_t> shape;  // empty where the pickle does not say
  std::vector<uint64_t> ranks;  // in C order; empty where it does not say, as of a part of a mesh
  std::vector<std::string> names;  // of the axes, where they have some
  std::vector<uint64_t>
      coordinate;  // of the rank that saved it; empty where the pickle does not say
};

/// How a tensor of one rank lies in that of all ranks (DTensor; ShardedTensor, of which only the
/// box is known).
struct TorchSharding {
  struct Placement {
    enum class Kind : uint8_t {
      kShard,
      kReplicate,
      kPartial,
      kStridedShard
    } kind = Kind::kReplicate;
    uint64_t axis = 0;          // of kShard and kStridedShard
    uint64_t split_factor = 1;  // of kStridedShard
  };
  Shape global_shape;
  std::vector<Placement> placements;  // one for each axis of the mesh; none of a ShardedTensor
  /// Axes that those of the mesh cut in another order than their own: the first of these first.
  std::vector<std::pair<uint64_t, Dims>> orders;
  std::shared_ptr<const TorchMesh>
      mesh;  // several tensors have the same; nullptr of a ShardedTensor
  /// What of the whole tensor the local one is, where that follows from the above: shards as
  /// torch.chunk cuts them, no partial sums, one box of the shape that this gives. Its extent is
  /// then the local shape.
  std::optional<Box> box;
};

struct TorchTensor {
  std::string name;    // as torch_path.h says; no two tensors of a file have the same
  uint32_t place;      // for TorchFile::path()
  PickleId node;       // the object in the pickle that would have become the tensor
  PickleId outer;      // the one that holds it, which is at `place`: a DTensor; else the same
  PickleId arguments;  // the tuple: storage, offset, shape, strides, and more
  DType dtype = DType::kF32;
  Shape shape;
  Dims strides;                 // in elements
  uint32_t storage = 0;         // number in TorchFile::storages(); two tensors may have the same
  uint64_t storage_offset = 0;  // in elements
  /// The file's bytes from its first element to its last. Not contiguous (a transpose, a slice of
  /// columns): they hold other elements, too, or in another order; `shape`, `strides` say which,
  /// and who cannot gather must refuse.
  uint64_t offset = 0, bytes = 0;
  bool contiguous = true;
  uint32_t sharding = kNone;  // number in TorchFile::shardings()
  static constexpr uint32_t kNone = UINT32_MAX;
};

/// A value that is no tensor, and in which there is none: a number, a text, an empty dict, a list
/// of such, any object.
struct TorchLiteral {
  uint32_t place;
  PickleId node;
};

/// A pair of a dict whose key is neither a text nor a whole number nor a tuple of torch's types,
/// and in which there is no tensor.
struct TorchPair {
  uint32_t place;  // of the dict
  PickleId key, node;
};

/// A value with tensors in it that cannot be told apart, or a tensor that this file system has no
/// type for.
struct TorchOpaque {
  std::string name;
  std::string reason;
  uint32_t place;
  PickleId node;
};

class TorchFile {
 public:
  /// Reads what a file of `file_bytes` has. kInvalidArgument, with the tensor's or member's name:
  /// not a zip archive (older files of torch are pickles or tars, and refused as such); big-endian;
  /// TorchScript; members that are compressed; storages that are not there or have another size
  /// than the pickle says; tensors that lie outside of their storage, have more than kMaxAxes axes
  /// or the same name as another; values nested deeper than kMaxDepth with tensors in them; a
  /// pickle of more than kMostPickleBytes, which is not read then, or one that has so many names
  /// for so few values that with them it takes more than 28 bytes of memory for each of its own,
  /// and 1 MiB, or to look at it takes more steps than pickle_walk.h allows.
  static Result<TorchFile> read(const ReadAt& read, uint64_t file_bytes);
  TorchFile(TorchFile&&) noexcept = default;
  TorchFile& operator=(TorchFile&&) noexcept = default;

  static constexpr size_t kMaxDepth = 64;
  /// Of data.pkl. It is read whole and takes up to 28 times as much memory; one of 100 000 tensors
  /// has some 30 MB.
  static constexpr uint64_t kMostPickleBytes = 128 << 20;

  const std::vector<TorchTensor>& tensors() const {
    return tensors_;
  }  // in the order of the pickle
  const std::deque<TorchLiteral>& literals() const {
    return literals_;
  }                                                              // in the order of the pickle
  const std::deque<TorchPair>& pairs() const { return pairs_; }  // in the order of the pickle
  const std::vector<TorchOpaque>& opaque() const { return opaque_; }
  const std::vector<TorchStorage>& storages() const { return storages_; }
  const std::vector<TorchSharding>& shardings() const { return shardings_; }
  const Pickle& pickle() const { return *pickle_; }
  /// Pickle::set_integer(); what is laid out like the file has it.
  void set_integer(PickleId id, int64_t value) { pickle_->set_integer(id, value); }
  void set_none(PickleId id) { pickle_->set_none(id); }
  std::string_view pickle_bytes() const { return std::string_view(bytes_->data(), bytes_->size()); }
  std::string_view root() const { return root_; }  // "archive": the directory of all members

  /// nullptr: there is none.
  const ZipMember* storage_member(std::string_view key) const;
  std::vector<TorchStep> path(uint32_t place) const;
  std::string name(uint32_t place) const { return torch_name(path(place)); }

 private:
  friend class TorchFileReader;
  struct Place {
    uint32_t parent;
    uint32_t key;  // a PickleId, or an index
    TorchStep::Kind kind;
  };
  TorchFile() = default;

  std::unique_ptr<std::vector<char>> bytes_;  // of the pickle
  std::unique_ptr<Pickle> pickle_;
  std::unique_ptr<ZipDirectory> directory_;
  std::string_view root_;
  std::deque<Place> places_;  // 0 is the root; these grow without a copy
  std::vector<TorchTensor> tensors_;
  std::deque<TorchLiteral> literals_;
  std::deque<TorchPair> pairs_;
  std::vector<TorchOpaque> opaque_;
  std::vector<TorchStorage> storages_;
  std::vector<TorchSharding> shardings_;
};

/// Says what a torch.save'd object is that a pickle rebuilds: for readers of other files, too.
std::optional<DType> torch_dtype(const Pickle& pickle, PickleId global);  // torch.bfloat16 …
/// "torch.bfloat16,torch.float32" of a tuple of some; nullopt: it is something else.
std::optional<std::string> torch_dtypes_text(const Pickle& pickle, PickleId id);
std::optional<DType> torch_storage_dtype(const Pickle& pickle,
                                         PickleId global);  // torch.BFloat16Storage …
/// "bfloat16" and "BFloat16Storage"; empty: torch has no such type, or no storages of it.
std::string_view torch_dtype_name(DType dtype);
std::string_view torch_storage_name(DType dtype);
/// A tuple, list or torch.Size of whole numbers, none negative; nullopt: something else.
/// kInvalidArgument: too many.
Result<std::optional<Dims>> torch_dims(const Pickle& pickle, PickleId id);

}  // namespace ptc
