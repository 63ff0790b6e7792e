// Where the bytes of files lie that are computed when they are read, for who would rather take them
// from there into memory of its own than have them computed here first.
#pragma once

#include <string>

#include "reshard/checkpoint/checkpoint.h"

namespace ptc {

/// What of the set is a .safetensors, is stored nowhere as it is, and lies as a whole in files of
/// this checkpoint that are stored on this node:
///
///   {"files": {"model.safetensors": {"bytes": 8192, "header": "{…}", "copies": [[0, 4096, 136,
///   2048], …]}},
///    "sources": ["layouts/tp4-pp1-dp1/rank/0/model.safetensors", …]}
///
/// `header` is the JSON text of the file, behind the eight bytes that say how long it is. A copy is
/// [source, offset in it, offset in the file, bytes of a run, and of each level, the outermost
/// first: count, stride in the source, stride in the file] (store/tensor/strided_copy.h). What no
/// copy reaches is zero. Sources are relative to the checkpoint. The same bytes are read there
/// whatever becomes of the layout; if they are moved meanwhile they are computed then.
/// Costs a plan of each of these files. Threads: any.
std::string byte_sources_text(const Checkpoint& checkpoint, const FileSet& files);

/// Where parts of each tensor lie in files that are stored on this node, for who wants any box of
/// it; tensors are in the order of meta.json:
///
///   {"tensors": [[[0, 4096, [16, 64], [0, 0], [16, 0], [16, 64]], …], …], "sources": ["layouts/…",
///   …]}
///
/// A part is [source, offset in it, shape of the array there, where the part begins in that, where
/// it begins in the tensor, its extent]. Parts that are equal are there once; not those of flat
/// cuts (ZeRO-1), nor of types of less than a byte. Cost: O(parts of the node). Threads: any.
std::string tensor_sources_text(const Checkpoint& checkpoint);

}  // namespace ptc
