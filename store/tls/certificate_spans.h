// From when to when the certificates of a PEM file are good, for whoever is to be told in time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc {

struct CertificateSpan {
  int64_t not_before = 0, not_after = 0;  // seconds since the epoch
};

/// Reads the file: one for each certificate in it, in its order. Errors: it cannot be read.
Result<std::vector<CertificateSpan>> certificate_spans(const std::string& path);

}  // namespace ptc
