#include "reshard/checkpoint/dcp_tree.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/shard_boxes.h"
#include "reshard/checkpoint/torch_contents.h"
#include "store/base/json.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/safetensors.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

// A reader reads whole chunks: small, or each of many ranks reads what others need. Each costs a
// reader a fraction of a millisecond, and us some 700 bytes.
constexpr uint64_t kChunkBytes = 8 << 20;
constexpr uint64_t kMostChunks = 1 << 16;  // about
constexpr uint64_t kFileBytes = 5'000'000'000;

/// Rows that make up so many bytes. Their number is a power of two, so that ranks of which there
/// are as many, or a part of that, find theirs in chunks of their own.
std::vector<Box> chunks_of(const Shape& shape, uint64_t bytes, uint64_t chunk_bytes) {
  const Box whole = Box::whole(shape);
  std::vector<Box> chunks;
  if (shape.empty() || bytes <= chunk_bytes) return {whole};
  uint64_t count = 1;
  while (bytes / count > chunk_bytes && count < shape[0]) count *= 2;
  const uint64_t rows = (shape[0] + count - 1) / count;
  for (uint64_t at = 0; at < shape[0]; at += rows) {
    Box chunk = whole;
    chunk.offset[0] = at;
    chunk.extent[0] = std::min(rows, shape[0] - at);
    chunks.push_back(chunk);
  }
  return chunks;
}

/// Which section of a state a file of tools/python's is: optim.safetensors, and what DCP's ranks
/// have written together, optim/model.safetensors.
std::string section_of(const std::string& path) {
  std::string section = path.substr(0, path.rfind('/'));
  if (section.size() == path.size()) return path.substr(0, path.rfind('.'));
  std::replace(section.begin(), section.end(), '/', '-');
  return section;
}

class TreeMaker {
 public:
  TreeMaker(const Model& model, const DcpSources& sources) : model_(model), sources_(sources) {}

  Result<DcpTree> run(std::span<const StateFile> files) {
    for (const StateFile& file : files) {
      if (file.path.empty()) continue;  // padding
      if (&format_of(file.path, false) == &torch_format()) {
        PTC_TRY(add_torch_file(file));
      } else {
        PTC_TRY(add_file(file));
      }
    }
    for (const auto& [directory, of_files] : sources_.tables)
      for (const DcpTable& table : of_files)
        for (const auto& [text, archive] : table.values) {
          PTC_TRY(auto path, parse_torch_path(text));
          add_value(directory, {torch_name(path), std::move(path), archive});
        }
    PTC_TRY(cut());
    PTC_TRY(auto made, compose_dcp(tensors_, values_, kFileBytes));
    return place(std::move(made));
  }

 private:
  /// What the bytes of a tensor are.
  struct Origin {
    static constexpr uint32_t kOwn = UINT32_MAX;
    uint32_t tensor = kOwn;  // of the model
    std::string bytes;       // of another
    /// Tensors of the model, of which it is the stack; empty: it is none.
    std::vector<uint32_t> rows = {};
  };

  void leave_out(std::string_view file, std::string_view what, std::string_view why) {
    left_out_ += fmt::format("{} of {}: {}\n", what, file, why);
  }

  /// The first of a name has it; another is below its file's path.
  void make_unique(std::string_view file, std::string& name, std::vector<TorchStep>& path) {
    if (names_.insert(name).second) return;
    if (path.empty()) path.push_back({TorchStep::Kind::kKey, name, 0});
    path.insert(path.begin(), {TorchStep::Kind::kKey, std::string(file), 0});
    name = fmt::format("{}.{}", file, name);
    for (const std::string first = name; !names_.insert(name).second;)
      name = fmt::format("{}_{}", first, ++repeated_[first]);
  }
  void add_value(std::string_view file, DcpNewValue value) {
    make_unique(file, value.name, value.path);
    values_.push_back(std::move(value));
  }
  void add_tensor(std::string_view file, DcpNewTensor tensor, Origin origin) {
    if (torch_dtype_name(tensor.dtype).empty())
      return leave_out(file, ptc::quoted(tensor.name),
                       fmt::format("torch has no type {}", dtype_name(tensor.dtype)));
    make_unique(file, tensor.name, tensor.path);
    tensors_.push_back(std::move(tensor));
    origins_.push_back(std::move(origin));
  }
  std::string name_of(uint32_t tensor) const { return model_.local_name(tensor, LayoutSpec(), 0); }

  Result<> add_file(const StateFile& file) {
    const std::string directory = file.path.substr(0, file.path.rfind('/') + 1);
    struct Place {
      std::string_view path;
      std::optional<uint64_t> row;
    };
    std::unordered_map<std::string_view, Place> paths;  // as dcp.save wrote them
    if (const auto tables = sources_.tables.find(directory); tables != sources_.tables.end())
      for (const DcpTable& table : tables->second)
        for (size_t i = 0; i < table.paths.size(); ++i)
          paths.emplace(table.tensors[i].name, Place{table.paths[i], table.rows[i]});
    std::map<std::string_view, std::map<uint64_t, uint32_t>> stacks;  // by path
    for (const ArraySlot& slot : file.layout.arrays) {
      if (slot.tensor >= model_.tensors().size()) continue;  // padding
      const TensorInfo& info = model_.tensors()[slot.tensor];
      DcpNewTensor tensor{name_of(slot.tensor), {}, info.dtype, info.shape_in_files(), {}};
      if (const auto path = paths.find(tensor.name); path != paths.end()) {
        if (path->second.row) {
          stacks[path->second.path].emplace(*path->second.row, slot.tensor);
          continue;
        }
        PTC_TRY(tensor.path, parse_torch_path(path->second.path));
        tensor.name = torch_name(tensor.path);
      } else if (sources_.sections) {
        tensor.path = {{TorchStep::Kind::kKey, section_of(file.path), 0},
                       {TorchStep::Kind::kKey, tensor.name, 0}};
        tensor.name = torch_name(tensor.path);
      }
      add_tensor(file.path, std::move(tensor), {slot.tensor, {}});
    }
    for (const auto& [path, rows] : stacks) {
      PTC_TRY(add_stack(file.path, path, rows));
    }
    return ok();
  }

  /// What was one tensor where it was saved. `rows`: tensors of the model, all of them.
  Result<> add_stack(std::string_view file, std::string_view path,
                     const std::map<uint64_t, uint32_t>& rows) {
    const TensorInfo& first = model_.tensors()[rows.begin()->second];
    DcpNewTensor tensor{{}, {}, first.dtype, first.shape, {}};
    PTC_TRY(tensor.path, parse_torch_path(path));
    tensor.name = torch_name(tensor.path);
    tensor.shape = with_first(rows.size(), first.shape);
    Origin origin;
    for (const auto& [row, t] : rows) {
      const TensorInfo& info = model_.tensors()[t];
      if (row != origin.rows.size() || info.shape != first.shape || info.dtype != first.dtype)
        return make_error(Code::kInternal, "{}: row {} of {} is not one of its kind", file, row,
                          ptc::quoted(tensor.name));
      origin.rows.push_back(t);
    }
    add_tensor(file, std::move(tensor), std::move(origin));
    return ok();
  }

  Result<> add_torch_file(const StateFile& file) {
    const auto like = sources_.outlines.find(file.path);
    if (like == sources_.outlines.end())
      return make_error(Code::kInternal, "no rank wrote {}", file.path);
    PTC_TRY(auto contents, torch_contents(file.layout.literals, file.layout.bytes, like->second));
    std::unordered_map<std::string, uint32_t> by_name;
    for (const ArraySlot& slot : file.layout.arrays)
      if (slot.tensor < model_.tensors().size()) by_name.emplace(name_of(slot.tensor), slot.tensor);
    for (TorchContents::Tensor& one : contents.tensors) {
      DcpNewTensor tensor{std::move(one.whole), std::move(one.path), one.dtype, one.shape, {}};
      Origin origin;
      if (one.of_model) {
        const auto found = by_name.find(one.name);
        if (found == by_name.end())
          return make_error(Code::kInternal, "{}: tensor {} is not among its arrays", file.path,
                            ptc::quoted(one.name));
        origin.tensor = found->second;
        tensor.shape = model_.tensors()[origin.tensor].shape_in_files();
      } else {
        PTC_TRY(const uint64_t bytes, array_bytes(one.shape, one.dtype));
        file.layout.literals.for_each(
            one.offset, one.offset + bytes,
            [&](uint64_t, std::string_view piece) { origin.bytes += piece; });
        if (origin.bytes.size() != bytes)
          return make_error(Code::kInternal, "{}: {} is not among its literals", file.path,
                            ptc::quoted(tensor.name));
      }
      add_tensor(file.path, std::move(tensor), std::move(origin));
    }
    for (DcpNewValue& value : contents.values) add_value(file.path, std::move(value));
    for (const std::string& other : contents.others) left_out_ += other + " of " + file.path + "\n";
    return ok();
  }

  Result<> cut() {
    uint64_t all = 0;
    for (const DcpNewTensor& tensor : tensors_) {
      PTC_TRY(const uint64_t bytes, array_bytes(tensor.shape, tensor.dtype));
      all += bytes;
    }
    const uint64_t chunk_bytes = std::max(kChunkBytes, all / kMostChunks);
    for (size_t t = 0; t < tensors_.size(); ++t) {
      DcpNewTensor& tensor = tensors_[t];
      PTC_TRY(const uint64_t bytes, array_bytes(tensor.shape, tensor.dtype));
      const uint64_t rows = origins_[t].rows.size();
      if (rows == 0) {
        tensor.chunks = chunks_of(tensor.shape, bytes, chunk_bytes);
        continue;
      }
      const std::vector<Box> chunks =
          chunks_of(behind_first(tensor.shape), bytes / rows, chunk_bytes);
      for (uint64_t row = 0; row < rows; ++row)
        for (const Box& chunk : chunks)
          tensor.chunks.push_back({with_first(row, chunk.offset), with_first(1, chunk.extent)});
    }
    return ok();
  }

  Result<DcpTree> place(DcpNewCheckpoint made) {
    DcpTree tree;
    tree.metadata = std::move(made.metadata);
    tree.left_out = std::move(left_out_);
    std::vector<std::vector<Literals::Piece>> literals(made.files.size());
    std::vector<std::vector<ArraySlot>> arrays(made.files.size());
    for (size_t f = 0; f < made.files.size(); ++f)
      for (ZipWriter::Piece& piece : made.files[f].pieces)
        if (!piece.bytes.empty()) literals[f].push_back({piece.offset, std::move(piece.bytes)});
    for (size_t t = 0; t < tensors_.size(); ++t) {
      for (size_t c = 0; c < tensors_[t].chunks.size(); ++c) {
        const Box& box = tensors_[t].chunks[c];
        const auto& [file, offset] = made.places[t][c];
        if (box.empty()) continue;
        if (!origins_[t].rows.empty()) {
          const Box of_row{behind_first(box.offset), behind_first(box.extent)};
          arrays[file].push_back({origins_[t].rows[box.offset[0]], offset, box_alone(of_row)});
          continue;
        }
        if (origins_[t].tensor != Origin::kOwn) {
          arrays[file].push_back({origins_[t].tensor, offset, rows_of(origins_[t].tensor, box)});
          continue;
        }
        PTC_TRY(const uint64_t bytes, array_bytes(box.extent, tensors_[t].dtype));
        uint64_t before = 0;  // chunks are rows
        for (size_t i = 0; i < c; ++i) {
          PTC_TRY(const uint64_t of_one,
                  array_bytes(tensors_[t].chunks[i].extent, tensors_[t].dtype));
          before += of_one;
        }
        literals[file].push_back({offset, origins_[t].bytes.substr(before, bytes)});
      }
    }
    for (size_t f = 0; f < made.files.size(); ++f) {
      DcpTree::File file{std::move(made.files[f].name), {}};
      std::sort(literals[f].begin(), literals[f].end(),
                [](const auto& a, const auto& b) { return a.offset < b.offset; });
      file.layout.bytes = made.files[f].bytes;
      file.layout.literals = Literals(std::move(literals[f]));
      file.layout.arrays = std::move(arrays[f]);
      tree.files.push_back(std::move(file));
    }
    return tree;
  }

  /// A chunk of a tensor of the model: rows of it.
  SubTensor rows_of(uint32_t tensor, const Box& box) const {
    const TensorInfo& info = model_.tensors()[tensor];
    if (!info.folded_into) return box_alone(box);
    SubTensor part = info.whole();
    cut_rows(part, box.offset[0], box.extent[0]);
    return part;
  }

  const Model& model_;
  const DcpSources& sources_;
  std::vector<DcpNewTensor> tensors_;
  std::vector<Origin> origins_;  // by tensor
  std::vector<DcpNewValue> values_;
  std::unordered_set<std::string> names_;
  std::unordered_map<std::string, uint64_t> repeated_;  // names: how often
  std::string left_out_;
};

}  // namespace

Result<DcpTree> make_dcp_tree(std::span<const StateFile> files, const Model& model,
                              const DcpSources& sources) {
  return TreeMaker(model, sources).run(files);
}

}  // namespace ptc
