// Where a value lies in the nested dicts, lists and tuples of a pickle, as one line of text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

struct TorchStep {
  /// kTypesKey: a tuple of torch's types, "torch.bfloat16,torch.float32".
  enum class Kind : uint8_t {
    kKey,
    kNumberKey,
    kListIndex,
    kTupleIndex,
    kTypesKey
  } kind = Kind::kKey;
  std::string key;     // kKey, kTypesKey
  int64_t number = 0;  // of the others
  friend bool operator==(const TorchStep&, const TorchStep&) = default;
};

/// Two texts of a path. The *name* is the one that PyTorch's distributed checkpointing gives: keys
/// and numbers joined by dots, as they are: {"model": {"a.b": {0: [x]}}} has x at "model.a.b.0.0".
/// Two paths can have the same name.
///
/// The *exact* text is different for different paths, and parse_torch_path() reads it. Steps are
/// joined by dots, too. In keys these are written as %XX: '%', '.', '/', control characters; the
/// empty key is a lone "%". A key that is a number is "%i7", an element of a list "%l7", one of a
/// tuple "%t7": the x above is at "model.a%2Eb.%i0.%l0". One of types is "%d" and their text. No
/// steps: the empty text.
std::string torch_name(std::span<const TorchStep> path);
std::string torch_path_text(std::span<const TorchStep> path);
/// kInvalidArgument for what torch_path_text never returns.
Result<std::vector<TorchStep>> parse_torch_path(std::string_view text);

/// Adds a step to a text; for who composes it piece by piece.
void append_torch_name(std::string& name, std::string_view step);
void append_torch_key(std::string& text, std::string_view key, bool first);

}  // namespace ptc
