#include "reshard/intake/commit.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/shard_boxes.h"
#include "reshard/intake/box_sets.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/flat_files.h"
#include "reshard/intake/found_files.h"
#include "reshard/intake/hash_questions.h"
#include "reshard/intake/rank_views.h"
#include "reshard/intake/tree_format.h"
#include "store/base/fan_out.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

// config.json of the first rank that has one; empty if none has.
Result<std::string> find_config(int dir_fd, const std::vector<Found>& found,
                                const std::vector<FilesElsewhere>& elsewhere) {
  for (const Found& file : found)
    if (file.path == "config.json" && file.node == nullptr)
      return read_text_file(dir_fd, file.source(), kMaxConfigBytes, FileKind::kOwn);
  for (const FilesElsewhere& node : elsewhere) {
    PTC_TRY(auto text, text_in_listing(node.listing, "config"));
    if (text) return *text;
  }
  return std::string();
}

struct Rules {
  std::shared_ptr<const RuleSet> rules;
  RuleSet::Facts facts;
  /// With those of the job's last checkpoint, which hold if this is the same model.
  std::optional<RuleSet::Facts> with_known;
};

/// What was written under a layout with rules of its own is cut by those.
Result<Rules> choose_rules(const CommitRequest& request, const LayoutSpec& spec,
                           const std::vector<Found>& found, const std::string& config) {
  Rules chosen;
  if (spec.rules) {
    chosen.rules = spec.rules.set();
  } else if (request.rules_text) {
    auto parsed = RuleSet::parse(*request.rules_text);
    if (parsed.has_error()) return std::move(parsed).error().with_context("rules.json");
    chosen.rules = std::move(parsed).value();
  } else {
    std::vector<std::string> names;
    for (const Found& file : found)
      for (const TensorEntry& tensor : file.tensors) names.push_back(tensor.name);
    std::optional<std::string> model_type = config.empty() ? std::nullopt : model_type_of(config);
    chosen.rules = RuleSet::choose(model_type, names);
    if (chosen.rules == nullptr) chosen.rules = RuleSet::none();
  }
  auto facts = chosen.rules->facts(config);
  if (facts.has_error()) return std::move(facts).error().with_context("config.json");
  chosen.facts = std::move(facts).value();
  const Model* known = request.known_model.get();
  if (config.empty() && known != nullptr && known->rules().family() == chosen.rules->family()) {
    RuleSet::Facts& facts_of_both = chosen.with_known.emplace(chosen.facts);
    for (const auto& [fact, value] : known->facts().numbers)
      facts_of_both.numbers.try_emplace(fact, value);
    if (!facts_of_both.tied) facts_of_both.tied = known->facts().tied;
  }
  return chosen;
}

/// Whether parameters of it are in `known`, and all of these as large there: there may be others.
bool is_of_same_model(const Model& model, const Model& known) {
  std::unordered_map<std::string_view, Shape> shapes;
  for (const TensorInfo& tensor : known.tensors())
    shapes.emplace(tensor.name, tensor.shape_in_files());
  bool any = false;
  for (const TensorInfo& tensor : model.tensors()) {
    const auto there = shapes.find(tensor.name);
    if (there == shapes.end()) continue;
    if (there->second != tensor.shape_in_files()) return false;
    any = true;
  }
  return any;
}

/// By the facts of the last checkpoint, if it is of that model; else by what the files say alone.
Result<Model::Inferred> infer_by(const Rules& rules, const CommitRequest& request,
                                 const LayoutSpec& spec, const std::vector<WrittenRank>& ranks) {
  if (rules.with_known) {
    auto inferred = Model::infer(rules.rules, *rules.with_known, spec, ranks);
    if (inferred.has_value() && is_of_same_model(inferred.value().model, *request.known_model))
      return inferred;
  }
  return Model::infer(rules.rules, rules.facts, spec, ranks);
}

Error no_tensors() {
  return invalid_argument(
      "there is no tensor in it that has a name: neither in .safetensors or .npy files, nor in "
      "what "
      "torch.save or PyTorch's distributed checkpointing wrote");
}

constexpr std::string_view kOtherMesh =
    "; with HSDP \"dp_shard\" says among how many ranks, and \"shard_over\" whether over "
    "context- or expert-parallel ones too; of a mesh that no layout cuts like, take "
    "dcp.save or tools/python's ptc.save";

/// Why ranks do not fit the layout, with what may be done where torch.save wrote DTensors.
Error with_advice(Error error, const std::vector<Found>& found) {
  const bool dtensors = std::any_of(found.begin(), found.end(), [](const Found& file) {
    return !file.spread() && std::any_of(file.said.begin(), file.said.end(),
                                         [](const auto& said) { return said.has_value(); });
  });
  if (!dtensors) return error;
  return Error(error.code(), fmt::format("{} (they are DTensors{})", error.message(), kOtherMesh));
}

/// A DTensor says which part of the whole it is; the layout must say the same.
Result<> check_said(const Found& file, size_t position, const SubTensor& part, const Shape& whole,
                    const LayoutSpec& spec) {
  if (file.said.empty() || !file.said[position]) return ok();
  const SaidPart& said = *file.said[position];
  const bool none = part.pieces.empty() || part.pieces.front().global.empty();
  const bool same =
      said.whole == whole && (said.box.empty() ? none
                                               : part.pieces.size() == 1 && !part.flat &&
                                                     part.pieces.front().global == said.box);
  if (same) return ok();
  return invalid_argument(
      "{}: tensor {} is a DTensor that says it is {} of {}, but under layout {} this rank holds {} "
      "of {}: say the writer's layout in a layout.json beside rank/{}",
      file.source(), ptc::quoted(file.tensors[position].name), said.box.to_string(),
      said.whole.to_string(), spec.name(),
      none || part.flat ? "another part" : part.pieces.front().global.to_string(),
      whole.to_string(), kOtherMesh);
}

Result<std::shared_ptr<const Model>> infer(const CommitRequest& request, const LayoutSpec& spec,
                                           std::vector<Found>& found, const std::string& config) {
  PTC_TRY(auto rules, choose_rules(request, spec, found, config));
  struct Array {
    Found* file;
    uint32_t position;  // in its tensors
  };
  std::vector<WrittenRank> ranks;
  std::vector<std::vector<std::vector<Array>>>
      origin;  // by rank and tensor: of a set of boxes several; none: in another rank's file
  std::unordered_map<std::string, size_t> in_sets;  // of the last rank: set and name → tensor
  for (Found& file : found) {
    if (!file.has_tensors) continue;
    if (ranks.empty() || ranks.back().global_rank != file.rank) {
      ranks.push_back({file.rank, spec.coords(file.rank), {}});
      origin.emplace_back();
      in_sets.clear();
    }
    const std::string& path = file.set.empty() ? file.path : file.set;
    for (uint32_t i = 0; i < file.tensors.size(); ++i) {
      const TensorEntry& tensor = file.tensors[i];
      if (!file.boxes.empty() && !file.spread()) {
        const auto [known, is_new] =
            in_sets.try_emplace(path + '\0' + tensor.name, origin.back().size());
        if (!is_new) {
          const Array& first = origin.back()[known->second].front();
          if (first.file->tensors[first.position].dtype != tensor.dtype)
            return invalid_argument("tensor {} has another type in {} than in {}",
                                    ptc::quoted(tensor.name), file.source(), first.file->source());
          origin.back()[known->second].push_back({&file, i});
          continue;
        }
      }
      ranks.back().tensors.push_back({path, tensor.name, tensor.dtype, tensor.shape});
      if (file.spread()) ranks.back().tensors.back().said = file.said[i];
      ranks.back().tensors.back().in_boxes = !file.said.empty() && file.said[i].has_value();
      ranks.back().tensors.back().by_stage = file.by_stage;
      origin.back().push_back({{&file, i}});
    }
    for (const TensorEntry& tensor : file.with_others) {
      ranks.back().tensors.push_back({path, tensor.name, tensor.dtype, tensor.shape});
      ranks.back().tensors.back().by_stage = file.by_stage;
      origin.back().emplace_back();
    }
    file.model_tensor.resize(file.tensors.size());
    file.parts.resize(file.tensors.size());
  }
  if (ranks.empty()) return no_tensors();
  std::unordered_map<const WrittenTensor*, Box> wholes;  // of the tensors that are there in boxes
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < origin[r].size(); ++i) {
      if (origin[r][i].empty()) continue;
      const Found& first = *origin[r][i].front().file;
      if (first.boxes.empty() || first.spread()) continue;
      std::vector<Box> boxes;
      for (const Array& array : origin[r][i]) boxes.push_back(array.file->boxes[array.position]);
      WrittenTensor& tensor = ranks[r].tensors[i];
      auto whole = union_of_boxes(std::move(boxes));
      if (whole.has_error())
        return std::move(whole).error().with_context(
            fmt::format("{} and its like: tensor {}", origin[r][i].front().file->source(),
                        ptc::quoted(tensor.name)));
      tensor.shape = whole.value().extent;
      tensor.in_boxes = true;
      wholes.emplace(&tensor, whole.value());
    }
  }
  // What FSDP left whole, and each rank has of that very shape again, as in files that were
  // composed of a checkpoint, is no rows.
  if (spec.optimizer == OptimizerCut::kFsdp && !request.known_whole.empty()) {
    for (WrittenRank& rank : ranks)
      for (WrittenTensor& tensor : rank.tensors) {
        const auto known = request.known_whole.find({tensor.file, tensor.name});
        if (tensor.said || known == request.known_whole.end() || known->second != tensor.shape)
          continue;
        tensor.said = SaidPart{Box::whole(tensor.shape), tensor.shape};
        tensor.was_whole = true;
      }
  }
  auto inferred_or_why = infer_by(rules, request, spec, ranks);
  if (inferred_or_why.has_error()) return with_advice(std::move(inferred_or_why).error(), found);
  Model::Inferred inferred = std::move(inferred_or_why).value();
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < origin[r].size(); ++i) {
      const uint32_t tensor = inferred.tensor_of[r][i];
      PTC_TRY(auto part, inferred.model.slice(tensor, spec, state_of(spec, ranks[r].coords)));
      PTC_CHECK(part.has_value());
      const auto whole = wholes.find(&ranks[r].tensors[i]);
      for (const auto& [file, position] : origin[r][i]) {
        file->model_tensor[position] = tensor;
        if (whole == wholes.end()) {
          if (file->spread() && inferred.cut_otherwise.contains(file->path)) {
            file->parts[position] = box_alone(file->boxes[position]);
            continue;
          }
          PTC_TRY(check_said(*file, position, *part, inferred.model.tensors()[tensor].shape, spec));
          file->parts[position] = *part;
          continue;
        }
        auto box = part_of_box(*part, whole->second, file->boxes[position]);
        if (box.has_error())
          return invalid_argument(
              "{}: tensor {}: {} under layout {}, in which it was committed: say the writer's "
              "layout in "
              "a layout.json beside rank/",
              file->source(), ptc::quoted(file->tensors[position].name), box.error().message(),
              spec.name());
        file->parts[position] = std::move(box).value();
      }
    }
  }
  PTC_TRY(settle_spread(inferred, found));
  return std::make_shared<const Model>(std::move(inferred.model));
}

// Hashes all pieces of all files, each node those that it has.
Result<> hash_found(const CommitRequest& request, const Model& model,
                    const std::vector<FilesElsewhere>& elsewhere, std::vector<Found>& found,
                    Executor& executor, HashCache& hashes, std::stop_token stop) {
  const int dir_fd = request.dir_fd;
  uint64_t bytes_total = 0;
  for (const Found& file : found)
    for (const TensorEntry& tensor : file.tensors) bytes_total += tensor.bytes;
  if (request.hashing_begins) request.hashing_begins(bytes_total);
  std::vector<HashQuestions> questions;  // by node
  std::vector<std::string> first;
  for (const FilesElsewhere& node : elsewhere)
    first.push_back(questions.emplace_back(model, node, found, request.hashed_at_once).next());
  std::vector<Result<>> taken(elsewhere.size(), ok());
  std::atomic<bool> failed = false;  // then nobody is asked any more
  const auto next = [&](size_t i, const Result<std::string>& answer) -> std::optional<std::string> {
    if (answer.has_value()) taken[i] = questions[i].take(answer.value());
    if (answer.has_error() || taken[i].has_error()) failed = true;
    else if (request.bytes_hashed != nullptr) *request.bytes_hashed += questions[i].bytes_asked();
    if (failed || questions[i].over()) return std::nullopt;
    return questions[i].next();
  };
  // Waited for by one thread, while this one hashes what is here.
  Answers<std::vector<Result<std::string>>> hashed_elsewhere(
      elsewhere.empty() ? 0 : 1, [&](size_t) -> Result<std::vector<Result<std::string>>> {
        return request.hash_elsewhere(first, next);
      });
  auto hash_here = [&]() -> Result<> {
    std::vector<ArrayToHash> arrays;
    std::vector<Found*> origin;
    for (Found& file : found) {
      if (file.node != nullptr) continue;
      if (!file.has_tensors) {
        PTC_TRY(file.whole, hash_file(*to_hash(dir_fd, file), FileState::kSealed, hashes, stop));
        continue;
      }
      const auto source = to_hash(dir_fd, file);
      for (uint32_t i = 0; i < file.tensors.size(); ++i) {
        arrays.push_back({source, i, file.tensors[i], file.parts[i],
                          model.tensors()[file.model_tensor[i]].shape});
        origin.push_back(&file);
        file.padding.emplace_back();
        if (file.set.empty() && !file.is_other_name(i)) {
          PTC_TRY(file.padding.back(), find_padding(*source, file.tensors[i], file.parts[i]));
        }
      }
    }
    PTC_TRY(auto sums, hash_arrays(arrays, executor, hashes, stop, request.bytes_hashed));
    for (size_t i = 0; i < arrays.size(); ++i) origin[i]->sums.push_back(std::move(sums[i]));
    return ok();
  };
  Result<> hashed = hash_here();
  if (hashed.has_error()) failed = true;
  std::vector<Result<std::vector<Result<std::string>>>> waited = hashed_elsewhere.wait();
  if (hashed.has_value() && !waited.empty() && waited[0].has_error()) hashed = waited[0].error();
  for (size_t i = 0; i < elsewhere.size() && hashed.has_value(); ++i) {
    Result<std::string>& answer = waited[0].value()[i];
    if (answer.has_error()) hashed = std::move(answer).error();
    else hashed = taken[i];
  }
  return hashed;
}

// Compares what more than one rank holds, and adds up.
Result<std::vector<Checksum>> add_up(const Model& model, const std::vector<Found>& found) {
  struct Part {
    Checksum sum;
    const Found* file;
  };
  std::vector<std::unordered_map<Box, Part, BoxHash>> parts(model.tensors().size());
  std::vector<Checksum> totals(model.tensors().size());
  std::vector<uint64_t> elements(model.tensors().size());
  for (const Found& file : found) {
    for (size_t i = 0; i < file.tensors.size() && file.has_tensors; ++i) {
      const uint32_t tensor = file.model_tensor[i];
      for (size_t p = 0; p < file.parts[i].pieces.size(); ++p) {
        const Box& box = file.parts[i].pieces[p].global;
        if (box.empty()) continue;
        const Checksum& sum = file.sums[i][p];
        auto [same, is_new] = parts[tensor].try_emplace(box, Part{sum, &file});
        if (is_new) {
          totals[tensor] += sum;
          elements[tensor] += box.volume();
        } else if (same->second.sum != sum) {
          return invalid_argument(
              "{} and {} both hold {} of tensor {}, but with different values: "
              "replicas must be equal",
              same->second.file->source(), file.source(), box.to_string(),
              model.tensors()[tensor].name);
        }
      }
    }
  }
  for (uint32_t tensor = 0; tensor < totals.size(); ++tensor) {
    PTC_TRY(const uint64_t all, num_elements(model.tensors()[tensor].shape));
    if (elements[tensor] != all)  // parts are equal or disjoint, and nothing is missing, unless
                                  // shards of replicas differ
      return invalid_argument(
          "ranks that hold the same of tensor {} have cut it in different places: keep the files "
          "of one",
          ptc::quoted(model.tensors()[tensor].name));
  }
  return totals;
}

/// nullopt: nobody says.
Result<std::optional<LayoutSpec>> writer_layout(const CommitRequest& request,
                                                const std::vector<FilesElsewhere>& elsewhere) {
  std::optional<std::string> text;
  struct stat st {};
  if (request.dir_fd >= 0 &&
      fstatat(request.dir_fd, "layout.json", &st, AT_SYMLINK_NOFOLLOW) == 0) {
    PTC_TRY(text, read_text_file(request.dir_fd, "layout.json", 1 << 20, FileKind::kOwn));
  }
  for (const FilesElsewhere& node : elsewhere) {
    PTC_TRY(auto theirs, text_in_listing(node.listing, "layout"));
    if (theirs && text && *theirs != *text)
      return invalid_argument(
          "layout.json on node {} is another than on the others: the ranks of a "
          "checkpoint have one layout",
          node.node);
    if (theirs) text = theirs;
  }
  if (!text) return std::optional<LayoutSpec>();
  auto layout = Layout::parse(*text);
  if (layout.has_error()) return std::move(layout).error().with_context("layout.json");
  LayoutSpec spec = std::move(layout.value().spec);
  const std::string& rules = layout.value().rules;
  const LayoutRules& in_force = request.in_force.rules;
  if (in_force && (rules == in_force.id() || rules == kRulesFile)) spec.rules = in_force;
  else if (!rules.empty() && rules != kRulesFile)
    return invalid_argument("layout.json: {}: 'rules' are {}, and those of the layout in force {}",
                            json_place(*text, {"rules"}), rules,
                            in_force ? "are " + in_force.id() : "the job's own or built in");
  return std::optional(std::move(spec));
}

/// The layout that the files say, whatever is in force: what a framework wrote may, and what else
/// lies in the place of rank/ is a single process', if nobody says otherwise.
std::optional<LayoutSpec> layout_by_files(bool said, const std::vector<Found>& found) {
  for (const TreeFormat* tree : tree_formats())
    if (auto layout = tree->layout(said, found)) return layout;
  return !said && is_flat(found) ? std::optional(LayoutSpec()) : std::nullopt;
}

Result<CommitDraft> draft_it(const CommitRequest& request,
                             const std::vector<FilesElsewhere>& elsewhere, Executor& executor,
                             HashCache& hashes, std::stop_token stop) {
  PTC_TRY(const auto said, writer_layout(request, elsewhere));
  LayoutSpec spec = said.value_or(request.in_force);
  std::vector<Found> found;
  if (request.dir_fd >= 0) {
    PTC_TRY(found, find_files(request.dir_fd, !elsewhere.empty()));
    PTC_TRY(leave_out_views(request.dir_fd, found, executor, stop));
  }
  for (const FilesElsewhere& node : elsewhere) {
    auto theirs = read_listing(node);
    if (theirs.has_error()) return std::move(theirs).error().with_context("node " + node.node);
    std::move(theirs.value().begin(), theirs.value().end(), std::back_inserter(found));
  }
  if (found.empty() && request.dir_fd >= 0) {
    PTC_TRY(found, find_files(request.dir_fd));  // which says what is missing
  }
  if (found.empty()) return invalid_argument("no node has a file of it");
  const std::string here = elsewhere.empty() ? "" : request.node;
  PTC_TRY(check_places(found, here));
  for (const Found& file : found) {
    if (in_place_of_ranks(file)) continue;
    PTC_TRY(check_rank(file.rank, spec));
  }
  const bool flat = is_flat(found);
  if (auto layout = layout_by_files(said.has_value(), found)) spec = std::move(*layout);
  PTC_TRY(begin_hashing(request.dir_fd, found, hashes));
  PTC_TRY(const auto consumed, find_consumed(request.dir_fd, found, elsewhere));
  PTC_TRY(
      for_each_tree([&](const TreeFormat& tree) { return tree.find_sets(request.dir_fd, found); }));
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.join_sets(found); }));
  std::erase_if(found, [](const Found& file) { return file.index; });
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.rank, a.path) < std::tie(b.rank, b.path);
  });
  for (size_t i = 1; i < found.size(); ++i)
    if (found[i].rank == found[i - 1].rank && found[i].path == found[i - 1].path)
      return invalid_argument("{} was written on two nodes, {} and {}: remove one of them",
                              found[i].source(),
                              found[i - 1].node ? found[i - 1].node->node : "this one",
                              found[i].node ? found[i].node->node : "this one");
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.check_names(found); }));
  const FileReader reader(request.dir_fd, request.read_elsewhere, executor, stop);
  PTC_TRY(read_tensors(reader, found, executor, stop));
  PTC_TRY(check_one_process(found, flat, here));
  PTC_TRY(for_each_tree(
      [&](const TreeFormat& tree) { return tree.settle(said.has_value(), spec, found); }));
  if (!said) spec.rules = request.in_force.rules;
  std::erase_if(found, [](const Found& file) { return file.index; });
  PTC_TRY(for_each_tree([&](const TreeFormat& tree) { return tree.check_whole(found); }));

  CommitDraft draft;
  draft.manifest.written_spec = spec;
  if (consumed) draft.manifest.consumed = consumed->count;
  PTC_TRY(auto config, find_config(request.dir_fd, found, elsewhere));
  for (const TreeFormat* tree : tree_formats()) config = tree->config(found, std::move(config));
  if (config.size() <= kMostConfigKept) draft.manifest.config = config;
  PTC_TRY(draft.manifest.model, infer(request, spec, found, config));
  PTC_TRY(hash_found(request, *draft.manifest.model, elsewhere, found, executor, hashes, stop));
  if (flat) {
    PTC_TRY(check_same_values(found, here));
  }
  PTC_TRY(draft.manifest.checksums, add_up(*draft.manifest.model, found));

  // Of ranks with equal states the files of the first are kept; the others wrote the same.
  std::map<std::pair<uint32_t, std::string>, size_t> kept;  // index into files
  KeptBoxes kept_boxes;
  std::vector<const Found*> outlines;
  uint64_t header_bytes = 0;
  for (Found& file : found) {
    if (file.node == nullptr) draft.looked_at.push_back(file.version);
    WrittenFile written;
    written.rank = file.rank;
    written.dp_cut =
        std::any_of(file.model_tensor.begin(), file.model_tensor.end(),
                    [&](uint32_t t) { return draft.manifest.model->is_cut_over_dp(t, spec); });
    if (file.has_tensors) {
      // Of what is spread over ranks each has its own, if it is not all there.
      const bool own = file.spread() && kept_boxes.adds(file);
      const auto [same, first] =
          kept.try_emplace({file.spread() ? 0 : draft.manifest.owner_of(written), file.path},
                           draft.manifest.files.size());
      if (!first && !own) {
        std::optional<ReadRights>& rights = draft.manifest.files[same->second].rights;
        if (rights && file.rights) rights = rights->narrowed_to(*file.rights);
        continue;
      }
    }
    written.rights = file.rights;
    written.path = file.path;
    written.bytes = file.version.bytes;
    written.has_tensors = file.has_tensors;
    if (file.has_tensors) {
      written.set = file.set;
      written.boxes = !file.boxes.empty();
      written.inside = file.naming.inside;
      written.header_bytes = file.header_bytes;
      written.header_offset = header_bytes;
      header_bytes += file.header_bytes;
      outlines.push_back(&file);
      for (uint32_t i = 0; written.set.empty() && i < file.tensors.size(); ++i) {
        for (FoundPadding& pad : file.padding[i])
          draft.manifest.padding.push_back({static_cast<uint32_t>(draft.manifest.files.size()),
                                            file.model_tensor[i], std::move(pad.local),
                                            pad.checksum});
      }
    } else {
      written.checksum = file.whole;
    }
    draft.sources.push_back(file.source());
    draft.nodes.push_back(file.node != nullptr ? file.node->node : "");
    draft.versions.push_back(file.version);
    draft.manifest.files.push_back(std::move(written));
  }
  PTC_TRY(check_outlines(outlines, kMostOutlineBytes));
  for (const Found* file : outlines) draft.headers += file->header;
  return draft;
}

/// Files and tensors may be called anything: a message has nothing in it that moves a terminal.
Error without_controls(Error error) {
  std::string message;
  for (const char c : error.message()) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) message += fmt::format("\\x{:02x}", byte);
    else message += c;
  }
  return Error(error.code(), std::move(message), error.errno_value());
}

}  // namespace

Result<CommitDraft> draft_commit(const CommitRequest& request,
                                 const std::vector<FilesElsewhere>& elsewhere, Executor& executor,
                                 HashCache& hashes, std::stop_token stop) {
  auto drafted = draft_it(request, elsewhere, executor, hashes, std::move(stop));
  if (drafted.has_error()) return without_controls(std::move(drafted).error());
  return drafted;
}

namespace {

/// What can be hashed of one file alone. `fd` is it.
void hash_alone(int dir_fd, int fd, Found& file, const LayoutSpec& spec, const Model* previous,
                HashCache& hashes, std::stop_token stop) {
  const FileToHashRef source = to_hash(dir_fd, file);
  const bool torch = may_be_torch(file.path);
  if (!is_named_for_tensors(file.path) && !torch) {
    (void)hash_file(*source, FileState::kOpen, hashes, stop);
    return;
  }
  if ((torch ? read_if_torch(dir_fd, file) : read_header(dir_fd, file)).has_error()) return;
  if (torch && file.tensors.empty()) {
    (void)hash_file(*source, FileState::kOpen, hashes, stop);
    return;
  }
  const StateCoords state = state_of(spec, spec.coords(file.rank));
  std::map<std::string, uint32_t> by_name;
  if (previous != nullptr)
    for (uint32_t t = 0; t < previous->tensors().size(); ++t)
      if (previous->on_stage(t, spec, state.pp))
        by_name.emplace(previous->local_name(t, spec, state.pp), t);
  for (uint32_t i = 0; i < file.tensors.size(); ++i) {
    const TensorEntry& tensor = file.tensors[i];
    SubTensor part = SubTensor::whole(tensor.shape);
    Shape global = tensor.shape;
    if (file.spread()) {
      global = file.said[i]->whole;
      part = box_alone(file.boxes[i]);
    } else if (auto it = by_name.find(tensor.name); it != by_name.end() && !file.boxes.empty()) {
      global = previous->tensors()[it->second].shape;
      part = box_alone(file.boxes[i]);
      if (file.boxes[i].axes() != global.size() ||
          intersect(file.boxes[i], Box::whole(global)) != file.boxes[i])
        continue;
    } else if (it != by_name.end()) {
      auto slice = previous->slice(it->second, spec, state);
      if (slice.has_error() || !slice.value() || slice.value()->local_shape != tensor.shape)
        continue;
      part = *std::move(slice).value();
      global = previous->tensors()[it->second].shape;
    } else if (spec.sizes.different_ranks() != 1 || spec.optimizer != OptimizerCut::kReplicated) {
      continue;
    }
    (void)hash_array({source, i, tensor, part, global}, fd, hashes, stop);
  }
}

}  // namespace

bool hash_closed_file(int dir_fd, const std::string& path, uint64_t rank, const LayoutSpec& spec,
                      const Model* previous, HashCache& hashes, std::stop_token stop) {
  Found file;
  file.rank = rank;
  file.path = path;
  const Result<UniqueFd> fd = open_file(dir_fd, file.source(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat st {};
  if (fd.has_error() || fstat(fd.value().get(), &st) != 0 || !S_ISREG(st.st_mode) ||
      rank >= spec.sizes.world_size())
    return true;
  file.version = version_of(st);
  file.ticket = hashes.begin(file.version);
  if (open_for_writing(fd.value().get())) return false;
  hash_alone(dir_fd, fd.value().get(), file, spec, previous, hashes, std::move(stop));
  // Of who opened it meanwhile beside the mount nobody has told us.
  if (open_for_writing(fd.value().get())) hashes.forget(file.version.inode);
  return true;
}

}  // namespace ptc
