#include "reshard/intake/dcp_files.h"

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <utility>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/dcp_values.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/torch_dist.h"
#include "reshard/intake/torch_dist_buckets.h"
#include "reshard/intake/torch_dist_common.h"
#include "reshard/intake/tree_format.h"
#include "store/base/json.h"
#include "store/codec/dcp_metadata.h"
#include "store/codec/tensor_path.h"
#include "store/codec/torch_file.h"
#include "store/codec/zip.h"

namespace ptc {
namespace {

// The model and both moments of a 405B on 16 384 ranks take half of that. It is read whole, and
// takes up to 40 times as much memory.
constexpr uint64_t kMostMetadataBytes = 1 << 30;
constexpr uint64_t kMostTimesBytes = 40, kMostOfSmall = 4 << 20, kMostOfData = 60 << 20;
constexpr uint64_t kMostValueBytes = 64 << 20;  // of one file
static_assert(kMostValueBytes <= FileReader::kMostBytesAsked);
constexpr uint64_t kMostCommonBytes = 64 << 20;   // of a common.pt on another node
constexpr std::string_view kZipMagic = "PK\3\4";  // what torch.save's files begin with
constexpr std::string_view kDcpSetName = "model.safetensors";

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

/// What of a checkpoint lies in one of its files.
struct FileItems {
  struct Chunk {
    uint32_t tensor, chunk;  // numbers in DcpMetadata
  };
  std::vector<Chunk> chunks;
  std::vector<uint32_t> values;
  std::vector<uint32_t> arrays;  // by chunk: which of those that are read has it
  std::vector<std::pair<std::string, std::string>> beside;  // DcpTable's
};

/// The tensors of a `.metadata`.
struct Named {
  std::vector<std::string_view> names;
  std::vector<std::string> paths;  // exact
  std::vector<TorchDistPart> parts;
};

/// Adds what a chunk has of each tensor of the model: of a stack one entry for each of its layers.
void add_array(const DcpTensor& tensor, uint32_t number, const DcpChunk& chunk, uint64_t offset,
               uint64_t bytes, const Named& named, DcpTable& table) {
  const TorchDistPart& part = named.parts[number];
  const auto add = [&](std::string name, Box box, uint64_t at, uint64_t length,
                       std::optional<uint64_t> row) {
    table.tensors.push_back({std::move(name), tensor.dtype, box.extent, at, length});
    table.boxes.push_back(std::move(box));
    table.paths.push_back(named.paths[number]);
    table.rows.push_back(row);
  };
  Box box = chunk.box;
  if (part.rows && !box.empty()) {
    const uint64_t rows = box.extent[0];
    box.extent[0] = std::min(rows, *part.rows - std::min(*part.rows, box.offset[0]));
    if (box.extent[0] == 0) return;
    bytes = bytes / rows * box.extent[0];
  }
  if (!part.layer_at) {
    return add(std::string(named.names[number]), std::move(box), offset, bytes, std::nullopt);
  }
  const uint64_t layers = box.extent[0];
  const uint64_t first = box.offset[0];
  box = {behind_first(box.offset), behind_first(box.extent)};
  for (uint64_t l = 0; l < layers; ++l)
    add(part.name_of(named.names[number], first + l), box, offset + bytes / layers * l,
        bytes / layers, first + l);
}

/// A stack of layers is small in a `.metadata` and in its file, however many layers it says: what
/// is made of it takes no more memory than the files' bytes allow. Those of the data count up to a
/// limit, as a file may have holes.
Result<> check_stacks(const DcpMetadata& metadata, const Named& named, const Found& index) {
  // Measured from here to the end of a commit: that of each layer, and how often its name is there.
  constexpr uint64_t kOfAnEntry = 2400, kNames = 12, kFarTooMany = uint64_t{1} << 60;
  uint64_t bytes = 0, data = 0;
  const DcpTensor* largest = nullptr;
  for (size_t t = 0; t < metadata.tensors.size(); ++t) {
    if (!named.parts[t].layer_at) continue;
    const DcpTensor& tensor = metadata.tensors[t];
    const uint64_t of_one = kOfAnEntry + kNames * (tensor.name.size() + named.paths[t].size());
    for (const DcpChunk& chunk : tensor.chunks) {
      bytes = std::min(bytes + chunk.box.extent[0] * of_one, kFarTooMany);
      data += std::min(kMostOfData / kMostTimesBytes, chunk.item.length);
    }
    if (largest == nullptr || tensor.shape[0] > largest->shape[0]) largest = &tensor;
  }
  const uint64_t most = kMostTimesBytes * index.version.bytes + kMostOfSmall +
                        std::min(kMostOfData, kMostTimesBytes * data);
  if (bytes <= most) return ok();
  return invalid_argument(
      "{}: the stacks of layers that it says, {} of {} layers among them, are more than can be "
      "meant by {} bytes",
      index.source(), ptc::quoted(largest->name), largest->shape[0], index.version.bytes);
}

/// Where the arrays of a file lie is read from it, and its values.
Result<FileReads> reads_of(const DcpMetadata& metadata, FileItems& items, const Found& file) {
  FileReads reads{&file, {}, {}};
  for (const FileItems::Chunk& at : items.chunks) {
    const DcpTensor& tensor = metadata.tensors[at.tensor];
    const DcpChunk& chunk = tensor.chunks[at.chunk];
    const DcpRun* const run = tensor.runs.empty() ? nullptr : &tensor.runs[at.chunk];
    // Of several runs of one array the first asks.
    if (run == nullptr || reads.arrays.empty() ||
        reads.arrays.back().item.offset != chunk.item.offset)
      reads.arrays.push_back(
          {chunk.item, tensor.dtype, run != nullptr ? Shape{run->elements} : chunk.box.extent});
    items.arrays.push_back(static_cast<uint32_t>(reads.arrays.size() - 1));
  }
  uint64_t value_bytes = 0;
  for (const uint32_t number : items.values) {
    const DcpItem& item = metadata.values[number].item;
    value_bytes += item.length;
    if (value_bytes > kMostValueBytes)
      return invalid_argument("{}: what in it is no tensor has more than {} bytes", file.source(),
                              kMostValueBytes);
    reads.ranges.push_back({item.offset, item.length});
  }
  return reads;
}

/// What of all files is no tensor is in memory at once.
Result<> check_values(const std::vector<FileReads>& reads) {
  uint64_t bytes = 0;
  for (const FileReads& of_file : reads)
    for (const FileReads::Range& range : of_file.ranges) bytes += range.length;
  if (bytes <= kMostOutlineBytes) return ok();
  return invalid_argument(
      "{} and its like: what in them is no tensor has {} bytes, and at most {} of a checkpoint are "
      "kept",
      reads.front().file->source(), bytes, kMostOutlineBytes);
}

Result<> take_items(const DcpMetadata& metadata, const FileItems& items, const Named& named,
                    const std::string& set, FileParts parts, Found& file) {
  DcpTable table;
  for (size_t i = 0; i < items.chunks.size(); ++i) {
    const FileItems::Chunk& at = items.chunks[i];
    const DcpTensor& tensor = metadata.tensors[at.tensor];
    const DcpChunk& chunk = tensor.chunks[at.chunk];
    const FileParts::Array& array = parts.arrays[items.arrays[i]];
    if (!array.problem.empty())
      return invalid_argument("{}: tensor {}, {}: {}", file.source(), ptc::quoted(tensor.name),
                              chunk.box.to_string(), array.problem);
    if (!array.contiguous)
      return invalid_argument(
          "{}: tensor {}, {}: its elements do not follow each other, as of a transpose: save "
          ".contiguous()",
          file.source(), ptc::quoted(tensor.name), chunk.box.to_string());
    uint64_t offset = array.offset, bytes = array.bytes;
    if (!tensor.runs.empty()) {
      const uint64_t each = dtype_bits(tensor.dtype) / 8;
      offset += tensor.runs[at.chunk].first * each;
      bytes = chunk.box.volume() * each;
    }
    add_array(tensor, at.tensor, chunk, offset, bytes, named, table);
  }
  for (size_t i = 0; i < items.values.size(); ++i) {
    const DcpValue& value = metadata.values[items.values[i]];
    table.values.emplace_back(
        value.path.empty()
            ? torch_path_text(std::vector<TorchStep>{{TorchStep::Kind::kKey, value.name, 0}})
            : torch_path_text(value.path),
        std::move(parts.ranges[i]));
  }
  table.beside = items.beside;
  file.header = dcp_table_text(table);
  file.header_bytes = file.header.size();
  file.tensors = std::move(table.tensors);
  file.boxes = std::move(table.boxes);
  file.set = set;
  file.has_tensors = true;
  file.told = true;
  return ok();
}

/// Where it was, or under its name, if nobody says so.
std::vector<TorchStep> path_of(const DcpTensor& tensor) {
  if (!tensor.path.empty() && torch_name(tensor.path) == tensor.name) return tensor.path;
  return {{TorchStep::Kind::kKey, tensor.name, 0}};
}

/// What Megatron-LM says of itself in a common.pt; nullopt: it is another's. kInvalidArgument: it
/// may be its, and is damaged: what it would have said would be missed.
Result<std::optional<MegatronFile>> said_in(const FileReader& files, const Found& common) {
  ReadAt read;
  std::string text;
  if (common.node == nullptr) {
    PTC_TRY(read, files.open(common));
  } else {
    if (common.version.bytes > kMostCommonBytes) return std::optional<MegatronFile>();
    PTC_TRY(text, files.text_of(common));
    read = read_at(std::as_bytes(std::span(text)));
  }
  const auto file = TorchFile::read(read, common.version.bytes);
  if (file.has_value()) return megatron_file(file.value());
  std::array<char, kZipMagic.size()> first{};
  const bool is_zip = common.version.bytes >= first.size() &&
                      read(0, std::as_writable_bytes(std::span(first))).has_value() &&
                      std::string_view(first.data(), first.size()) == kZipMagic;
  if (is_zip && ZipDirectory::read(read, common.version.bytes).has_error())
    return Error(file.error().code(),
                 fmt::format("{}{}: {}", common.source(),
                             common.node != nullptr ? " on node " + common.node->node : "",
                             file.error().message()));
  if (file.error().code() != Code::kInvalidArgument) return file.error();
  return std::optional<MegatronFile>();
}

/// Reads chunks where they lie, all in two questions a node.
ReadChunks chunks_read_by(const FileReader& reader, const DcpMetadata& metadata,
                          const std::vector<Found*>& files) {
  return [&](std::span<const ChunkRead> reads) -> Result<std::vector<std::string>> {
    std::vector<FileReads> arrays(files.size());
    std::vector<std::vector<size_t>> asked(files.size());  // number in `reads`
    for (size_t i = 0; i < reads.size(); ++i) {
      const DcpTensor& tensor = metadata.tensors[reads[i].tensor];
      const auto& [box, item] = tensor.chunks[reads[i].chunk];
      if (item.file >= files.size()) return make_error(Code::kInternal, "it is in no file");
      arrays[item.file].arrays.push_back({item, tensor.dtype, box.extent});
      asked[item.file].push_back(i);
    }
    for (size_t f = 0; f < files.size(); ++f) arrays[f].file = files[f];
    PTC_TRY(const auto found, reader.read(arrays));
    std::vector<FileReads> ranges(files.size());
    for (size_t f = 0; f < files.size(); ++f) {
      ranges[f].file = files[f];
      for (size_t n = 0; n < asked[f].size(); ++n) {
        const FileParts::Array& array = found[f].arrays[n];
        const ChunkRead& one = reads[asked[f][n]];
        if (!array.problem.empty())
          return invalid_argument("{}: tensor {}: {}", files[f]->source(),
                                  ptc::quoted(metadata.tensors[one.tensor].name), array.problem);
        ranges[f].ranges.push_back({array.offset, one.bytes});
      }
    }
    PTC_TRY(auto parts, reader.read(ranges));
    std::vector<std::string> held(reads.size());
    for (size_t f = 0; f < files.size(); ++f)
      for (size_t n = 0; n < asked[f].size(); ++n)
        held[asked[f][n]] = std::move(parts[f].ranges[n]);
    return held;
  };
}

/// What common.pt is where an optimizer's state was taken apart; nullopt: it stays.
Result<std::optional<std::string>> common_of(const FileReader& reader, const Found& common,
                                             const TakenApart& apart,
                                             const std::vector<Found*>& files) {
  std::vector<OptimizerSettings> settings;
  for (const TakenApart::Value& value : apart.settings) {
    if (value.item.file == DcpItem::kNone || value.item.length > kMostValueBytes)
      return std::optional<std::string>();
    PTC_TRY(auto parts,
            reader.read({{files[value.item.file], {}, {{value.item.offset, value.item.length}}}}));
    settings.push_back({value.optimizer, value.key, std::move(parts[0].ranges[0])});
  }
  PTC_TRY(const std::string text, reader.text_of(common));
  return common_of_parameters(read_at(std::as_bytes(std::span(text))), text.size(), settings,
                              apart.experts_apart);
}

/// Takes an optimizer's state in buckets apart; what common.pt is then. nullopt: nothing was done.
Result<std::optional<std::string>> take_state_apart(const FileReader& reader, const Found& common,
                                                    const MegatronFile& said,
                                                    const std::vector<Found*>& files,
                                                    DcpMetadata& metadata) {
  PTC_TRY(auto apart, take_buckets_apart(metadata, said, chunks_read_by(reader, metadata, files)));
  if (!apart) return std::optional<std::string>();
  PTC_TRY(auto text, common_of(reader, common, *apart, files));
  // Without its settings it would be no optimizer's state.
  if (text) put_in_place(*std::move(apart), metadata);
  return text;
}

/// By tensor, in the metadata's own texts.
std::vector<std::string_view> names_of(const DcpMetadata& metadata, TorchNaming& naming) {
  TorchNames names;
  for (const DcpTensor& tensor : metadata.tensors) names.add(tensor.name, path_of(tensor));
  return std::move(names).finish({}, &naming);
}

/// Two iterations of one run, say: a checkpoint is one state.
class NamesByDirectory {
 public:
  /// kInvalidArgument: another directory has one of them, too.
  Result<> add(const Found& index, const DcpMetadata& metadata) {
    const std::string directory = folder_of(index.path);
    for (const DcpTensor& tensor : metadata.tensors) {
      const auto [known, is_new] = names_.try_emplace(tensor.name, directory, index.source());
      if (is_new || known->second.first == directory) continue;
      return invalid_argument(
          "{} and {} both have a tensor {}: they are two checkpoints, and a checkpoint is one; "
          "move one away",
          known->second.second, index.source(), ptc::quoted(tensor.name));
    }
    return ok();
  }

 private:
  std::unordered_map<std::string, std::pair<std::string, std::string>> names_;
};

Error no_metadata(std::string_view path) {
  return invalid_argument(
      "{} is of PyTorch's distributed checkpointing, and there is no .metadata beside it, on any "
      "node: the checkpoint is not complete",
      path);
}

/// Makes those files the shards of one, model.safetensors in the same directory: their tensors are
/// read where they lie, on whatever nodes. kInvalidArgument: what parse_dcp_metadata() and
/// find_dcp_array() refuse; files that are missing; an array whose elements do not follow each
/// other.
Result<> find_dcp(const FileReader& reader, std::vector<Found>& found, Executor& executor,
                  std::stop_token stop) {
  std::map<std::pair<uint64_t, std::string>, Found*> by_path;
  for (Found& file : found) by_path[{file.rank, file.path}] = &file;
  const bool several = std::count_if(found.begin(), found.end(), is_dcp_metadata) > 1;
  NamesByDirectory names_by_directory;
  for (Found& index : found) {
    if (!is_dcp_metadata(index)) continue;
    if (index.version.bytes > kMostMetadataBytes)
      return invalid_argument("{} has {} bytes; at most {} are read", index.source(),
                              index.version.bytes, kMostMetadataBytes);
    PTC_TRY(const std::string text, reader.text_of(index));
    auto parsed = parse_dcp_metadata(text);
    if (parsed.has_error()) return std::move(parsed).error().with_context(index.source());
    DcpMetadata& metadata = parsed.value();
    if (several) {
      PTC_TRY(names_by_directory.add(index, metadata));
    }
    const std::string directory = folder_of(index.path);
    std::vector<Found*> files;
    std::vector<uint64_t> bytes;
    for (const std::string& name : metadata.files) {
      const auto it = by_path.find({index.rank, directory + name});
      if (it == by_path.end())
        return invalid_argument("{} names {}{}, which is missing", index.source(), directory, name);
      files.push_back(it->second);
      bytes.push_back(it->second->version.bytes);
    }
    auto within = check_dcp_files(metadata, bytes);
    if (within.has_error()) return std::move(within).error().with_context(index.source());
    const std::string set = directory + std::string(kDcpSetName);
    if (by_path.contains({index.rank, set}))
      return invalid_argument("{} has the tensors of {}, which is there too: remove one",
                              index.source(), set);
    std::optional<MegatronFile> said;
    std::optional<std::string> by_parameters;
    if (const auto common = by_path.find({index.rank, directory + std::string(kTorchDistCommon)});
        common != by_path.end()) {
      PTC_TRY(said, said_in(reader, *common->second));
      if (said) {
        PTC_TRY(by_parameters, take_state_apart(reader, *common->second, *said, files, metadata));
      }
    }
    std::vector<FileItems> items(files.size());
    if (by_parameters) items[0].beside.emplace_back(kTorchDistCommon, *std::move(by_parameters));
    for (uint32_t t = 0; t < metadata.tensors.size(); ++t) {
      bool held = false;
      for (uint32_t c = 0; c < metadata.tensors[t].chunks.size(); ++c) {
        const DcpItem& item = metadata.tensors[t].chunks[c].item;
        if (item.file == DcpItem::kNone) continue;
        items[item.file].chunks.push_back({t, c});
        held = true;
      }
      if (!held)
        return invalid_argument("{}: tensor {} has no elements, and is in no file", index.source(),
                                ptc::quoted(metadata.tensors[t].name));
    }
    for (uint32_t v = 0; v < metadata.values.size(); ++v)
      if (metadata.values[v].item.file != DcpItem::kNone)
        items[metadata.values[v].item.file].values.push_back(v);
    TorchNaming naming;
    Named named{names_of(metadata, naming), {}, {}};
    for (const std::string_view name : named.names)
      if (auto path = tensor_path(name); path.has_error())
        return std::move(path).error().with_context(index.source());
    std::vector<TorchDistTensor> tensors;
    for (size_t t = 0; t < metadata.tensors.size(); ++t) {
      const DcpTensor& tensor = metadata.tensors[t];
      named.paths.push_back(torch_path_text(path_of(tensor)));
      tensors.push_back({named.names[t], tensor.dtype, &tensor.shape});
    }
    named.parts = torch_dist_parts(tensors, said ? &*said : nullptr);
    PTC_TRY(check_stacks(metadata, named, index));
    // Its rows are what a single rank has, padding among them: more ranks pad these.
    if (said) said->arguments.erase("vocab_size");
    std::vector<FileReads> reads;
    for (size_t i = 0; i < files.size(); ++i) {
      PTC_TRY(auto of_file, reads_of(metadata, items[i], *files[i]));
      reads.push_back(std::move(of_file));
    }
    PTC_TRY(check_values(reads));
    PTC_TRY(auto parts, reader.read(reads));
    PTC_TRY(executor.team().parallel_for(
        files.size(),
        [&](size_t i) {
          files[i]->naming = naming;
          if (said) files[i]->config = said->config_text();
          return take_items(metadata, items[i], named, set, std::move(parts[i]), *files[i]);
        },
        stop));
    PTC_TRY(
        check_outlines(std::vector<const Found*>(files.begin(), files.end()), kMostOutlineBytes));
    // What is no tensor is laid out for each rank later: what cannot be is refused now.
    std::vector<DcpTable> tables;
    for (size_t i = 0; i < files.size(); ++i) {
      PTC_TRY(auto table, parse_dcp_table(files[i]->header, bytes[i]));
      tables.push_back(std::move(table));
    }
    auto values = dcp_values_file(tables);
    if (values.has_error()) return std::move(values).error().with_context(index.source());
    index.index = true;
  }
  const bool any = std::any_of(found.begin(), found.end(), is_dcp_metadata);
  for (Found& file : found) {
    if (file.path.ends_with(kDcpEnding) && !any) return no_metadata(file.source());
    if (file.path.ends_with(kDcpEnding) && file.set.empty())
      return invalid_argument("{}: no .metadata beside it names it", file.source());
    if (file.set.empty()) keep_as_it_is(file);
  }
  return ok();
}

class DcpTrees final : public TreeFormat {
 public:
  std::string_view name() const override { return "PyTorch's distributed checkpointing"; }

  bool is_there(const NamesThere& names, bool beside_others) const override {
    const auto is_of_it = [&](const std::string& name) {
      return name == kDcpMetadata || (beside_others && is_part(name));
    };
    return std::any_of(names.top().begin(), names.top().end(), [&](const std::string& name) {
      if (is_of_it(name) || names.has(fmt::format("{}/{}", name, kDcpMetadata))) return true;
      const auto below = beside_others ? names.in(name) : std::nullopt;
      return below && std::any_of(below->begin(), below->end(), is_of_it);
    });
  }
  bool is_part(std::string_view path) const override { return path.ends_with(kDcpEnding); }
  Error without_rest(std::string_view path) const override { return no_metadata(path); }

  bool shows(const Found& file) const override {
    return std::count(file.at.begin(), file.at.end(), '/') <= 1 &&
           (is_dcp_metadata(file) || is_part(file.at));
  }
  /// Its tensors are whole, as a single process has them.
  std::optional<LayoutSpec> layout(bool said, const std::vector<Found>& found) const override {
    const bool own = std::any_of(found.begin(), found.end(), [](const Found& file) {
      return !file.at.empty() && is_dcp_metadata(file);
    });
    const bool of_first =
        !said && reads(found) &&
        std::all_of(found.begin(), found.end(), [](const Found& file) { return file.rank == 0; });
    return own || of_first ? std::optional(LayoutSpec()) : std::nullopt;
  }

  bool reads(const std::vector<Found>& found) const override {
    return std::any_of(found.begin(), found.end(), [&](const Found& file) {
      return is_dcp_metadata(file) || is_part(file.at);
    });
  }
  Result<> read(const FileReader& files, std::vector<Found>& found, Executor& executor,
                std::stop_token stop) const override {
    return find_dcp(files, found, executor, std::move(stop));
  }

  /// What common.pt says, where nobody else does.
  std::string config(const std::vector<Found>& found, std::string beside) const override {
    for (const Found& file : found)
      if (beside.empty()) beside = file.config;
    return beside;
  }
};

}  // namespace

bool is_dcp_metadata(const Found& file) {
  return std::string_view(file.path).substr(folder_of(file.path).size()) == kDcpMetadata;
}

const TreeFormat& dcp_trees() {
  static const DcpTrees trees;
  return trees;
}

}  // namespace ptc
