// A file of torch.save's with tensors of several, as where stages of a pipeline have others than
// before.
#pragma once

#include <span>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "store/base/error.h"

namespace ptc {

/// Tensors are at the paths at which these files had them; of `others` no more are read than need
/// be. What is beside tensors in a dict, or deeper beside them, comes with them; of all else each
/// value is that of the first file that has one there. A list without tensors is one value, but for
/// the parameters of an optimizer's groups: of these a file has those that it has the tensors of.
Result<FileLayout> merge_torch_files(std::span<const NewArray> arrays, WrittenTorchFileRef first,
                                     std::span<const FileOutline> others);

}  // namespace ptc
