// A model's directory as Hugging Face keeps it: config.json and files of tensors, of which only the
// headers are read.
#pragma once

#include <optional>
#include <string>

#include "reshard/ptc/model.h"
#include "store/base/error.h"

namespace ptc::cli {

/// Whether the text is a path (with a slash: "llama" is a job) of a directory with files of
/// tensors.
bool is_model_directory(const std::string& text);

/// The model whose whole tensors lie in `directory` (not below it), by these rules, or those that a
/// commit of it would choose. kInvalidArgument: which file is wrong, or that no file has tensors.
Result<Model> model_of_directory(const std::string& directory,
                                 const std::optional<std::string>& rules_text);

}  // namespace ptc::cli
