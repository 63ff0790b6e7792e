#include "reshard/intake/megatron_tree.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "reshard/checkpoint/megatron_buckets.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/intake/distributed_optimizer.h"
#include "reshard/intake/tree_format.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kTp = "tensor_model_parallel_size", kPp = "pipeline_model_parallel_size",
                           kEp = "expert_model_parallel_size", kEtp = "expert_tensor_parallel_size",
                           kVpp = "virtual_pipeline_model_parallel_size", kLayers = "num_layers",
                           kStageLayout = "pipeline_model_parallel_layout";

/// The place of a file in its tree, wherever that is.
std::optional<MegatronPlace> place_of(const Found& file) {
  if (file.at.empty()) return std::nullopt;
  std::string_view path = file.at;
  if (const std::string rank = fmt::format("rank/{}/", file.rank); path.starts_with(rank))
    path.remove_prefix(rank.size());
  return megatron_place(path);
}

bool is_in_tree(const Found& file) {
  return !file.at.empty() && !file.at.starts_with("rank/") && megatron_place(file.at).has_value();
}

Error argument_differs(const Found& file, std::string_view what, const std::string& value,
                       const std::string& expected) {
  return invalid_argument("{}: its args say {} {}, and {}", file.source(), what, value, expected);
}

/// What all files must have in common.
Result<> check_alike(const std::vector<const Found*>& files) {
  const Found& first = *files.front();
  for (const Found* file : files) {
    if (file->megatron->chunks != first.megatron->chunks)
      return invalid_argument(
          "{} and {} have other stretches of layers (model0, model1 …): {} and {} of them",
          first.source(), file->source(), first.megatron->chunks.size(),
          file->megatron->chunks.size());
    if (file->megatron->iteration != first.megatron->iteration)
      return invalid_argument("{} is of iteration {}, and {} of iteration {}", file->source(),
                              file->megatron->iteration.value_or(0), first.source(),
                              first.megatron->iteration.value_or(0));
    for (const auto& arguments : {first.megatron->arguments, file->megatron->arguments})
      for (const auto& [name, value] : arguments) {
        const auto one = first.megatron->argument(name), other = file->megatron->argument(name);
        if (one == other) continue;
        auto text = [](const std::optional<int64_t>& number) {
          return number ? std::to_string(*number) : std::string("nothing");
        };
        return argument_differs(*file, name, text(other),
                                fmt::format("those of {} say {}", first.source(), text(one)));
      }
  }
  return ok();
}

/// Of a virtual pipeline each stage has a model0, model1 …, and no `model`.
Result<> check_chunks(const Found& file) {
  const MegatronFile& megatron = *file.megatron;
  const std::set<uint32_t>& chunks = megatron.chunks;
  const auto said = megatron.argument(kVpp);
  if (chunks.empty()) {
    if (said.value_or(1) <= 1) return ok();
    return invalid_argument("{}: its args say {} {}, and it has no model0, model1 …", file.source(),
                            kVpp, *said);
  }
  if (megatron.has_model)
    return invalid_argument(
        "{} has both `model` and `model{}`: which of them is its stage's is "
        "not said",
        file.source(), *chunks.begin());
  const int64_t count = said.value_or(std::max<int64_t>(*chunks.rbegin() + int64_t{1}, 2));
  for (int64_t chunk = 0; chunk < count; ++chunk)
    if (chunk > *chunks.rbegin() || !chunks.contains(static_cast<uint32_t>(chunk)))
      return invalid_argument(
          "{} has model{}{}, and no model{} with tensors: of a virtual pipeline each stage has all "
          "of its {} stretches of layers",
          file.source(), *chunks.begin(), chunks.size() > 1 ? " and more" : "", chunk, count);
  if (*chunks.rbegin() >= count)
    return invalid_argument("{} has model{}, and its args say {} {}", file.source(),
                            *chunks.rbegin(), kVpp, count);
  if (megatron.argument(kPp).value_or(2) == 1)
    return invalid_argument(
        "{} has model0, model1 …, and its args say {} 1: of one stage there "
        "are no stretches of layers",
        file.source(), kPp);
  return ok();
}

/// Stretches of layers of a stage.
uint32_t chunks_of(const MegatronFile& megatron) {
  return std::max<uint32_t>(1, static_cast<uint32_t>(megatron.chunks.size()));
}

/// What is not taken, of any file.
Result<> check_kind(const Found& file, uint32_t pp) {
  const MegatronFile& megatron = *file.megatron;
  PTC_TRY(check_chunks(file));
  if (const auto etp = megatron.argument(kEtp);
      etp && *etp != megatron.size(kTp) && megatron.argument("num_experts").value_or(0) > 0)
    return invalid_argument(
        "{}: its args say {} {} and {} {}: its experts are cut otherwise than the rest; save with "
        "--ckpt-format torch_dist",
        file.source(), kEtp, *etp, kTp, megatron.size(kTp));
  if (pp > 1 && !megatron.of_layer.empty())
    return invalid_argument(
        "{}: {} is a layer's own and no tensor: it cannot follow the layer to another stage",
        file.source(), ptc::quoted(megatron.of_layer));
  return ok();
}

/// The layers of a file's stage, or of one of its stretches of layers, by their names.
uint32_t layers_in(const Found& file, uint32_t chunk) {
  uint32_t layers = 0;
  const std::string of_chunk = fmt::format("model{}.", chunk);
  for (const TensorEntry& tensor : file.tensors) {
    if (!file.megatron->chunks.empty() && !tensor.name.starts_with(of_chunk)) continue;
    constexpr std::string_view kNames[] = {"decoder.layers.", "encoder.layers."};
    for (const std::string_view begin : kNames) {
      const size_t at = tensor.name.find(begin);
      if (at == std::string::npos || (at > 0 && tensor.name[at - 1] != '.')) continue;
      uint32_t layer = 0;
      const char* const digits = tensor.name.data() + at + begin.size();
      const char* const end = tensor.name.data() + tensor.name.size();
      if (std::from_chars(digits, end, layer).ec == std::errc() && layer < INT32_MAX)
        layers = std::max(layers, layer + 1);
    }
  }
  return layers;
}

bool names_other_places(const LayoutSpec& spec) {
  return spec.embedding_chunk() != 0 || spec.head_chunk() + 1 != spec.chunks() ||
         spec.mtp_chunk() != spec.head_chunk();
}

/// Layers of each stretch of layers, as `args` say; nullopt: in a way that is not known here.
std::optional<std::vector<int64_t>> layers_by_arguments(const MegatronFile& megatron, uint32_t pp,
                                                        uint32_t vpp) {
  const auto layers = megatron.argument(kLayers);
  if (!layers || *layers <= 0) return std::nullopt;
  constexpr std::string_view kOwnWays[] = {"account_for_embedding_in_pipeline_split",
                                           "account_for_loss_in_pipeline_split",
                                           "standalone_embedding_stage", kStageLayout};
  for (const std::string_view flag : kOwnWays)
    if (megatron.flag(flag)) return std::nullopt;
  const auto first = megatron.argument("decoder_first_pipeline_num_layers"),
             last = megatron.argument("decoder_last_pipeline_num_layers");
  for (const auto& of_stage : {first, last})
    if (of_stage && (*of_stage < 0 || *of_stage > *layers)) return std::nullopt;
  const int64_t stages = int64_t{pp} - (first ? 1 : 0) - (last ? 1 : 0);
  const int64_t rest = *layers - first.value_or(0) - last.value_or(0);
  if (stages < 0 || rest < 0 || (stages == 0 ? rest != 0 : rest % stages != 0)) return std::nullopt;
  std::vector<int64_t> counts(pp, stages == 0 ? 0 : rest / stages);
  if (first) counts.front() = *first;
  if (last) counts.back() = *last;
  std::vector<int64_t> of_chunks;  // a stage's layers, in equal stretches
  for (uint32_t chunk = 0; chunk < pp * vpp; ++chunk) {
    if (counts[chunk % pp] % vpp != 0) return std::nullopt;
    of_chunks.push_back(counts[chunk % pp] / vpp);
  }
  return of_chunks;
}

/// Ranks count their experts alike: what one has of a stage, by its own numbers, all expert ranks
/// have.
Result<> check_expert_ranks(const LayoutSpec& spec, const std::vector<const Found*>& files) {
  if (spec.sizes.ep == 1) return ok();
  std::map<uint32_t, std::pair<const Found*, std::set<std::string_view>>> of_stage;
  for (const Found* file : files) {
    std::set<std::string_view> names;
    for (const TensorEntry& tensor : file->tensors) names.insert(tensor.name);
    const auto [first, is_new] = of_stage.try_emplace(spec.coords(file->rank).pp);
    auto& [first_file, first_names] = first->second;
    if (is_new) first_file = file, first_names = std::move(names);
    else if (names != first_names) {
      const auto lacks = [](const std::set<std::string_view>& all, const auto& other) {
        const auto name = std::find_if(all.begin(), all.end(),
                                       [&](std::string_view one) { return !other.contains(one); });
        return name == all.end() ? std::string_view() : *name;
      };
      const std::string_view absent = lacks(first_names, names), more = lacks(names, first_names);
      return invalid_argument("{} has no {}, which {} has: they are of one stage",
                              absent.empty() ? first_file->source() : file->source(),
                              ptc::quoted(absent.empty() ? more : absent),
                              absent.empty() ? file->source() : first_file->source());
    }
  }
  return ok();
}

/// However Megatron orders its axes, of two ranks that differ in one alone that with the larger
/// number there has the larger rank. What says so of each file is its args' `rank`, unless several
/// have the same: a program that converts writes all files, and a layout has files made like
/// others.
Result<> check_writers(const LayoutSpec& spec, const std::vector<const Found*>& files) {
  std::set<int64_t> ranks;
  for (const Found* file : files)
    if (!file->megatron->rank || !ranks.insert(*file->megatron->rank).second) return ok();
  for (const auto& [axis, what] :
       {std::pair(&RankCoords::tp, "tp rank"), std::pair(&RankCoords::pp, "stage")}) {
    std::map<std::array<uint32_t, 5>, std::map<uint32_t, const Found*>> lines;  // along the axis
    for (const Found* file : files) {
      RankCoords at = spec.coords(file->rank);
      const uint32_t number = std::exchange(at.*axis, 0);
      lines[{at.tp, at.pp, at.ep, at.dp, at.cp}].emplace(number, file);
    }
    for (const auto& [others, line] : lines)
      for (auto last = line.begin(), next = last; ++next != line.end(); last = next)
        if (*next->second->megatron->rank < *last->second->megatron->rank)
          return invalid_argument(
              "{} is {} {} by its place and {} {} {}, and their args say rank {} and rank {}: have "
              "two directories been swapped?",
              last->second->source(), what, last->first, next->second->source(), what, next->first,
              *last->second->megatron->rank, *next->second->megatron->rank);
  }
  return ok();
}

/// Compares the stages' layers with what `args` say, and has `spec` say so, if nobody else does.
Result<> check_layers(bool may_set, LayoutSpec& spec, const std::vector<const Found*>& files) {
  const uint32_t pp = spec.sizes.pp, vpp = spec.vpp;
  const MegatronFile& megatron = *files.front()->megatron;
  std::vector<int64_t> counts(spec.chunks(), -1);
  int64_t sum = 0;
  const auto in_chunk = [&](uint32_t chunk) {
    return vpp > 1 ? fmt::format(" in model{}", chunk) : std::string();
  };
  for (const Found* file : files)
    for (uint32_t chunk = 0; chunk < vpp; ++chunk) {
      int64_t& count = counts[chunk * pp + spec.coords(file->rank).pp];
      const int64_t layers = layers_in(*file, chunk);
      if (count < 0) sum += layers;
      else if (count != layers)
        return invalid_argument("{} has {} layers{}, and other ranks of its stage have {}",
                                file->source(), layers, in_chunk(chunk), count);
      count = layers;
    }
  if (sum == 0) return ok();  // of another architecture
  const auto expected = layers_by_arguments(megatron, pp, vpp);
  for (const Found* file : files)
    for (uint32_t chunk = 0; chunk < vpp && expected; ++chunk) {
      const uint32_t stage = spec.coords(file->rank).pp, at = chunk * pp + stage;
      if ((*expected)[at] != counts[at])
        return invalid_argument(
            "{} has {} layer{}{}, and by its args ({} {}, {} {}{}) stage {} has {}{}",
            file->source(), counts[at], counts[at] == 1 ? "" : "s", in_chunk(chunk), kLayers,
            megatron.argument(kLayers).value_or(0), kPp, pp,
            vpp > 1 ? fmt::format(", {} {}", kVpp, vpp) : "", stage, (*expected)[at],
            vpp > 1 ? " there" : "");
    }
  if (const auto total = megatron.argument(kLayers); total && *total != sum)
    return invalid_argument("{}: its args say {} {}, and all stages together have {}",
                            files.front()->source(), kLayers, *total, sum);
  if (!may_set) return ok();
  LayoutSpec even = spec;
  even.forget_stages();
  // Who says nothing else has the embedding first and the head last.
  const bool elsewhere = !megatron.flag(kStageLayout) && names_other_places(spec);
  for (const LayoutSpec* candidate : {&spec, &even}) {
    if (candidate == &spec && elsewhere) continue;
    const auto begins = stage_boundaries(*candidate, static_cast<uint32_t>(sum));
    bool same = begins.has_value();
    for (uint32_t s = 0; same && s < spec.chunks(); ++s)
      same = begins.value()[s + 1] - begins.value()[s] == counts[s];
    if (!same) continue;
    if (candidate == &even) spec.forget_stages();
    return ok();
  }
  if (std::find(counts.begin(), counts.end(), 0) != counts.end())
    return invalid_argument(
        "{}: stage {} has no layers{}, which is not read from such a tree: save with "
        "--ckpt-format torch_dist",
        files.front()->source(), (std::find(counts.begin(), counts.end(), 0) - counts.begin()) % pp,
        in_chunk(
            static_cast<uint32_t>(std::find(counts.begin(), counts.end(), 0) - counts.begin()) /
            pp));
  spec.forget_stages();
  spec.stages.assign(counts.begin(), counts.end());
  return ok();
}

/// Sizes that `args` say, or else the numbers of the directories.
Result<ParallelConfig> sizes_of(const MegatronFile& megatron, const Found& file,
                                const std::vector<Found>& found) {
  ParallelConfig sizes;
  uint32_t tp = 0, pp = 0, ep = 0;
  const bool second_is_ep = megatron.argument(kPp).value_or(2) == 1 && megatron.size(kEp) > 1;
  for (const Found& other : found) {
    if (!is_in_tree(other)) continue;
    const std::vector<uint32_t> numbers = place_of(other)->numbers;
    tp = std::max(tp, numbers[0] + 1);
    if (numbers.size() > 1 && !second_is_ep) pp = std::max(pp, numbers[1] + 1);
    if (numbers.size() > 2) ep = std::max(ep, numbers[2] + 1);
  }
  auto take = [&](std::string_view name, uint32_t by_name, uint32_t& size) -> Result<> {
    const int64_t value = megatron.argument(name).value_or(std::max(by_name, 1u));
    if (value < 1 || value > static_cast<int64_t>(kMaxWorldSize))
      return invalid_argument("{}: its args say {} {}", file.source(), name, value);
    size = static_cast<uint32_t>(value);
    return ok();
  };
  PTC_TRY(take(kTp, tp, sizes.tp));
  PTC_TRY(take(kPp, pp, sizes.pp));
  PTC_TRY(take(kEp, ep, sizes.ep));
  if (sizes.world_size() > kMaxWorldSize)
    return invalid_argument("{}: its args say {} ranks", file.source(), sizes.world_size());
  return sizes;
}

/// ", ep 2" where there are several.
std::string ep_text(uint32_t ep) { return ep > 1 ? fmt::format(", ep {}", ep) : ""; }

/// Files of a tree get their ranks.
Result<> rank_tree(const LayoutSpec& spec, std::vector<Found>& found) {
  std::set<uint64_t> models;
  for (Found& file : found) {
    const auto place = place_of(file);
    if (!is_in_tree(file)) continue;
    const auto coords = megatron_coords(spec.sizes, place->numbers);
    if (!coords)
      return invalid_argument(
          "{} is of no rank of {} (tp {}, pp {}{}), as the args of its files say", file.source(),
          spec.name(), spec.sizes.tp, spec.sizes.pp, ep_text(spec.sizes.ep));
    file.rank = spec.order.global_rank(spec.sizes, *coords);
    if (file.megatron) models.insert(file.rank);
  }
  const ParallelConfig& sizes = spec.sizes;
  for (uint64_t i = 0; i < uint64_t{sizes.tp} * sizes.pp * sizes.ep; ++i) {
    const RankCoords at{.tp = static_cast<uint32_t>(i % sizes.tp),
                        .pp = static_cast<uint32_t>(i / sizes.tp / sizes.ep),
                        .ep = static_cast<uint32_t>(i / sizes.tp % sizes.ep)};
    if (models.contains(spec.order.global_rank(sizes, at))) continue;
    return invalid_argument(
        "there is no {}/{}, and the args of the others say {} {} and {} {}{}: the tree is not "
        "complete",
        megatron_rank_name(sizes, at), kMegatronFile, kTp, sizes.tp, kPp, sizes.pp,
        sizes.ep > 1 ? fmt::format(" and {} {}", kEp, sizes.ep) : "");
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.rank, a.path) < std::tie(b.rank, b.path);
  });
  for (size_t i = 1; i < found.size(); ++i)
    if (found[i].rank == found[i - 1].rank && found[i].path == found[i - 1].path)
      return invalid_argument("{} and {} are of one rank: remove one of them",
                              found[i - 1].source(), found[i].source());
  return ok();
}

/// What is below rank/<r>/ says the same as the layout.
Result<> check_ranks(const LayoutSpec& spec, const std::vector<Found>& found) {
  for (const Found& file : found) {
    const RankCoords at = spec.coords(file.rank);
    const auto place = place_of(file);
    if (place) {
      const auto coords = megatron_coords(spec.sizes, place->numbers);
      if (!coords || coords->tp != at.tp || coords->pp != at.pp || coords->ep != at.ep)
        return invalid_argument(
            "{}: under layout {} rank {} is tp rank {} of stage {}{}: say the writer's layout in a "
            "layout.json beside rank/",
            file.source(), spec.name(), file.rank, at.tp, at.pp,
            spec.sizes.ep > 1 ? fmt::format(", expert rank {}", at.ep) : "");
    }
    if (!file.megatron) continue;
    if (chunks_of(*file.megatron) != spec.vpp)
      return invalid_argument(
          "{} has {}, and layout {} has vpp {}: say the writer's layout in a layout.json beside "
          "rank/",
          file.source(),
          file.megatron->chunks.empty()
              ? std::string("a `model`")
              : fmt::format("model0 to model{}", chunks_of(*file.megatron) - 1),
          spec.name(), spec.vpp);
    for (const auto& [name, size] : {std::pair(kTp, spec.sizes.tp), std::pair(kPp, spec.sizes.pp),
                                     std::pair(kEp, spec.sizes.ep)}) {
      const auto value = file.megatron->argument(name);
      if (value && *value != size)
        return argument_differs(file, name, std::to_string(*value),
                                fmt::format("layout {} has {}: say the writer's layout in a "
                                            "layout.json beside rank/",
                                            spec.name(), size));
    }
  }
  return ok();
}

Error of_two_iterations(const std::string& one, const std::string& other) {
  return invalid_argument("{} and {} are of two iterations, and a checkpoint is one: move one away",
                          one, other);
}

/// Files of such a tree get the names that they have in a checkpoint; those of a tree in the place
/// of rank/ (`is_tree`) a number for each directory, until settle_megatron() knows their ranks.
/// Below rank/<r>/ a directory is of such a tree if a model_optim_rng.pt is in it.
/// kInvalidArgument: one rank has two.
Result<> name_megatron_files(bool is_tree, std::vector<Found>& found) {
  std::map<std::string, uint64_t, std::less<>> ranks;          // of a tree, by directory
  std::map<uint64_t, std::string> directories;                 // below rank/<r>/
  std::map<std::string, std::string, std::less<>> iterations;  // and the first file of each
  std::set<std::pair<uint64_t, std::string>> of_model;         // directories below rank/<r>/
  for (const Found& file : found)
    if (const auto place = megatron_place(file.path); place && place->path == kMegatronFile)
      of_model.emplace(file.rank, place->directory);
  for (Found& file : found) {
    const auto place = megatron_place(file.path);
    if (!place) continue;
    // Below rank/<r>/ directories may be called whatever their writer likes.
    if (!is_tree && !of_model.contains({file.rank, std::string(place->directory)})) continue;
    const std::string iteration(place->directory.substr(0, place->directory.find('/')));
    if (is_tree) {
      iterations.try_emplace(is_megatron_iteration(iteration) ? iteration : "", file.source());
      if (iterations.size() > 1)
        return of_two_iterations(iterations.begin()->second, iterations.rbegin()->second);
      file.rank = ranks.try_emplace(std::string(place->directory), ranks.size()).first->second;
    } else {
      const auto known = directories.try_emplace(file.rank, std::string(place->directory)).first;
      if (known->second != place->directory)
        return invalid_argument("rank/{} has {} and {}, and a rank has one of them", file.rank,
                                known->second, place->directory);
    }
    std::string path(place->path);
    file.at = file.source();
    file.path = std::move(path);
  }
  std::set<std::pair<uint64_t, std::string_view>> paths;
  for (const Found& file : found)
    if (!paths.emplace(file.rank, file.path).second)
      return invalid_argument("{} is there, and another {} of the same rank: remove one",
                              file.source(), file.path);
  return ok();
}

/// The files of a tree that are in the place of rank/, on whatever nodes: a number for each
/// directory, until settle_megatron() knows their ranks.
Result<> number_tree(std::vector<Found>& found) {
  std::map<std::string, uint64_t, std::less<>> ranks;  // by directory
  std::map<std::string, const Found*, std::less<>> iterations;
  for (Found& file : found) {
    if (!is_in_tree(file)) continue;
    const std::string directory(place_of(file)->directory);
    const std::string iteration = directory.substr(0, directory.find('/'));
    iterations.try_emplace(is_megatron_iteration(iteration) ? iteration : "", &file);
    if (iterations.size() > 1) {
      const Found &one = *iterations.begin()->second, &other = *iterations.rbegin()->second;
      return of_two_iterations(one.source(), other.source());
    }
    file.rank = ranks.try_emplace(directory, ranks.size()).first->second;
  }
  return ok();
}

/// Once all files are read: checks that they are of one model and the whole grid of ranks, and
/// gives those of a tree their ranks. `said`: `spec` is what the writer says of himself; else a
/// tree's own sizes count, and become `spec`. kInvalidArgument: what does not fit.
Result<> settle_megatron(bool said, LayoutSpec& spec, std::vector<Found>& found) {
  std::vector<const Found*> files;
  const bool is_tree = std::any_of(found.begin(), found.end(), is_in_tree);
  for (const Found& file : found)
    if (file.megatron) files.push_back(&file);
  if (files.empty()) {
    if (!is_tree) return ok();
    const auto file = std::find_if(found.begin(), found.end(), is_in_tree);
    return invalid_argument(
        "{} is in a tree of Megatron's, and no file there has args, checkpoint_version and a "
        "model",
        file->source());
  }
  PTC_TRY(check_alike(files));
  const MegatronFile megatron = *files.front()->megatron;
  for (const Found* file : files) {
    PTC_TRY(check_kind(*file, is_tree ? 2 : spec.sizes.pp));
  }
  if (!is_tree) {
    PTC_TRY(check_ranks(spec, found));
    PTC_TRY(check_writers(spec, files));
    PTC_TRY(check_expert_ranks(spec, files));
    return check_layers(false, spec, files);
  }
  PTC_TRY(const ParallelConfig sizes, sizes_of(megatron, *files.front(), found));
  const uint32_t vpp = chunks_of(megatron);
  if (uint64_t{sizes.pp} * vpp > kMaxWorldSize)
    return invalid_argument("{} has model0 to model{}", files.front()->source(), vpp - 1);
  const bool same = sizes.tp == spec.sizes.tp && sizes.pp == spec.sizes.pp &&
                    sizes.ep == spec.sizes.ep && spec.sizes.etp == 0 && vpp == spec.vpp;
  if (said && !same)
    return invalid_argument("layout.json says {}, and the args of {} tp {} and pp {}{}{}",
                            spec.name(), files.front()->source(), sizes.tp, sizes.pp,
                            ep_text(sizes.ep), vpp > 1 ? fmt::format(", vpp {}", vpp) : "");
  if (!said && (!same || spec.optimizer != OptimizerCut::kReplicated ||
                (vpp > 1 && spec.naming == Naming::kStage))) {
    spec = LayoutSpec();
    spec.sizes = sizes;
    spec.vpp = vpp;
  }
  if (vpp > 1 && sizes.pp == 1)
    return invalid_argument(
        "{} has model0, model1 …, and is of one stage, which has no stretches "
        "of layers",
        files.front()->source());
  PTC_TRY(rank_tree(spec, found));
  files.clear();
  for (const Found& file : found)
    if (file.megatron) files.push_back(&file);
  PTC_TRY(check_writers(spec, files));
  PTC_TRY(check_expert_ranks(spec, files));
  return check_layers(!said, spec, files);
}

class MegatronTrees final : public TreeFormat {
 public:
  std::string_view name() const override { return "Megatron-LM's own trees"; }

  bool is_there(const NamesThere& names, bool /*beside_others*/) const override {
    const auto is_rank = [](const std::string& name) {
      return megatron_place(name + "/.").has_value();
    };
    return std::any_of(names.top().begin(), names.top().end(), [&](const std::string& name) {
      if (!is_rank(name) && !is_megatron_iteration(name)) return false;
      const auto below = names.in(name);
      return below && (is_rank(name) || std::any_of(below->begin(), below->end(), is_rank));
    });
  }
  Result<> name_files(bool in_place, std::vector<Found>& found) const override {
    return name_megatron_files(in_place, found);
  }

  bool shows(const Found& file) const override { return megatron_place(file.at).has_value(); }
  bool says_ranks(const std::vector<Found>& found) const override {
    return std::any_of(found.begin(), found.end(), [&](const Found& file) { return shows(file); });
  }

  Result<> join_sets(std::vector<Found>& found) const override { return number_tree(found); }

  // Its models are read as torch.save's; they have what lies where in the distributed optimizer's.
  bool is_read_later(std::string_view path) const override { return is_megatron_buckets(path); }
  Result<> read_rest(int dir_fd, std::vector<Found>& found) const override {
    return read_distributed_optimizer(dir_fd, found);
  }

  Result<> settle(bool said, LayoutSpec& spec, std::vector<Found>& found) const override {
    PTC_TRY(settle_megatron(said, spec, found));
    PTC_TRY(check_distributed_optimizer(spec, found));
    for (Found& file : found) {
      file.by_stage = file.megatron.has_value() || file.of_megatron_stage;
      if (!file.of_megatron_stage || spec.sizes.ep == 1) continue;
      PTC_TRY(file.with_others, megatron_buckets_absent({file.header, file.version.bytes}));
    }
    return ok();
  }
  /// Of all that says it what the files were written with.
  std::string config(const std::vector<Found>& found, std::string beside) const override {
    for (const Found& file : found)
      if (file.megatron) return file.megatron->config_text();
    return beside;
  }
};

}  // namespace

std::optional<MegatronPlace> megatron_place(std::string_view path) {
  size_t begin = 0;
  if (const size_t slash = path.find('/');
      slash != path.npos && is_megatron_iteration(path.substr(0, slash)))
    begin = slash + 1;
  const size_t end = path.find('/', begin);
  if (end == path.npos) return std::nullopt;
  MegatronPlace place{path.substr(0, end), path.substr(end + 1),
                      megatron_rank_numbers(path.substr(begin, end - begin))};
  return place.numbers.empty() ? std::nullopt : std::optional(std::move(place));
}

const TreeFormat& megatron_trees() {
  static const MegatronTrees trees;
  return trees;
}

}  // namespace ptc
