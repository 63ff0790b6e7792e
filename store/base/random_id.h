#pragma once

#include <string>

#include "store/base/error.h"

namespace ptc {

/// 16 hexadecimal digits, never used twice.
Result<std::string> random_id();

}  // namespace ptc
