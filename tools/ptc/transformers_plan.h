// How Hugging Face transformers would cut a model, as an installation of it says.
#pragma once

#include <boost/json/object.hpp>
#include <optional>
#include <string>

#include "store/base/error.h"

namespace ptc::cli {

/// Its plan of tensor parallelism for the model_type of a config.json, and of the model within it
/// ("text_config"): {"layers.*.self_attn.q_proj": "colwise"}; empty for a type without one,
/// nullopt for one that it does not know. `python` is run as this user, and nothing of the model's
/// own code. Errors: there is no such program, it has no transformers (kNotFound), no answer in a
/// minute.
Result<std::optional<boost::json::object>> transformers_plan(const std::string& python,
                                                             const std::string& config_path);

}  // namespace ptc::cli
