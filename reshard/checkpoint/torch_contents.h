// What a file of torch.save's has under a layout, with the names and the places in the nested state
// that its reader sees.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/plan/literals.h"
#include "store/base/error.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/torch_path.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

struct TorchContents {
  struct Tensor {
    std::string name;   // in the checkpoint
    std::string whole;  // torch_name() of its path
    std::vector<TorchStep> path;
    uint64_t offset = 0;  // in the file
    DType dtype = DType::kF32;
    Shape shape;
    bool of_model = true;  // else it is its rank's own, and among the literals
  };
  std::vector<Tensor> tensors;
  std::vector<DcpNewValue> values;
  std::vector<std::string> others;  // names of what is neither, and why
};

/// `literals` are of a file that FileFormat::lay_out() made, or FileFormat::tensors() found; names
/// are without what those of `like` are without, an outline of a file of the same name.
Result<TorchContents> torch_contents(const Literals& literals, uint64_t file_bytes,
                                     std::string_view like);

}  // namespace ptc
