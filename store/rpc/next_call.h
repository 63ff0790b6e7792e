// Calls of one node that follow each other, each from the answer before.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "store/base/error.h"

namespace ptc {

struct NextCall {
  std::string body;
  std::chrono::milliseconds after{};  // so long after the answer
};

/// Of several nodes that are asked at the same time: what number i is asked after this answer;
/// nothing: that was its last. Called on the thread that waits for the answers of all, so it does
/// not take long; or, of those that have one each, on theirs. Throws nothing but that there is no
/// memory.
using AfterAnswer =
    std::function<std::optional<NextCall>(size_t i, const Result<std::string>& answer)>;

}  // namespace ptc
