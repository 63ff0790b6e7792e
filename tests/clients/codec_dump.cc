// What the codecs make of a file, as JSON, for scripts that compare it with Python.
//
//   ptc_codec_dump pickle FILE          its values (pickle_json.h)
//   ptc_codec_dump zip FILE             its members
//   ptc_codec_dump torch FILE           tensors, literals, what is opaque
//   ptc_codec_dump rewrite FILE NEW     lays the file out again; with "half" every tensor keeps
//                                       half of its first axis;
//                                       with "plain" DTensors become tensors
//   ptc_codec_dump dcp DIRECTORY        what its .metadata says, and where in the files the arrays
//                                       are
//   ptc_codec_dump time KIND FILE       {"seconds": of the fastest of five, "bytes": of memory at
//                                       most}
#include <fmt/ranges.h>

#include <boost/json/serialize.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "memory_meter.h"
#include "pickle_json.h"
#include "store/codec/dcp_metadata.h"
#include "store/codec/pickle.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_layout.h"
#include "store/codec/zip.h"

namespace ptc {
namespace {

std::string text(std::string_view value) {
  return boost::json::serialize(boost::json::string(value));
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fmt::print(stderr, "cannot read {}\n", path), std::exit(2);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void must(Result<> result) {
  if (!result) fmt::print("{{\"error\": {}}}\n", text(result.error().message())), std::exit(1);
}
template <class T>
T must(Result<T> result) {
  if (!result) fmt::print("{{\"error\": {}}}\n", text(result.error().message())), std::exit(1);
  return std::move(result).value();
}

std::string numbers(const auto& list) {
  return fmt::format("[{}]", fmt::join(list.begin(), list.end(), ","));
}

TorchFile torch_of(const std::string& bytes) {
  return must(TorchFile::read(read_at(std::as_bytes(std::span(bytes))), bytes.size()));
}

std::string sharding_json(const TorchSharding& sharding) {
  constexpr const char* kKinds[] = {"shard", "replicate", "partial", "strided"};
  std::vector<std::string> placements, names;
  for (const auto& placement : sharding.placements)
    placements.push_back(
        fmt::format(R"(["{}",{}])", kKinds[static_cast<int>(placement.kind)], placement.axis));
  const TorchMesh mesh = sharding.mesh ? *sharding.mesh : TorchMesh();
  for (const std::string& name : mesh.names) names.push_back(text(name));
  return fmt::format(
      R"({{"global_shape":{},"placements":{},"mesh_shape":{},"mesh_ranks":{},"names":{},"coordinate":{},"box":{}}})",
      numbers(sharding.global_shape), numbers(placements), numbers(mesh.shape), numbers(mesh.ranks),
      numbers(names), numbers(mesh.coordinate),
      sharding.box ? text(sharding.box->to_string()) : "null");
}

void dump_torch(const TorchFile& file) {
  std::vector<std::string> tensors, literals, opaque;
  for (const TorchTensor& t : file.tensors()) {
    tensors.push_back(fmt::format(
        R"({{"name":{},"path":{},"dtype":"{}","shape":{},"strides":{},"storage":{},"storage_offset":{},"offset":{},"bytes":{},"contiguous":{},"sharding":{}}})",
        text(t.name), text(torch_path_text(file.path(t.place))), dtype_name(t.dtype),
        numbers(t.shape), numbers(t.strides), t.storage, t.storage_offset, t.offset, t.bytes,
        t.contiguous,
        t.sharding == TorchTensor::kNone ? "null" : sharding_json(file.shardings()[t.sharding])));
  }
  for (const TorchLiteral& l : file.literals())
    literals.push_back(
        fmt::format(R"({{"name":{},"path":{},"value":{}}})", text(file.name(l.place)),
                    text(torch_path_text(file.path(l.place))), pickle_json(file.pickle(), l.node)));
  for (const TorchOpaque& o : file.opaque())
    opaque.push_back(fmt::format(R"({{"name":{},"reason":{}}})", text(o.name), text(o.reason)));
  fmt::print("{{\"tensors\":{},\"literals\":{},\"opaque\":{}}}\n", numbers(tensors),
             numbers(literals), numbers(opaque));
}

/// The elements of a tensor in C order, as far as `shape` goes.
void gather(const std::string& bytes, const TorchTensor& tensor, const Shape& shape, size_t axis,
            uint64_t at, std::string& out) {
  const uint64_t item = dtype_bits(tensor.dtype) / 8;
  if (axis == shape.size()) {
    out += bytes.substr(at, item);
    return;
  }
  for (uint64_t i = 0; i < shape[axis]; ++i)
    gather(bytes, tensor, shape, axis + 1, at + i * tensor.strides[axis] * item, out);
}

void rewrite(const std::string& bytes, const std::string& path, std::string_view how) {
  const TorchFile file = torch_of(bytes);
  std::vector<TorchNewTensor> tensors = same_tensors(file);
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].plain = how == "plain";
    if (how == "half" && !tensors[i].shape.empty()) tensors[i].shape[0] /= 2;
  }
  std::vector<std::string> contents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    gather(bytes, file.tensors()[i], tensors[i].shape, 0, file.tensors()[i].offset,
           contents.emplace_back());
    tensors[i].crc32 = zip_crc32(contents.back());
  }
  const TorchLayout layout = must(lay_out_torch_file(file, tensors));
  std::string out(layout.zip.file_bytes, '?');
  for (const ZipWriter::Piece& piece : layout.zip.pieces)
    out.replace(piece.offset, piece.bytes.size(), piece.bytes);
  for (size_t i = 0; i < tensors.size(); ++i) {
    PTC_CHECK(layout.tensors[i].bytes == contents[i].size() && layout.tensors[i].offset % 64 == 0);
    out.replace(layout.tensors[i].offset, contents[i].size(), contents[i]);
  }
  for (const TorchLayout::Copy& copy : layout.copies)
    out.replace(copy.offset, copy.bytes, bytes.substr(copy.source_offset, copy.bytes));
  std::ofstream(path, std::ios::binary) << out;
  dump_torch(torch_of(out));
}

void dump_dcp(const std::string& directory) {
  const std::string bytes = read_file(directory + "/.metadata");
  const DcpMetadata metadata = must(parse_dcp_metadata(bytes));
  std::vector<std::string> files, names, tensors, values;
  std::vector<uint64_t> lengths;
  for (const std::string& name : metadata.files) {
    files.push_back(read_file(directory + "/" + name));
    lengths.push_back(files.back().size());
    names.push_back(text(name));
  }
  must(check_dcp_files(metadata, lengths));
  for (const DcpTensor& tensor : metadata.tensors) {
    std::vector<std::string> chunks;
    for (const DcpChunk& chunk : tensor.chunks) {
      if (chunk.item.file == DcpItem::kNone) continue;
      const DcpArray array =
          must(find_dcp_array(read_at(std::as_bytes(std::span(files[chunk.item.file]))), chunk.item,
                              tensor.dtype, chunk.box.extent));
      chunks.push_back(
          fmt::format(R"({{"offset":{},"extent":{},"file":{},"begin":{},"bytes":{},"strides":{}}})",
                      numbers(chunk.box.offset), numbers(chunk.box.extent), chunk.item.file,
                      array.offset, array.bytes, numbers(array.strides)));
    }
    tensors.push_back(fmt::format(R"({{"name":{},"path":{},"dtype":"{}","shape":{},"chunks":{}}})",
                                  text(tensor.name), text(torch_path_text(tensor.path)),
                                  dtype_name(tensor.dtype), numbers(tensor.shape),
                                  numbers(chunks)));
  }
  for (const DcpValue& value : metadata.values)
    values.push_back(fmt::format(R"({{"name":{},"path":{},"file":{},"offset":{},"length":{}}})",
                                 text(value.name), text(torch_path_text(value.path)),
                                 value.item.file, value.item.offset, value.item.length));
  fmt::print("{{\"tensors\":{},\"values\":{},\"files\":{},\"version\":{}}}\n", numbers(tensors),
             numbers(values), numbers(names), text(metadata.version));
}

void measure(std::string_view kind, const std::string& bytes) {
  double best = 1e9;
  size_t peak = 0;
  for (int round = 0; round < 5; ++round) {
    fuzz::MemoryMeter meter;
    const auto start = std::chrono::steady_clock::now();
    if (kind == "pickle") must(Pickle::parse(bytes));
    else if (kind == "dcp") must(parse_dcp_metadata(bytes));
    else torch_of(bytes);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
    peak = std::max(peak, meter.peak_bytes());
  }
  fmt::print("{{\"seconds\":{},\"bytes\":{}}}\n", best, peak);
}

int run(const std::vector<std::string>& words) {
  if (words.size() == 3 && words[0] == "time") return measure(words[1], read_file(words[2])), 0;
  if (words.size() < 2) return fmt::print(stderr, "usage: see the source\n"), 2;
  if (words[0] == "dcp") return dump_dcp(words[1]), 0;
  const std::string bytes = read_file(words[1]);
  if (words[0] == "pickle") {
    const Pickle pickle = must(Pickle::parse(bytes));
    fmt::print("{}\n", pickle_json(pickle, pickle.root()));
  } else if (words[0] == "zip") {
    const ZipDirectory directory =
        must(ZipDirectory::read(read_at(std::as_bytes(std::span(bytes))), bytes.size()));
    std::vector<std::string> members;
    for (const ZipMember& m : directory.members())
      members.push_back(fmt::format("[{},{},{},{},{}]", text(m.name), m.header_offset,
                                    m.data_offset, m.bytes, m.crc32));
    fmt::print("{}\n", numbers(members));
  } else if (words[0] == "torch") {
    dump_torch(torch_of(bytes));
  } else if (words[0] == "rewrite" && words.size() > 2) {
    rewrite(bytes, words[2], words.size() > 3 ? words[3] : "");
  } else {
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace ptc

int main(int argc, char** argv) { return ptc::run({argv + 1, argv + argc}); }
