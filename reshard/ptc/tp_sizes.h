// Which numbers of tensor-parallel ranks would do, for refusals of others.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ptc {

/// "tp = 2, 3, 6 would do". `fits` is asked of the first and the last rank of so many.
std::string tp_that_fits(const std::function<bool(uint32_t rank, uint32_t ranks)>& fits);

}  // namespace ptc
