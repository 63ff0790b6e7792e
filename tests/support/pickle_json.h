// A pickle's values as JSON, for tests: what Python made of them, tests/clients/pickles.py writes
// in the same form.
#pragma once

#include <string>

#include "store/codec/pickle.h"

namespace ptc {

/// None, truth, whole numbers, texts and lists as JSON has them. The others are objects with one
/// key: "long" (hexadecimal digits of the bytes, or decimal), "float" (16 digits), "bytes",
/// "bytearray", "tuple", "dict" ([[key, value], …]), "set", "frozenset", "global" ("module name"),
/// "id"; "call": [how, called, arguments, [["items" | "pairs" | "state", …], …]]. "…" below
/// `most_depth`, and once `most_values` were written.
std::string pickle_json(const Pickle& pickle, PickleId id, size_t most_depth = 100,
                        size_t most_values = SIZE_MAX);

}  // namespace ptc
