#include "reshard/intake/distributed_optimizer.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "reshard/checkpoint/megatron_buckets.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/checkpoint/megatron_optimizer.h"
#include "reshard/intake/master_copies.h"
#include "store/base/json.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

constexpr std::string_view kMasterPrefix = "param.";

Result<> check_masters(int fd, const Found& file, int model_fd, const Found& model) {
  constexpr uint64_t kLooked = 16;  // elements
  std::unordered_map<std::string_view, const TensorEntry*> weights;
  for (const TensorEntry& tensor : model.tensors) weights.emplace(tensor.name, &tensor);
  for (const TensorEntry& tensor : file.tensors) {
    if (!tensor.name.starts_with(kMasterPrefix)) continue;
    const TensorEntry& weight =
        *weights.at(std::string_view(tensor.name).substr(kMasterPrefix.size()));
    const uint64_t size = dtype_bits(weight.dtype) / 8;
    const uint64_t count = std::min(kLooked, tensor.bytes / sizeof(float));
    std::array<float, kLooked> master;
    std::array<std::byte, kLooked * sizeof(float)> held;
    const std::span masters(master.data(), count);
    const std::span bytes(held.data(), count * size);
    PTC_TRY(read_exactly(fd, std::as_writable_bytes(masters), tensor.offset));
    PTC_TRY(read_exactly(model_fd, bytes, weight.offset));
    if (is_master_of(masters, weight.dtype, bytes)) continue;
    return invalid_argument(
        "what should be the master copy of {} is not what {} has: whose the optimizer's state is "
        "cannot be told; save with --ckpt-format torch_dist, or move the file away, to take the "
        "model without the optimizer's state",
        ptc::quoted(weight.name), model.source());
  }
  return ok();
}

/// The model in the same directory; nullptr: there is none.
const Found* model_of(const Found& file, const std::vector<Found>& found) {
  const std::string path =
      file.path.substr(0, file.path.size() - kMegatronBuckets.size()) + std::string(kMegatronFile);
  const auto model = std::find_if(found.begin(), found.end(), [&](const Found& other) {
    return other.rank == file.rank && other.path == path && other.node == file.node &&
           other.megatron.has_value();
  });
  return model == found.end() ? nullptr : &*model;
}

Result<> read_one(int dir_fd, Found& file, const Found& model) {
  std::vector<MegatronParameter> parameters;
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorEntry& tensor = model.tensors[i];
    if (!model.is_other_name(i) && !tensor.name.starts_with("optimizer.") &&
        is_megatron_parameter(tensor.name, tensor.dtype))
      parameters.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, file.source(), file.version).open());
  const ReadAt read = [&](uint64_t offset, std::span<std::byte> into) {
    return read_exactly(fd.get(), into, offset);
  };
  PTC_TRY(file.header, megatron_buckets_outline(read, file.version.bytes, std::move(parameters),
                                                MegatronDdp::of(*model.megatron)));
  file.header_bytes = file.header.size();
  PTC_TRY(auto tensors, megatron_buckets_format().tensors({file.header, file.version.bytes},
                                                          file.path, std::nullopt));
  file.tensors = std::move(tensors.tensors);
  file.of_megatron_stage = tensors.of_megatron_stage;
  file.has_tensors = true;
  for (const TensorEntry& tensor : file.tensors) {
    PTC_TRY(tensor_path(tensor.name));
  }
  PTC_TRY(const UniqueFd model_fd, FileToHash(dir_fd, model.source(), model.version).open());
  return check_masters(fd.get(), file, model_fd.get(), model);
}

}  // namespace

Result<> read_distributed_optimizer(int dir_fd, std::vector<Found>& found) {
  for (Found& file : found) {
    if (!is_megatron_buckets(file.path) || file.node != nullptr) continue;
    const Found* model = model_of(file, found);
    if (model == nullptr)
      return invalid_argument(
          "{} has the state of the distributed optimizer in buckets, and there is no {} of "
          "Megatron-LM's beside it, which says what lies where: move the file away, to take the "
          "rest without it",
          file.source(), kMegatronFile);
    Result<> read = read_one(dir_fd, file, *model);
    if (read.has_error()) return std::move(read).error().with_context(file.source());
  }
  return ok();
}

Result<> check_distributed_optimizer(const LayoutSpec& spec, const std::vector<Found>& found) {
  // By directory, stage, tensor-parallel and expert rank: of data-parallel ranks the first has it.
  using Of = std::tuple<std::string_view, uint32_t, uint32_t, uint32_t>;
  std::map<std::string_view, const Found*> first;  // by directory
  std::set<Of> with_state;
  const auto of = [&](const Found& file) {
    const RankCoords at = spec.coords(file.rank);
    return Of(std::string_view(file.path).substr(0, file.path.rfind('/') + 1), at.pp, at.tp, at.ep);
  };
  for (const Found& file : found) {
    if (!file.of_megatron_stage) continue;
    first.try_emplace(std::get<0>(of(file)), &file);
    with_state.insert(of(file));
    if (spec.sizes.ep == 1 || spec.coords(file.rank).ep > 0) continue;
    PTC_TRY(const auto absent, megatron_buckets_absent({file.header, file.version.bytes}));
    if (!absent.empty())
      return invalid_argument(
          "{} has no {}, which the first expert rank has: the state is not all there",
          file.source(), ptc::quoted(absent.front().name));
  }
  for (const Found& file : found) {
    if (!file.megatron || with_state.contains(of(file))) continue;
    const auto known = first.find(std::get<0>(of(file)));
    if (known == first.end() || !file.path.ends_with(kMegatronFile)) continue;
    return invalid_argument(
        "there is no {} beside {}, and there is {}: the state is not all there; move the others "
        "away, to take the model without it",
        kMegatronBuckets, file.source(), known->second->source());
  }
  return ok();
}

}  // namespace ptc
