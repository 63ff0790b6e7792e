// What a node made of a plan that several carry out, and how they name that plan to each other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/checksum.h"

namespace ptc {

/// What a node made of a plan: its own images.
struct PlanPart {
  std::string plan;                                      // PlanName::digest
  std::vector<std::pair<uint32_t, std::string>> images;  // target → image
  std::vector<std::pair<uint32_t, std::string>> copies;  // ChangePlan::copies → image
  struct Sum {
    uint32_t tensor;
    Box box;
    Checksum sum;
  };
  std::vector<Sum> sums;  // of all arrays in the images, and of kept ones

  std::string to_text() const;
  static Result<PlanPart> from_text(std::string_view text);
};

/// A plan that several nodes carry out, as they name it to each other: equal where all of it is.
struct PlanName {
  std::string id;      // of the checkpoint
  std::string digest;  // of the request for a part of it, and of its files
};

using NodeParts = std::vector<std::pair<std::string, PlanPart>>;  // by node

}  // namespace ptc
