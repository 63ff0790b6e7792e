#include <algorithm>

#include "store/base/json.h"
#include "store/base/utf8.h"
#include "store/codec/torch_file_reader.h"

namespace ptc {

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
  PTC_TRY(sharding.mesh_order, is_mesh_order(order));
  if (!mesh) return "mesh";
  PTC_TRY(sharding.mesh, this->mesh(*mesh));
  const size_t axes = sharding.placements.size();
  const bool known =
      sharding.mesh && (sharding.mesh->shape.empty() || sharding.mesh->shape.size() == axes) &&
      (sharding.mesh->coordinate.empty() || sharding.mesh->coordinate.size() == axes);
  return known ? nullptr : "mesh";
}

Result<bool> TorchFileReader::is_mesh_order(std::optional<PickleId> order) {
  if (!order || pickle_->is(*order, Kind::kNone)) return true;
  if (!pickle_->is(*order, Kind::kTuple) || pickle_->tuple_size(*order) > kMaxAxes) return false;
  for (size_t i = 0; i < pickle_->tuple_size(*order); ++i) {
    const PickleId entry = pickle_->element(*order, i);
    if (!pickle_->is(entry, Kind::kObject)) return false;
    const PickleId arguments = pickle_->arguments(entry);  // the tensor's axis, the mesh's axes
    if (!pickle_->is(arguments, Kind::kTuple) || pickle_->tuple_size(arguments) != 2) return false;
    const auto axes = torch_dims(*pickle_, pickle_->element(arguments, 1));
    if (!axes || !axes.value() || !std::is_sorted(axes.value()->begin(), axes.value()->end()))
      return false;
    PTC_TRY(walk_->count());
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
}  // namespace ptc
