// Names of the files of DeepSpeed's checkpoints (intake/deepspeed_tree.cc).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ptc {

/// What the name of a file says.
struct DeepSpeedName {
  enum class Kind : uint8_t {
    kModel,      // of all data-parallel ranks
    kZero,       // optimizer state of one
    kZeroModel,  // the model of stage 3, of one
    kUniversal,  // one state of one parameter
    kExpert      // of a mixture of experts
  } kind = Kind::kModel;
  std::string_view folder;  // where its like are: "global_step100/"
  uint32_t dp = 0, mp = 0;
  std::string_view parameter, state;  // of kUniversal
  friend bool operator==(const DeepSpeedName&, const DeepSpeedName&) = default;
};
/// nullopt: it is none of these. `path`: below its rank.
std::optional<DeepSpeedName> deepspeed_name(std::string_view path);

}  // namespace ptc
