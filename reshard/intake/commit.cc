#include "reshard/intake/commit.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <set>
#include <unordered_map>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/shard_boxes.h"
#include "reshard/intake/box_sets.h"
#include "reshard/intake/dcp_files.h"
#include "reshard/intake/deepspeed_tree.h"
#include "reshard/intake/found_files.h"
#include "reshard/intake/megatron_tree.h"
#include "store/base/fan_out.h"
#include "store/base/file.h"
#include "store/base/file_kind.h"
#include "store/base/json.h"
#include "store/base/utf8.h"
#include "store/codec/tensor_path.h"

namespace ptc {
namespace {

constexpr unsigned kMaxDepth = 64;  // of directories: users nest them as deeply as they like

std::optional<uint64_t> parse_rank(std::string_view text) {
  uint64_t rank = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (error != std::errc() || end != text.data() + text.size() ||
      (text.size() > 1 && text[0] == '0'))
    return std::nullopt;
  return rank;
}

// Names in a directory, sorted.
Result<std::vector<std::string>> names_in(int dir_fd, const std::string& path) {
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  DIR* dir = fdopendir(fd.release());
  if (dir == nullptr) return errno_error(errno, path);
  std::vector<std::string> names;
  errno = 0;
  while (dirent* entry = readdir(dir)) {
    std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int reason = errno;
  closedir(dir);
  if (reason != 0) return errno_error(reason, "reading " + path);
  std::sort(names.begin(), names.end());
  return names;
}

/// What is left to whom of the rights in a directory.
uint32_t allowed_below(const struct stat& directory) {
  return 0400u | ((directory.st_mode & S_IXGRP) != 0 ? 040u : 0u) |
         ((directory.st_mode & S_IXOTH) != 0 ? 04u : 0u);
}

Result<> walk(int dir_fd, const std::string& root, const std::string& below, uint64_t rank,
              uint32_t allowed, std::vector<Found>& found, unsigned depth = 0) {
  if (depth > kMaxDepth) {
    return invalid_argument("{}/{}: directories are nested deeper than {}", root, below, kMaxDepth);
  }
  PTC_TRY(auto names, names_in(dir_fd, below.empty() ? root : root + "/" + below));
  for (const std::string& name : names) {
    std::string path = below.empty() ? name : below + "/" + name;
    std::string full = root + "/" + path;
    struct stat st {};
    if (fstatat(dir_fd, full.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
      return errno_error(errno, full);
    if (!is_utf8(name)) {
      return invalid_argument(
          "the name of {} is not UTF-8, and could not be written in meta.json: rename it",
          ptc::quoted(full));
    }
    if (S_ISDIR(st.st_mode)) {
      PTC_TRY(walk(dir_fd, root, path, rank, allowed & allowed_below(st), found, depth + 1));
    } else if (S_ISREG(st.st_mode)) {
      Found file;
      file.rank = rank;
      file.path = std::move(path);
      file.version = version_of(st);
      file.links = st.st_nlink;
      file.rights = ReadRights{st.st_uid, st.st_gid, st.st_mode & allowed};
      found.push_back(std::move(file));
    } else if (S_ISLNK(st.st_mode)) {
      return invalid_argument(
          "{} is a symbolic link, and a checkpoint holds files: copy what it "
          "points to (cp -rL)",
          full);
    } else {
      return invalid_argument("{} is no ordinary file", full);
    }
  }
  return ok();
}

/// Each file once, and none with a name elsewhere.
Result<std::vector<Found>> checked(std::vector<Found> found) {
  std::map<uint64_t, uint64_t> names;  // inode → names in here
  for (const Found& file : found) ++names[file.version.inode];
  for (const Found& file : found)
    if (file.links > names[file.version.inode])
      return invalid_argument(
          "{} has another name (hard link) outside the checkpoint, through which "
          "it could be changed: remove that name first",
          file.source());
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.rank, a.path) < std::tie(b.rank, b.path);
  });
  return found;
}

bool is_megatron_tree(int dir_fd, const std::vector<std::string>& top) {
  return std::any_of(top.begin(), top.end(), [&](const std::string& name) {
    if (!megatron_place(name + "/.") && !is_megatron_iteration(name)) return false;
    const auto below = names_in(dir_fd, name);
    return below.has_value() &&
           (megatron_place(name + "/.") ||
            std::any_of(below.value().begin(), below.value().end(),
                        [](const std::string& rank) { return megatron_place(rank + "/."); }));
  });
}

/// Whether a file of DeepSpeed's is here or a directory deeper.
bool is_deepspeed_tree(int dir_fd, const std::vector<std::string>& top) {
  return std::any_of(top.begin(), top.end(), [&](const std::string& name) {
    if (deepspeed_name(name)) return true;
    const auto below = names_in(dir_fd, name);
    return below.has_value() &&
           std::any_of(below.value().begin(), below.value().end(), [&](const std::string& file) {
             return deepspeed_name(name + "/" + file).has_value();
           });
  });
}

/// The files of what all ranks wrote together without rank/<r>/: where there is a `.metadata` of
/// distributed checkpointing, here or a directory deeper, a file of DeepSpeed's, or a tree of
/// Megatron's. They are those of rank 0, but for that tree's.
Result<std::vector<Found>> find_own_tree(int dir_fd, const std::vector<std::string>& top) {
  std::vector<Found> found;
  const bool megatron = is_megatron_tree(dir_fd, top);
  const bool dcp = std::any_of(top.begin(), top.end(), [&](const std::string& name) {
    struct stat st {};
    return name == kDcpMetadata || fstatat(dir_fd, fmt::format("{}/{}", name, kDcpMetadata).c_str(),
                                           &st, AT_SYMLINK_NOFOLLOW) == 0;
  });
  if (!megatron && !dcp && !is_deepspeed_tree(dir_fd, top)) return found;
  PTC_TRY(walk(dir_fd, ".", "", 0, 0444, found));
  std::erase_if(found, [](const Found& file) {
    return file.path == "layout.json" || file.path == kConsumedFile;
  });
  for (Found& file : found) file.at = file.path;
  if (megatron) {
    PTC_TRY(name_megatron_files(true, found));
  }
  return checked(std::move(found));
}

Result<> check_rank(uint64_t rank, const LayoutSpec& spec) {
  if (rank < spec.sizes.world_size()) return ok();
  return invalid_argument(
      "rank/{} does not exist in layout {}, which has {} rank{}; a writer "
      "with another layout says so in a layout.json beside rank/",
      rank, spec.name(), spec.sizes.world_size(), spec.sizes.world_size() == 1 ? "" : "s");
}

}  // namespace

FileVersion version_of(const struct stat& st) {
  return {st.st_dev, st.st_ino, static_cast<uint64_t>(st.st_size),
          st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec,
          st.st_ctim.tv_sec * 1'000'000'000 + st.st_ctim.tv_nsec};
}

Result<std::vector<Found>> find_files(int dir_fd, const LayoutSpec* spec) {
  PTC_TRY(auto top, names_in(dir_fd, "."));
  if (std::find(top.begin(), top.end(), "rank") == top.end()) {
    PTC_TRY(auto own, find_own_tree(dir_fd, top));
    if (!own.empty()) return own;
  }
  bool has_ranks = false;
  for (const std::string& name : top) {
    if (name == "rank") has_ranks = true;
    else if (name.ends_with(kDcpEnding))
      return invalid_argument(
          "{} is of PyTorch's distributed checkpointing, and there is no .metadata beside it: the "
          "checkpoint is not complete, or other files of it are on other nodes, and it is "
          "committed "
          "from one that has them all",
          name);
    else if (name != "layout.json" && name != kConsumedFile)
      return invalid_argument(
          "'{}' is not under rank/<r>/: a process' files belong into rank/0/, "
          "rank/1/ … (a single process: rank/0/)",
          name);
  }
  if (!has_ranks)
    return invalid_argument(
        "there is no rank/ directory: put the files of a single process into "
        "rank/0/, of several into rank/0/, rank/1/ …");
  PTC_TRY(auto ranks, names_in(dir_fd, "rank"));
  std::vector<Found> found;
  for (const std::string& name : ranks) {
    std::optional<uint64_t> rank = parse_rank(name);
    if (!rank) return invalid_argument("rank/{} is not a rank's number", name);
    if (spec != nullptr) {
      PTC_TRY(check_rank(*rank, *spec));
    }
    uint32_t allowed = 0444;
    for (const std::string& directory : {std::string("rank"), "rank/" + name}) {
      struct stat st {};
      if (fstatat(dir_fd, directory.c_str(), &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno_error(errno, directory);
      allowed &= allowed_below(st);
    }
    PTC_TRY(walk(dir_fd, "rank/" + name, "", *rank, allowed, found));
  }
  if (found.empty()) return invalid_argument("rank/ holds no files");
  PTC_TRY(name_megatron_files(false, found));
  return checked(std::move(found));
}

namespace {

/// What the user attribute says that the elements of an .npy are.
Result<std::optional<DType>> declared_dtype_of(int fd, const Found& file) {
  std::optional<DType> declared;
  if (!file.path.ends_with(".npy")) return declared;
  char text[32];
  const ssize_t length = fgetxattr(fd, "user.ptc.dtype", text, sizeof text);
  if (length > 0) {
    PTC_TRY(declared, parse_dtype({text, static_cast<size_t>(length)}));
  }
  return declared;
}

Result<> read_outline(int fd, Found& file) {
  const FileFormat& format = format_of(file.path, !file.set.empty());
  const ReadAt read = [fd](uint64_t offset, std::span<std::byte> into) {
    return read_exactly(fd, into, offset);
  };
  PTC_TRY(const auto declared, declared_dtype_of(fd, file));
  PTC_TRY(file.header, format.outline(read, file.version.bytes, declared));
  PTC_TRY(auto tensors, format.tensors({file.header, file.version.bytes}, file.path, declared));
  file.tensors = std::move(tensors.tensors);
  file.boxes = std::move(tensors.boxes);
  file.said = std::move(tensors.said);
  file.same_as = std::move(tensors.same_as);
  file.naming = std::move(tensors.naming);
  file.megatron = std::move(tensors.megatron);
  return ok();
}

/// What the file is, if that is known and no array.
std::string_view other_kind(int fd, const Found& file) {
  std::string beginning(std::min<uint64_t>(kFileKindBytes, file.version.bytes), '\0');
  if (!read_exactly(fd, std::as_writable_bytes(std::span(beginning)), 0)) return {};
  return other_kind_of(beginning);
}

}  // namespace

Result<> read_header(int dir_fd, Found& file) {
  PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, file.source(), file.version).open());
  Result<> read = read_outline(fd.get(), file);
  if (read.has_error() && read.error().code() == Code::kInvalidArgument &&
      !may_be_torch(file.path)) {
    if (const std::string_view kind = other_kind(fd.get(), file); !kind.empty())
      return invalid_argument("{}", kind);
  }
  PTC_TRY(std::move(read));
  file.header_bytes = file.header.size();
  for (const TensorEntry& tensor : file.tensors) {
    PTC_TRY(tensor_path(tensor.name));
  }
  return ok();
}

Result<> read_if_torch(int dir_fd, Found& file) {
  Result<> read = read_header(dir_fd, file);
  if (read.has_value() || read.error().code() != Code::kInvalidArgument) return read;
  const std::string why = read.error().message();
  file.header.clear();
  file.header_bytes = 0;
  file.tensors.clear();
  // What is called .bin or .ckpt may be anything, unless it begins as torch's files do.
  if (!file.path.ends_with(".pt") && !file.path.ends_with(".pth")) {
    PTC_TRY(const UniqueFd fd, FileToHash(dir_fd, file.source(), file.version).open());
    const std::string_view kind = other_kind(fd.get(), file);
    if (!kind.starts_with("it is a zip archive") && !kind.starts_with("it is a pickle"))
      return ok();
  }
  file.problem = why;
  return ok();
}

Result<> check_outlines(std::span<const Found* const> files, uint64_t limit) {
  uint64_t bytes = 0;
  const Found* most = nullptr;
  for (const Found* file : files) {
    bytes += file->header.size();
    if (most == nullptr || file->header.size() > most->header.size()) most = file;
  }
  if (bytes <= limit) return ok();
  return invalid_argument(
      "{} bytes of its files are beside their tensors (headers; of what torch.save wrote, also all "
      "values that are no tensors, and states of random generators), and at most {} of a "
      "checkpoint are kept so: {} has {} of them. Save such values in a file that is no .pt, .pth, "
      ".bin or .ckpt, which is kept as it is",
      bytes, limit, most->source(), most->header.size());
}

bool torch_files_count(const std::vector<Found>& found) {
  return std::none_of(found.begin(), found.end(), [](const Found& file) {
    return file.path.ends_with(".safetensors") || file.path.ends_with(".npy");
  });
}

Result<> check_closed(int dir_fd, const std::vector<Found>& found) {
  for (const Found& file : found) {
    PTC_TRY(bool busy, open_for_writing(dir_fd, file.source()));
    if (busy) return make_error(Code::kBusy, "{} is still open for writing", file.source());
  }
  return ok();
}

Result<> begin_hashing(int dir_fd, std::vector<Found>& found, HashCache& hashes) {
  for (Found& file : found) file.ticket = hashes.begin(file.version);
  return check_closed(dir_fd, found);
}

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

Result<Rules> choose_rules(const CommitRequest& request, const std::vector<Found>& found,
                           const std::string& config) {
  Rules chosen;
  if (request.rules_text) {
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
  std::unordered_map<std::string_view, const Shape*> shapes;
  for (const TensorInfo& tensor : known.tensors()) shapes.emplace(tensor.name, &tensor.shape);
  bool any = false;
  for (const TensorInfo& tensor : model.tensors()) {
    const auto there = shapes.find(tensor.name);
    if (there == shapes.end()) continue;
    if (*there->second != tensor.shape) return false;
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
      "of {}: say the writer's layout in a layout.json beside rank/",
      file.source(), ptc::quoted(file.tensors[position].name), said.box.to_string(),
      said.whole.to_string(), spec.name(),
      none || part.flat ? "another part" : part.pieces.front().global.to_string(),
      whole.to_string());
}

Result<std::shared_ptr<const Model>> infer(const CommitRequest& request, const LayoutSpec& spec,
                                           std::vector<Found>& found, const std::string& config) {
  PTC_TRY(auto rules, choose_rules(request, found, config));
  struct Array {
    Found* file;
    uint32_t position;  // in its tensors
  };
  std::vector<WrittenRank> ranks;
  std::vector<std::vector<std::vector<Array>>>
      origin;                                       // by rank and tensor: of a set of boxes several
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
      ranks.back().tensors.back().by_stage = file.megatron.has_value();
      origin.back().push_back({{&file, i}});
    }
    file.model_tensor.resize(file.tensors.size());
    file.parts.resize(file.tensors.size());
  }
  if (ranks.empty()) return no_tensors();
  std::unordered_map<const WrittenTensor*, Box> wholes;  // of the tensors that are there in boxes
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < origin[r].size(); ++i) {
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
  PTC_TRY(auto inferred, infer_by(rules, request, spec, ranks));
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
Result<> hash_found(int dir_fd, const Model& model, const std::vector<FilesElsewhere>& elsewhere,
                    std::vector<Found>& found, Executor& executor, HashCache& hashes,
                    std::stop_token stop) {
  std::vector<std::string> requests;
  for (const FilesElsewhere& node : elsewhere) requests.push_back(hash_request(model, node, found));
  Answers<std::string> hashed_elsewhere(
      elsewhere.size(), [&](size_t i) { return elsewhere[i].hash(requests[i]); }, kAtWorkAtOnce);
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
    PTC_TRY(auto sums, hash_arrays(arrays, executor, hashes, stop));
    for (size_t i = 0; i < arrays.size(); ++i) origin[i]->sums.push_back(std::move(sums[i]));
    return ok();
  };
  Result<> hashed = hash_here();
  std::vector<Result<std::string>> answers = hashed_elsewhere.wait();
  for (size_t i = 0; i < elsewhere.size(); ++i) {
    Result<std::string>& answer = answers[i];
    if (hashed.has_error()) continue;
    if (answer.has_error()) hashed = std::move(answer).error();
    else hashed = take_hashes(elsewhere[i], answer.value(), found);
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

/// Of files on other nodes, whose outlines these have sent, what more these say.
Result<> read_outlines_elsewhere(std::vector<Found>& found) {
  for (Found& file : found) {
    if (file.node == nullptr || !file.has_tensors || file.path.ends_with(".npy")) continue;
    PTC_TRY(auto tensors, format_of(file.path, !file.set.empty())
                              .tensors({file.header, file.version.bytes}, file.path, {}));
    if (tensors.tensors.size() != file.tensors.size())
      return make_error(Code::kCorrupt, "{}: the header is not that of its tensors", file.source());
    file.boxes = std::move(tensors.boxes);
    file.said = std::move(tensors.said);
    file.same_as = std::move(tensors.same_as);
    file.naming = std::move(tensors.naming);
    file.megatron = std::move(tensors.megatron);
  }
  return ok();
}

/// Names in files of one name are without the same on all ranks; each has told what its own could
/// be without.
Result<> agree_on_names(std::vector<Found>& found) {
  std::map<std::string_view, TorchNaming> namings;  // by path
  // With fewer wrappers left out, names may become the same: once more, then.
  for (bool changed = true; changed;) {
    changed = false;
    for (const Found& file : found) {
      if (!file.has_tensors || file.tensors.empty()) continue;
      const auto [known, is_new] = namings.try_emplace(file.path, file.naming);
      if (!is_new) known->second = in_common(known->second, file.naming);
    }
    for (Found& file : found) {
      if (!file.has_tensors || file.tensors.empty()) continue;
      const TorchNaming& naming = namings.at(file.path);
      if (file.naming.whole == naming.whole &&
          (!file.naming.of_model || file.naming.wrappers == naming.wrappers))
        continue;
      changed = true;
      file.header = with_naming(file.header, naming);
      file.header_bytes = file.header.size();
      PTC_TRY(auto tensors,
              torch_format().tensors({file.header, file.version.bytes}, file.path, {}));
      file.tensors = std::move(tensors.tensors);
      file.naming = std::move(tensors.naming);
      for (const TensorEntry& tensor : file.tensors) {
        PTC_TRY(tensor_path(tensor.name));
      }
    }
  }
  return ok();
}

/// Which files have tensors, and what these are: of the first of these kinds that there is,
/// safetensors, distributed checkpointing, .npy, torch.save's. All others are kept as they are.
Result<> read_tensors(int dir_fd, std::vector<Found>& found, Executor& executor,
                      std::stop_token stop) {
  auto any = [&](auto&& is) { return std::any_of(found.begin(), found.end(), is); };
  const auto is_safetensors = [](const Found& file) {
    return file.path.ends_with(".safetensors") || !file.set.empty();
  };
  const auto is_npy = [](const Found& file) { return file.path.ends_with(".npy"); };
  const bool torch = !any(is_safetensors) && torch_files_count(found);
  if (has_deepspeed(found)) return find_deepspeed(dir_fd, found, executor, stop);
  if (any(is_safetensors)) {
    for (Found& file : found) file.has_tensors = is_safetensors(file);
  } else if (any(is_dcp_metadata)) {
    return find_dcp(dir_fd, found, executor, stop);
  } else {
    for (Found& file : found) file.has_tensors = torch ? may_be_torch(file.path) : is_npy(file);
  }
  std::atomic<uint64_t> outline_bytes = 0;
  for (const Found& file : found) outline_bytes += file.header.size();
  std::atomic<bool> too_many = false;
  PTC_TRY(executor.team().parallel_for(
      found.size(),
      [&](size_t i) -> Result<> {
        if (!found[i].has_tensors || found[i].node != nullptr || too_many) return ok();
        Result<> read = torch ? read_if_torch(dir_fd, found[i]) : read_header(dir_fd, found[i]);
        if (read.has_error()) return std::move(read).error().with_context(found[i].source());
        outline_bytes += found[i].header.size();
        if (outline_bytes > kMostOutlineBytesRead) too_many = true;
        return ok();
      },
      stop));
  std::vector<const Found*> outlines;
  for (const Found& file : found) outlines.push_back(&file);
  PTC_TRY(check_outlines(outlines, kMostOutlineBytesRead));
  std::set<std::string_view> names;  // of torch's files with tensors: that of another rank has none
  for (const Found& file : found) {
    if (torch && !file.problem.empty())
      return invalid_argument("{}: {}", file.source(), file.problem);
    if (torch && !file.tensors.empty()) names.insert(file.path);
  }
  for (Found& file : found)
    if (torch) file.has_tensors = !file.header.empty() && names.contains(file.path);
  PTC_TRY(read_outlines_elsewhere(found));
  if (torch) {
    PTC_TRY(agree_on_names(found));
  }
  return find_box_sets(found);
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
  return std::optional(layout.value().spec);
}

/// What distributed checkpointing wrote has whole tensors, as a single process has them.
bool is_single_process(const std::vector<Found>& found, bool layout_is_said) {
  const auto is_own = [](const Found& file) { return !file.at.empty(); };
  if (std::any_of(found.begin(), found.end(),
                  [&](const Found& file) { return is_own(file) && is_dcp_metadata(file); }) ||
      (has_deepspeed(found) && std::any_of(found.begin(), found.end(), is_own)))
    return true;
  return !layout_is_said && std::any_of(found.begin(), found.end(), is_dcp_metadata) &&
         std::all_of(found.begin(), found.end(), [](const Found& file) { return file.rank == 0; });
}

}  // namespace

Result<bool> open_for_writing(int dir_fd, const std::string& path) {
  PTC_TRY(auto fd, open_file(dir_fd, path, O_RDONLY | O_NOFOLLOW));
  return open_for_writing(fd.get());
}

bool open_for_writing(int fd) {
  // The kernel grants a read lease only while no description of the file can write; shared writable
  // mappings keep theirs. Where leases are not to be had (another owner's file without CAP_LEASE,
  // file systems without them) the caller's own count of open handles must do.
  if (fcntl(fd, F_SETLEASE, F_RDLCK) == 0) {
    fcntl(fd, F_SETLEASE, F_UNLCK);
    return false;
  }
  return errno == EAGAIN;
}

Result<CommitDraft> draft_commit(const CommitRequest& request,
                                 const std::vector<FilesElsewhere>& elsewhere, Executor& executor,
                                 HashCache& hashes, std::stop_token stop) {
  PTC_TRY(const auto said, writer_layout(request, elsewhere));
  LayoutSpec spec = said.value_or(request.in_force);
  std::vector<Found> found;
  if (request.dir_fd >= 0) {
    PTC_TRY(found, find_files(request.dir_fd, &spec));
  }
  if (is_single_process(found, said.has_value())) spec = LayoutSpec();
  else if (has_deepspeed(found)) spec = deepspeed_layout(found);
  PTC_TRY(begin_hashing(request.dir_fd, found, hashes));
  PTC_TRY(const auto consumed, find_consumed(request.dir_fd, found, elsewhere));
  PTC_TRY(find_sets(request.dir_fd, found));
  for (const FilesElsewhere& node : elsewhere) {
    auto theirs = read_listing(node);
    if (theirs.has_error()) return std::move(theirs).error().with_context("node " + node.node);
    for (Found& file : theirs.value()) {
      PTC_TRY(check_rank(file.rank, spec));
      found.push_back(std::move(file));
    }
  }
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
  PTC_TRY(check_numbered_shards(found));
  PTC_TRY(refuse_megatron_buckets(found));
  PTC_TRY(read_tensors(request.dir_fd, found, executor, stop));
  PTC_TRY(settle_megatron(said.has_value(), spec, found));
  std::erase_if(found, [](const Found& file) { return file.index; });
  PTC_TRY(check_sets(found));

  CommitDraft draft;
  draft.manifest.written_spec = spec;
  if (consumed) draft.manifest.consumed = consumed->count;
  PTC_TRY(auto config, find_config(request.dir_fd, found, elsewhere));
  for (const Found& file : found) {
    if (!file.megatron) continue;
    config = file.megatron->config_text();
    break;
  }
  PTC_TRY(draft.manifest.model, infer(request, spec, found, config));
  PTC_TRY(
      hash_found(request.dir_fd, *draft.manifest.model, elsewhere, found, executor, hashes, stop));
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

namespace {

/// What can be hashed of one file alone. `fd` is it.
void hash_alone(int dir_fd, int fd, Found& file, const LayoutSpec& spec, const Model* previous,
                HashCache& hashes, std::stop_token stop) {
  const FileToHashRef source = to_hash(dir_fd, file);
  const bool torch = may_be_torch(file.path);
  if (!file.path.ends_with(".safetensors") && !file.path.ends_with(".npy") && !torch) {
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
    } else if (spec.sizes.tp != 1 || spec.sizes.ep != 1 ||
               spec.optimizer != OptimizerCut::kReplicated) {
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
