// A checkpoint of one tensor that two ranks wrote, and of one file without: all of it is said here.
#pragma once

#include <bit>
#include <memory>
#include <string>
#include <string_view>

#include "reshard/checkpoint/checkpoint.h"

namespace ptc::testing {

/// layers.0.w, F32 [4, 3], by rows over tp 2; rank 1 wrote rng.pt, too. Nothing is read of it.
/// `results` outlives it.
inline std::shared_ptr<Checkpoint> small_checkpoint(SharedResults& results) {
  std::string header = R"({"layers.0.w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  static_assert(std::endian::native == std::endian::little);
  header.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
  constexpr std::string_view kSum = "0123456789abcdef0123456789abcdef";
  std::string files;
  for (int rank = 0; rank < 2; ++rank)
    files += fmt::format(
        R"({{"rank": {}, "path": "model.safetensors", "bytes": {}, "image": "i{}",)"
        R"( "has_tensors": true, "set": "", "header_bytes": {}, "header_offset": 0}}, )",
        rank, header.size() + 24, rank, header.size());
  const std::string text = fmt::format(
      R"({{"format": "ptc-manifest/1", "name": "base", "id": "base-1", "time_ns": 1, "uid": 0,)"
      R"( "gid": 0, "mode": 493, "written_spec": {{"tp": 2, "pp": 1, "dp": 1}},)"
      R"( "rules": "{{\"format\": \"ptc-rules/1\", \"family\": \"mine\", \"prefixes\": [\"\"],)"
      R"( \"facts\": {{\"heads\": 2}}, \"rules\": [{{\"names\": [\"layers.{{layer}}.w\"],)"
      R"( \"cut\": {{\"axis\": 0, \"heads\": \"heads\"}}}}]}}", "facts": {{"heads": 2}}, "tied": false,)"
      R"( "tensors": [{{"name": "layers.0.w", "file": "model.safetensors", "dtype": "F32",)"
      R"( "shape": [4, 3], "vocab_multiple": 0, "pad_single_rank": false, "checksum": "{0}"}}],)"
      R"( "files": [{1}{{"rank": 1, "path": "rng.pt", "bytes": 3, "image": "i2",)"
      R"( "has_tensors": false, "checksum": "{0}"}}], "padding": []}})",
      kSum, files);
  auto facts = CheckpointFacts::read(text, header, results);
  return std::make_shared<Checkpoint>(std::move(facts).value(), &results, nullptr,
                                      [] { return false; });
}

}  // namespace ptc::testing
