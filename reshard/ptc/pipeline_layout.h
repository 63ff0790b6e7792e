// What each pipeline stage has, as Megatron-Core's --pipeline-model-parallel-layout says it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// What one stage, or one stretch of layers with vpp, has: how many of each.
struct StageParts {
  uint64_t layers = 0, embeddings = 0, heads = 0, mtp = 0;
  friend bool operator==(const StageParts&, const StageParts&) = default;
};

/// "Et*3|(tt|)*2t,m|L": stages end at "|"; E is the embedding, t a layer, m a layer that predicts
/// further tokens, L the head with its loss; "*N" repeats what is before it, a letter or what is in
/// parentheses; commas and spaces say nothing. At least one. kInvalidArgument: it is none, says
/// where, or has more than `most` stages.
Result<std::vector<StageParts>> parse_pipeline_layout(std::string_view text, size_t most);

}  // namespace ptc
