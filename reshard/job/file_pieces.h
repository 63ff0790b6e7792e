// Files that describe a checkpoint, as nodes give them to each other: in pieces, each an answer of
// its own, so that neither their size nor the time that they take is bounded by one message.
//
//   request  {"id", "file", "offset", "most", "sum": bool}
//   answer   {"bytes": of the whole file, "sum"?: its checksum} '\n' bytes from `offset` on
//
// Such a file has one content for ever, so its pieces may come of any nodes that have it. The first
// that is asked of each node asks for the sum, too: of one with another content nothing is put
// behind what came of others. What has come in the end is what was summed up, or is asked for anew.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"

namespace ptc {

/// How nodes give each other such files.
struct PieceSizes {
  uint64_t piece = 4 << 20;
  /// What all nodes together need no more for than that goes to each with the question whether it
  /// wants it.
  uint64_t with_question = 256 << 10;
  /// Of those that have got a file each gives it to so many more.
  unsigned fan_out = 4;
};

/// What a whole file is known by.
struct FileFacts {
  uint64_t bytes = 0;
  std::string sum;  // 32 hexadecimal digits (store/tensor/checksum.h)
  friend bool operator==(const FileFacts&, const FileFacts&) = default;

  static FileFacts of(std::string_view content);
  /// Reads it once. kNotFound: there is none.
  static Result<FileFacts> of_file(const std::string& path);
};

/// [bytes, "sum"], as it is persisted.
json::value to_json(const FileFacts& facts);
Result<FileFacts> file_facts_from(const json::value& value);

/// A checkpoint's file, by the checkpoint's id.
struct NamedFile {
  std::string id, file;
  std::optional<FileFacts> facts = {};  // agreed on
  friend bool operator==(const NamedFile& a, const NamedFile& b) {
    return a.id == b.id && a.file == b.file;
  }
  friend auto operator<=>(const NamedFile& a, const NamedFile& b) {
    return std::tie(a.id, a.file) <=> std::tie(b.id, b.file);
  }
};

/// Files that other nodes were asked for: why one cannot be had; a content that there is no room
/// for here; or nothing, and it is here by now.
using FetchedFiles = std::map<NamedFile, Result<std::optional<std::string>>>;

struct PieceRequest {
  NamedFile name;
  uint64_t offset = 0, most = 0;
  bool sum = false;

  std::string to_text() const;
};

/// Answers one. kNotFound: no such file; kInvalidArgument: it is not so long.
Result<std::string> read_piece(const std::string& path, const PieceRequest& request);

/// Asks a node, and waits for its answer.
using AskForPiece = std::function<Result<std::string>(const std::string& node, std::string body)>;

struct PieceOptions {
  uint64_t piece = PieceSizes().piece;
  uint64_t limit = uint64_t{1} << 32;  // of the whole
  std::optional<FileFacts> facts;  // what it must be; not given: what the first says that has it
  std::stop_token stop;
  std::function<void(uint64_t bytes, uint64_t of_bytes)> progress;
};

/// The content of a file that these nodes may have, who are asked in this order; from where one
/// ends the next goes on. kNotFound: all say that they have it not; kUnavailable: one that may have
/// it does not answer, or none has it as it must be; kCancelled.
Result<std::string> fetch_in_pieces(const AskForPiece& ask, const std::vector<std::string>& nodes,
                                    const NamedFile& name, const PieceOptions& options);

}  // namespace ptc
