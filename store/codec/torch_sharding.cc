#include <algorithm>

#include "store/base/json.h"
#include "store/base/utf8.h"
#include "store/codec/torch_file_reader.h"

namespace ptc {
namespace {

constexpr uint64_t kMostStretches = 256;  // of rows; as many ranks of tensor parallelism come first

/// Rows that lie together.
struct Stretch {
  uint64_t begin = 0, count = 0;
};

/// By torch.chunk's rule.
Stretch chunk_of(uint64_t rows, uint64_t parts, uint64_t number) {
  const uint64_t step = rows / parts + (rows % parts != 0);
  const uint64_t begin = step == 0 || number > rows / step ? rows : std::min(rows, number * step);
  return {begin, std::min(step, rows - begin)};
}

/// The rank's share of each of `split` parts of these rows.
std::vector<Stretch> cut(const std::vector<Stretch>& rows, uint64_t split, uint64_t ranks,
                         uint64_t rank) {
  uint64_t all = 0;
  for (const Stretch& one : rows) all += one.count;
  std::vector<Stretch> found;
  size_t stretch = 0;
  uint64_t before = 0;  // rows in front of it
  for (uint64_t number = 0; number < split; ++number) {
    const Stretch part = chunk_of(all, split, number);
    const Stretch own = chunk_of(part.count, ranks, rank);
    uint64_t at = part.begin + own.begin;
    for (const uint64_t end = at + own.count; at < end;) {
      while (at >= before + rows[stretch].count) before += rows[stretch++].count;
      const Stretch next{rows[stretch].begin + (at - before),
                         std::min(end, before + rows[stretch].count) - at};
      const bool follows = !found.empty() && found.back().begin + found.back().count == next.begin;
      if (follows) found.back().count += next.count;
      else found.push_back(next);
      at += next.count;
    }
  }
  return found;
}

/// Whether the placements of one axis say that the last one came first: each counts the parts of
/// those behind it.
bool is_backwards(const TorchSharding& sharding, const std::vector<uint64_t>& cuts) {
  uint64_t parts = 1;
  for (size_t i = cuts.size(); i-- > 0;) {
    if (sharding.placements[cuts[i]].split_factor != parts) return false;
    if (__builtin_mul_overflow(parts, sharding.mesh->shape[cuts[i]], &parts)) return false;
  }
  return true;
}

/// What the rank has, if it is one box. Where FSDP has cut after tensor parallelism placements tell
/// of it in the other order, and where rows cannot be divided evenly torch itself has both ways to
/// read that: FSDP cuts what tensor parallelism has left (`backwards`), and a redistribution goes
/// by the placements.
std::optional<Box> box_of(const TorchSharding& sharding, bool backwards) {
  using Kind = TorchSharding::Placement::Kind;
  const TorchMesh& mesh = *sharding.mesh;
  Box box = Box::whole(sharding.global_shape);
  for (uint64_t axis = 0; axis < sharding.global_shape.size(); ++axis) {
    std::vector<uint64_t> cuts;  // axes of the mesh
    for (uint64_t at = 0; at < sharding.placements.size(); ++at) {
      const TorchSharding::Placement& placement = sharding.placements[at];
      if (placement.kind == Kind::kPartial) return std::nullopt;
      if (placement.kind == Kind::kReplicate || placement.axis != axis) continue;
      if (mesh.coordinate.empty() || mesh.shape.empty() || mesh.coordinate[at] >= mesh.shape[at] ||
          placement.split_factor == 0 || placement.split_factor > kMostStretches)
        return std::nullopt;
      cuts.push_back(at);
    }
    for (const auto& [ordered, order] : sharding.orders) {
      if (ordered != axis) continue;
      std::vector<uint64_t> others(order.begin(), order.end());
      if (!std::is_permutation(others.begin(), others.end(), cuts.begin(), cuts.end()))
        return std::nullopt;
      cuts = std::move(others);
    }
    if (cuts.empty()) continue;
    if (backwards && !is_backwards(sharding, cuts)) return std::nullopt;
    if (backwards) std::reverse(cuts.begin(), cuts.end());
    std::vector<Stretch> rows{{0, sharding.global_shape[axis]}};
    for (const uint64_t at : cuts) {
      const uint64_t split = backwards ? 1 : sharding.placements[at].split_factor;
      rows = cut(rows, split, mesh.shape[at], mesh.coordinate[at]);
      if (rows.size() > kMostStretches) return std::nullopt;
    }
    if (rows.size() > 1) return std::nullopt;
    box.offset[axis] = rows.empty() ? sharding.global_shape[axis] : rows[0].begin;
    box.extent[axis] = rows.empty() ? 0 : rows[0].count;
  }
  return box;
}

}  // namespace

Result<> TorchFileReader::add_dtensor(PickleId id, PickleId state, uint32_t place) {
  PTC_TRY(const auto local, state_value(state, "_local_tensor"));
  PTC_TRY(const auto spec, state_value(state, "_spec"));
  TorchSharding sharding;
  const char* what = local && spec && is_plain_tensor(*local) ? nullptr : "_local_tensor or _spec";
  if (what == nullptr) {
    PTC_TRY(what, read_spec(*spec, sharding));
  }
  if (what != nullptr)
    return add_opaque(id, place, fmt::format("it is a DTensor whose {} is not as expected", what));
  return add_local(id, *local, place, std::move(sharding));
}

Result<> TorchFileReader::add_sharded_tensor(PickleId id, PickleId state, uint32_t place) {
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

bool TorchFileReader::is_plain_tensor(PickleId id) {
  if (!pickle_->is(id, Kind::kObject)) return false;
  const Callable function = torch_callable(*pickle_, pickle_->called(id));
  return function == Callable::kTensor || function == Callable::kTensorV2 ||
         function == Callable::kTensorV3;
}

Result<> TorchFileReader::add_local(PickleId id, PickleId local, uint32_t place,
                                    TorchSharding sharding) {
  const size_t tensors = file_.tensors_.size();
  PTC_TRY(add_tensor(local, torch_callable(*pickle_, pickle_->called(local)),
                     pickle_->arguments(local), place));
  if (file_.tensors_.size() == tensors) return ok();
  TorchTensor& tensor = file_.tensors_.back();
  tensor.outer = id;
  PTC_TRY(charge(3 * sizeof(TorchSharding) + 8 * 64));
  find_box(tensor, sharding);
  tensor.sharding = static_cast<uint32_t>(file_.shardings_.size());
  file_.shardings_.push_back(std::move(sharding));
  return ok();
}

Result<const char*> TorchFileReader::read_spec(PickleId spec, TorchSharding& sharding) {
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
    if (!pickle_->is(object, Kind::kObject) || !pickle_->is(pickle_->called(object), Kind::kGlobal))
      return "placements";
    const std::string_view name = pickle_->name(pickle_->called(object));
    using PlacementKind = TorchSharding::Placement::Kind;
    if (name == "Replicate") placement.kind = PlacementKind::kReplicate;
    else if (name == "Shard") placement.kind = PlacementKind::kShard;
    else if (name == "_StridedShard") placement.kind = PlacementKind::kStridedShard;
    else if (name == "Partial" || name == "_MaskPartial") placement.kind = PlacementKind::kPartial;
    else return "placements";
    if (placement.kind == PlacementKind::kShard || placement.kind == PlacementKind::kStridedShard) {
      PTC_TRY(const auto axis, attribute(object, "dim"));
      PTC_TRY(const auto factor, attribute(object, "split_factor"));
      const auto number = axis ? torch_count(*pickle_, *axis) : std::nullopt;
      if (!number || *number >= shape->size()) return "placements";
      placement.axis = *number;
      if (factor) placement.split_factor = torch_count(*pickle_, *factor).value_or(1);
    }
    sharding.placements.push_back(placement);
  }
  PTC_TRY(const bool known_orders, read_orders(order, sharding));
  if (!known_orders) return "shard_order";
  if (!mesh) return "mesh";
  PTC_TRY(sharding.mesh, this->mesh(*mesh));
  const size_t axes = sharding.placements.size();
  const bool known =
      sharding.mesh && (sharding.mesh->shape.empty() || sharding.mesh->shape.size() == axes) &&
      (sharding.mesh->coordinate.empty() || sharding.mesh->coordinate.size() == axes);
  return known ? nullptr : "mesh";
}

Result<bool> TorchFileReader::read_orders(std::optional<PickleId> order, TorchSharding& sharding) {
  if (!order || pickle_->is(*order, Kind::kNone)) return true;
  if (!pickle_->is(*order, Kind::kTuple) || pickle_->tuple_size(*order) > kMaxAxes) return false;
  for (size_t i = 0; i < pickle_->tuple_size(*order); ++i) {
    const PickleId entry = pickle_->element(*order, i);
    if (!pickle_->is(entry, Kind::kObject)) return false;
    const PickleId arguments = pickle_->arguments(entry);  // the tensor's axis, the mesh's axes
    if (!pickle_->is(arguments, Kind::kTuple) || pickle_->tuple_size(arguments) != 2) return false;
    const auto axis = torch_count(*pickle_, pickle_->element(arguments, 0));
    const auto axes = torch_dims(*pickle_, pickle_->element(arguments, 1));
    if (!axis || !axes || !axes.value()) return false;
    PTC_TRY(walk_->count());
    if (std::is_sorted(axes.value()->begin(), axes.value()->end())) continue;
    PTC_TRY(charge(sizeof(sharding.orders[0]) * 2));
    sharding.orders.emplace_back(*axis, *axes.value());
  }
  return true;
}

Result<std::shared_ptr<const TorchMesh>> TorchFileReader::mesh(PickleId id) {
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

Result<bool> TorchFileReader::read_mesh(PickleId id, TorchMesh& mesh) {
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

void TorchFileReader::find_box(const TorchTensor& tensor, TorchSharding& sharding) {
  if (sharding.mesh == nullptr) {  // a ShardedTensor says it itself
    if (sharding.box && sharding.box->extent != tensor.shape) sharding.box.reset();
    return;
  }
  for (const bool backwards : {false, true}) {
    const std::optional<Box> box = box_of(sharding, backwards);
    if (!box || box->extent != tensor.shape) continue;
    if (sharding.box && *sharding.box != *box) return sharding.box.reset();  // it may be either
    sharding.box = box;
  }
}
}  // namespace ptc
