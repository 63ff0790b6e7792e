// How samples of a source look in the files of a tree, one by one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/sample_source.h"
#include "dataset/tree/virtual_file.h"
#include "dataset/tree/window.h"

namespace ptc {

/// Threads: any.
class SampleForm {
 public:
  virtual ~SampleForm() = default;
  /// From the index alone. `repeat`: how often the file has the sample already; a tar then gives it
  /// another key.
  virtual uint64_t bytes(const SampleSource& source, uint64_t id, uint64_t repeat) const = 0;
  /// Names so many bytes to the window.
  virtual Result<> render(const SampleSource& source, uint64_t id, uint64_t repeat,
                          Window& window) const = 0;
  /// Whether it asks for what it has named (Window::last).
  virtual bool reads_back() const { return false; }
};

/// Of a kind of shard that trees_of() lists.
const SampleForm& form_of(TreeKind kind, SourceFormat format);

/// A field as a file shows it: its extent, and the newline that a last line of JSONL lacks.
struct Payload {
  std::string name;
  Extent extent;
  bool newline = false;
  uint64_t bytes() const { return extent.bytes + newline; }
};
/// The fields of a sample, sorted by name.
Result<std::vector<Payload>> payloads_of(const SampleSource& source, uint64_t id);
Result<> render_payload(const Payload& payload, Window& window);

/// The columns of MDS shards made of this source.
std::vector<MdsColumn> columns_of(const SampleSource& source);

}  // namespace ptc
