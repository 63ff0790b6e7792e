// The oracle: what each rank holds of a model, element by element, written from the definitions of
// tensor and pipeline parallelism alone. Shares no code with reshard/ but plain types, reads no rule
// set, and is as slow as it is obvious. Families: llama (mistral, qwen2), gpt2, bert, mixtral.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"

namespace ptc::testing {

struct SlowModel {
  std::string family;  // "llama", "gpt2", "bert", "mixtral"
  uint64_t heads = 1, kv_heads = 1, vocab = 0, layers = 1, experts = 0;
  bool tied = false;
};

/// The bytes that a rank with these coordinates holds of a tensor (its local array, padding zero),
/// and the local shape; nullopt if it holds nothing of it. `bytes` are the whole tensor's.
struct SlowPart {
  std::vector<uint64_t> shape;
  std::string bytes;
};
std::optional<SlowPart> slow_part(const SlowModel& model, const TensorInfo& tensor,
                                  const std::string& bytes, const LayoutSpec& spec,
                                  const RankCoords& rank);

}  // namespace ptc::testing
