// What dcp.save would have written.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/pickle.h"
#include "store/codec/pickle_writer.h"

namespace ptc::testing {

/// A value's archive, of the opcodes of its pickle.
inline std::string dcp_value(const std::string& opcodes) {
  const std::string text = "\x80\x02" + opcodes + ".";
  const Pickle pickle = Pickle::parse(text).value();
  return save_value(pickle, pickle.root()).value();
}

/// By name. `contents`: by tensor and chunk.
inline std::map<std::string, std::string> dcp_files(
    const std::vector<DcpNewTensor>& tensors, const std::vector<DcpNewValue>& values,
    const std::vector<std::vector<std::string>>& contents, uint64_t file_bytes) {
  const DcpNewCheckpoint made = compose_dcp(tensors, values, file_bytes).value();
  std::map<std::string, std::string> result{{".metadata", made.metadata}};
  std::vector<std::string*> by_number;
  for (const DcpNewFile& file : made.files) {
    std::string& text = result[file.name];
    text.resize(file.bytes);
    for (const ZipWriter::Piece& piece : file.pieces)
      text.replace(piece.offset, piece.bytes.size(), piece.bytes);
    by_number.push_back(&text);
  }
  for (size_t i = 0; i < tensors.size(); ++i)
    for (size_t c = 0; c < contents[i].size(); ++c)
      by_number[made.places[i][c].file]->replace(made.places[i][c].offset, contents[i][c].size(),
                                                 contents[i][c]);
  return result;
}

/// Halves of the rows of each tensor in one item, in so many files or a few more.
inline std::map<std::string, std::string> dcp_files(const std::vector<TensorInfo>& tensors,
                                                    const std::vector<std::string>& contents,
                                                    uint64_t files,
                                                    const std::vector<DcpNewValue>& values) {
  std::vector<DcpNewTensor> made_of;
  std::vector<std::vector<std::string>> parts;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    DcpNewTensor& tensor = made_of.emplace_back();
    tensor.name = tensors[i].name;
    tensor.dtype = tensors[i].dtype;
    tensor.shape = tensors[i].shape;
    Box top = Box::whole(tensor.shape), rest = top;
    top.extent[0] = (tensor.shape[0] + 1) / 2;
    rest.offset[0] = top.extent[0];
    rest.extent[0] -= top.extent[0];
    const size_t length = contents[i].size() / tensor.shape[0] * top.extent[0];
    tensor.chunks.push_back(top);
    parts.push_back({contents[i].substr(0, length)});
    if (!rest.empty()) {
      tensor.chunks.push_back(rest);
      parts.back().push_back(contents[i].substr(length));
    }
    bytes += contents[i].size();
  }
  return dcp_files(made_of, values, parts, bytes / files);
}
inline std::map<std::string, std::string> dcp_files(const std::vector<TensorInfo>& tensors,
                                                    const std::vector<std::string>& contents,
                                                    uint64_t files) {
  return dcp_files(tensors, contents, files, {{"epoch", {}, dcp_value("K\7")}});
}

}  // namespace ptc::testing
