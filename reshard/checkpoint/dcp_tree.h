// dcp/: a checkpoint as PyTorch's distributed checkpointing reads it, whole tensors in chunks.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/manifest.h"
#include "reshard/plan/planner.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"

namespace ptc {

/// What was written of a checkpoint, beside its tensors' bytes.
struct DcpSources {
  std::map<std::string, std::vector<DcpTable>>
      tables;                                        // by directory: of distributed checkpointing
  std::map<std::string, std::string_view> outlines;  // by path: of one of torch's files
  /// Files are sections of one state: `optim.safetensors` has what is at "optim" in it.
  bool sections = false;
};

struct DcpTree {
  std::string metadata;
  struct File {
    std::string name;
    ImageLayout layout;
  };
  std::vector<File> files;
  std::string left_out;  // lines that say what is not in it, and why
};

/// `files` are those of the only rank of LayoutSpec(). Names are those that their writer gave the
/// values in the nested state: in DCP's tables and torch's files with all that encloses the model,
/// elsewhere the tensors' own, below their section if files are such. Of two files that have the
/// same, the second's are below its path.
Result<DcpTree> make_dcp_tree(std::span<const StateFile> files, const Model& model,
                              const DcpSources& sources);

}  // namespace ptc
